"""Who can take part: clients by their stable ids, and the nodes that serve them. Knows nothing of Flower.

A node answers once which clients it serves. What it says is not trusted further than needed: a node whose answer does
not fit the others' is left out with a reason, and never ends a run that is under way.
"""

from __future__ import annotations

import reprlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .protocol import CLIENT_IDS, CODE_HASH, HOSTING, LOGICAL, NUM_PARTITIONS, OWN, PARTITION_ID
from .rules import client_order

Node = int | str
"""Flower's node id, or in the older API a client proxy's cid."""

_POLL_SECONDS = 0.5
_LATE_SECONDS = 30.0
"""How long a round that could start waits for the answer of a node that joined late."""
_LONGEST_ID = 200
_LONGEST_HASH = 200
_MOST_PARTITIONS = 10**6


class RosterError(RuntimeError):
    """The nodes that are needed did not connect, did not answer, or answered something unusable."""


class NoAnswerError(RosterError):
    """A node has not answered yet; it may do so when it is asked again."""


class CodeMismatchError(RosterError):
    """A node runs other code than the server."""


@dataclass(frozen=True)
class Answer:
    """A node's answer to the question which clients it serves (see ``protocol.py``)."""

    client_ids: tuple[str, ...]
    hosting: str
    num_partitions: int = 0
    code_hash: str | None = None
    partition_id: int | None = None

    @property
    def kind(self) -> tuple[str, int]:
        """What the nodes of one federation agree in: own their clients, or share a number of partitions."""
        return self.hosting, self.num_partitions

    @staticmethod
    def parse(record: Mapping[str, object]) -> Answer:
        """From the record's values.

        Parameters
        ----------
        record : mapping
            Keys of ``protocol.py``; client ids as a list of str, or as one comma-separated str (legacy API).

        Raises
        ------
        RosterError
            If a key is missing or has an unusable value.
        """
        ids = record.get(CLIENT_IDS)
        names = [name for name in ids.split(",") if name] if isinstance(ids, str) else ids
        if not isinstance(names, list) or not all(_is_name(name, _LONGEST_ID) for name in names):
            raise RosterError(f"{CLIENT_IDS!r} must be a list of names of up to {_LONGEST_ID} printable characters")
        hosting, code_hash = record.get(HOSTING), record.get(CODE_HASH)
        if hosting not in (LOGICAL, OWN):
            raise RosterError(f"{HOSTING!r} must be {LOGICAL!r} or {OWN!r}, got {reprlib.repr(hosting)}")
        # Screens compare clients with each other, so a site must not be many of them.
        if hosting == OWN and len(names) != 1:
            raise RosterError(f"a node with a client-id of its own is one client, and this one claims {len(names)}")
        if len(names) > _MOST_PARTITIONS or len(set(names)) != len(names):
            raise RosterError(f"{CLIENT_IDS!r} must be at most {_MOST_PARTITIONS} different names")
        if code_hash is not None and not _is_name(code_hash, _LONGEST_HASH):
            raise RosterError(f"{CODE_HASH!r} must be a checksum, got {reprlib.repr(code_hash)}")
        partitions = _partition_number(NUM_PARTITIONS, record.get(NUM_PARTITIONS, 0)) if hosting == LOGICAL else 0
        part = record.get(PARTITION_ID) if hosting == OWN else None
        return Answer(
            tuple(names),
            str(hosting),
            partitions,
            None if code_hash is None else str(code_hash),
            None if part is None else _partition_number(PARTITION_ID, part),
        )


def _is_name(value: object, longest: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= longest and value.isprintable()


def _partition_number(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_PARTITIONS:
        raise RosterError(f"{key!r} must be an integer in [0, {_MOST_PARTITIONS}], got {reprlib.repr(value)}")
    return value


Ask = Callable[[list[Node], float], Mapping[Node, Answer | RosterError]]
"""Asks nodes which clients they serve, within so many seconds."""


@dataclass
class Roster:
    """What the server knows about nodes and clients.

    Parameters
    ----------
    code_hash : str or None
        What the nodes must run; None accepts anything.
    deployed : bool, default False
        Whether the nodes are other people's machines. That they are simulated ones, and how many, is then believed only
        of as many nodes as the run needs anyway: else one site, answering first, could shut out all others.

    Attributes
    ----------
    silent : dict of Node to str
        Nodes that do not take part, with the reason.
    """

    code_hash: str | None = None
    deployed: bool = False
    silent: dict[Node, str] = field(default_factory=dict)
    _answered: dict[Node, Answer] = field(default_factory=dict)
    _unanswered: set[Node] = field(default_factory=set)
    _known: dict[Node, tuple[str, int | None] | None] = field(default_factory=dict)
    _kind: tuple[str, int] | None = None
    _complete: bool = False
    _gave_up: bool = False

    @property
    def answers(self) -> dict[Node, Answer]:
        """Nodes that take part, in the order in which they joined: until the first round, those of the larger kind."""
        kinds = Counter(answer.kind for answer in self._answered.values())
        kind = self._kind or max(kinds, key=kinds.__getitem__, default=None)
        return {node: answer for node, answer in self._answered.items() if answer.kind == kind}

    @property
    def node_of(self) -> dict[str, Node]:
        """The node that serves each client; of two that claim the same one, the node that ever took part first."""
        nodes: dict[str, Node] = {}
        rank = {node: position for position, node in enumerate(self._known)}
        for node, answer in sorted(self.answers.items(), key=lambda item: rank.get(item[0], len(rank))):
            for client in answer.client_ids:
                nodes.setdefault(client, node)
        return nodes

    @property
    def client_ids(self) -> tuple[str, ...]:
        """All clients that can be reached, in stable order."""
        return tuple(sorted(self.node_of, key=client_order))

    @property
    def logical(self) -> bool:
        """Whether nodes are simulated ones that share the run's clients."""
        return any(answer.hosting == LOGICAL for answer in self.answers.values())

    @property
    def divided(self) -> bool:
        """Whether clients hold parts of common data, and not only data of their own."""
        return self.logical or any(answer.partition_id is not None for answer in self.answers.values())

    def wait(
        self, online: Callable[[], Iterable[Node]], ask: Ask, *, nodes: int, clients: int, timeout: float
    ) -> list[str]:
        """Wait until enough nodes are ready, and learn which clients they serve.

        Parameters
        ----------
        online : callable () -> iterable of Node
            The nodes that are connected now.
        ask : callable
            See `Ask`.
        nodes, clients : int
            The least number of nodes and of clients. Of simulated nodes all must be there.
        timeout : float
            Seconds to wait for them.

        Returns
        -------
        list of str
            What is worth a warning: nodes that were left out since the last call, and clients claimed twice.

        Raises
        ------
        CodeMismatchError
            If a node runs other code, before the first round.
        RosterError
            Before the first round, if something is still missing after `timeout` seconds, or two nodes claim the same
            client or the same part of the data; at once, if enough nodes answered and some of them, by their answer,
            do not take part. A run that is under way goes on with whom it can reach.
        """
        # Nodes that were waited for in vain are not waited for again in every round.
        deadline = time.monotonic() + (0.0 if self._gave_up else timeout)
        warnings: list[str] = []
        while True:
            new = self._forget_absent(online())
            missing = self.missing(nodes, clients)
            # Who did not answer is asked again only while somebody is missing.
            questions = sorted(new if missing is None else new | self.silent.keys(), key=str)
            if questions:
                patience = max(1.0, deadline - time.monotonic() if missing else min(timeout, _LATE_SECONDS))
                for node, answer in ask(questions, patience).items():
                    warnings += self._take(node, answer)
                missing = self.missing(nodes, clients)
            if missing is None:
                return warnings + self._begin()
            if not self._complete and self._refused(nodes):
                raise RosterError(f"the run cannot start, since nodes refuse it: {missing}")
            if time.monotonic() >= deadline and self._complete:
                news = [] if self._gave_up else [f"the run goes on after waiting for {timeout:g} s: {missing}"]
                self._gave_up = True
                return warnings + news
            if time.monotonic() >= deadline:
                raise RosterError(f"after waiting for {timeout:g} s {missing}")
            time.sleep(_POLL_SECONDS)

    def missing(self, nodes: int, clients: int = 0) -> str | None:
        """What is missing before a round can start, in words; None if nothing is."""
        needed, reasons = self._needed(nodes), self._reasons()
        if (ready := len(self.answers)) < needed:
            return f"{ready} of {needed} nodes are ready, {needed - ready} missing{self._hint(needed)}{reasons}"
        if len(self.client_ids) < max(1, clients):
            return f"{len(self.client_ids)} of {max(1, clients)} clients are reachable{reasons}"
        return None

    def _needed(self, nodes: int) -> int:
        parts = self._partitions()
        return parts if parts and not self.deployed else max(1, nodes, parts)

    def _partitions(self) -> int:
        return max((answer.num_partitions for answer in self.answers.values()), default=0)

    def _hint(self, needed: int) -> str:
        parts = self._partitions()
        return (
            f"; the nodes say num-partitions={parts}: if that is all, lower min-nodes (min_available_nodes)"
            if 0 < parts < needed
            else ""
        )

    def _begin(self) -> list[str]:
        """Settle who takes part: whoever is of another kind than the run's does not."""
        odd, self._gave_up = self._odd(), False
        self.silent |= odd
        for node in odd:
            del self._answered[node]
        if not self._complete:
            self._complete, self._kind = True, next(iter(self._answered.values())).kind
            for node, answer in self._answered.items():
                self._remember(node, answer)
        return [f"node {node} does not take part: {reason}" for node, reason in odd.items()]

    def _remember(self, node: Node, answer: Answer) -> None:
        self._known.setdefault(node, (answer.client_ids[0], answer.partition_id) if answer.hosting == OWN else None)

    def _odd(self) -> dict[Node, str]:
        """Nodes that answered, but say something else about the federation than most."""
        answers = self.answers
        kind = next((answer.kind for answer in answers.values()), None)
        others = {node: answer.kind for node, answer in self._answered.items() if node not in answers}
        return {node: _other_kind(other, kind) for node, other in others.items() if kind is not None}

    def _refused(self, nodes: int) -> bool:
        """Whether as many nodes as needed have answered, all that are there, and some do not take part."""
        refusals = (self.silent.keys() - self._unanswered) | self._odd().keys()
        return bool(refusals) and not self._unanswered and len(self.answers) + len(refusals) >= self._needed(nodes)

    def _reasons(self) -> str:
        """Why nodes do not take part; each reason once, however many give it."""
        nodes: dict[str, list[Node]] = {}
        for node, reason in (self.silent | self._odd()).items():
            nodes.setdefault(reason, []).append(node)
        return "".join(
            f"\n  {f'node {who[0]}' if len(who) == 1 else f'{len(who)} nodes'}: {reason}"
            for reason, who in nodes.items()
        )

    def _forget_absent(self, online: Iterable[Node]) -> set[Node]:
        nodes = set(online)
        for known in (self._answered, self.silent):
            for node in known.keys() - nodes:
                del known[node]
        self._unanswered &= nodes
        return nodes - self._answered.keys() - self.silent.keys()

    def _take(self, node: Node, answer: Answer | RosterError) -> list[str]:
        if isinstance(answer, NoAnswerError):
            self._unanswered.add(node)
        else:
            self._unanswered.discard(node)
        objection = str(answer) if isinstance(answer, RosterError) else self._objection(node, answer)
        if objection is not None or isinstance(answer, RosterError):
            news = self.silent.get(node) != objection
            self.silent[node] = str(objection)
            return [f"node {node} does not take part: {objection}"] if news else []
        self.silent.pop(node, None)
        serving = {client: n for n, other in self._alike(answer).items() for client in other.client_ids}
        taken = sorted(set(answer.client_ids) & serving.keys(), key=client_order)
        self._answered[node] = answer
        if self._complete:
            self._remember(node, answer)
        if not taken:
            return []
        claim = f"node {node} claims clients that node {serving[taken[0]]} serves already: {', '.join(taken[:5])}"
        if not self._complete:
            raise RosterError(f"{claim}. Give every SuperNode a client-id or partition-id of its own")
        return [claim]

    def _alike(self, answer: Answer) -> dict[Node, Answer]:
        return {node: other for node, other in self._answered.items() if other.kind == answer.kind}

    def _objection(self, node: Node, answer: Answer) -> str | None:
        if self.code_hash is not None and answer.code_hash != self.code_hash:
            error = (
                f"node {node} runs other client code (hash {answer.code_hash}) than this server (hash "
                f"{self.code_hash}). Usually a SuperLink or SuperNode was started in another project's folder, or with "
                "another version of this app: end that process and start it again."
            )
            if not self._complete:
                raise CodeMismatchError(error)
            return error
        if self._kind is not None and answer.kind != self._kind:
            return _other_kind(answer.kind, self._kind)
        was = self._known.get(node)
        if was is not None and was != (answer.client_ids[0], answer.partition_id):
            now = _site(answer.client_ids[0], answer.partition_id)
            return f"it was {_site(*was)} before and says {now} now: a node is one client for a whole run"
        return self._double(answer)

    def _double(self, answer: Answer) -> str | None:
        """Say if another client has the same part of the data, or had it in this run."""
        if answer.partition_id is None:
            return None
        sites = [(other.client_ids[0], other.partition_id) for other in self._answered.values() if other.hosting == OWN]
        for client, part in [*sites, *(site for site in self._known.values() if site is not None)]:
            if part == answer.partition_id and client != answer.client_ids[0]:
                error = (
                    f"clients {client!r} and {answer.client_ids[0]!r} have the same part of the data: both say "
                    f"{PARTITION_ID}={part}. Give every site one of its own in its node config"
                )
                if not self._complete:
                    raise RosterError(error)
                return error
        return None


def _other_kind(kind: tuple[str, int], most: tuple[str, int]) -> str:
    return (
        f"it is one of {kind[1]} {kind[0]!r} nodes, the others of {most[1]} {most[0]!r} ones: all nodes need a "
        "client-id in their node-config, or none"
    )


def _site(client: str, part: int | None) -> str:
    return f"client {client!r}" + ("" if part is None else f" with {PARTITION_ID}={part}")
