"""Who can take part: clients by their stable ids, and the nodes that serve them. Knows nothing of Flower."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .protocol import LOGICAL, OWN
from .rules import client_order


class RosterError(RuntimeError):
    """The nodes that are needed did not connect, did not answer, or answered something unusable."""


@dataclass(frozen=True)
class Answer:
    """A node's answer to the question which clients it serves (see ``protocol.py``)."""

    client_ids: tuple[str, ...]
    hosting: str
    num_partitions: int
    code_hash: str | None

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
        ids = record.get("client-ids")
        names = [name for name in ids.split(",") if name] if isinstance(ids, str) else ids
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise RosterError(f"'client-ids' must be a list of names, got {ids!r}")
        hosting = record.get("hosting")
        if hosting not in (LOGICAL, OWN):
            raise RosterError(f"'hosting' must be {LOGICAL!r} or {OWN!r}, got {hosting!r}")
        partitions = record.get("num-partitions", 0)
        if isinstance(partitions, bool) or not isinstance(partitions, int):
            raise RosterError(f"'num-partitions' must be an integer, got {partitions!r}")
        code_hash = record.get("code-hash")
        return Answer(tuple(names), hosting, partitions, None if code_hash is None else str(code_hash))


@dataclass
class Roster:
    """What the server knows about nodes and clients.

    Attributes
    ----------
    answers : dict of int to Answer
        By node id.
    silent : dict of int to str
        Nodes that did not say what they serve, with the reason.
    """

    answers: dict[int, Answer] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)

    @property
    def node_of(self) -> dict[str, int]:
        """The node that serves each client; of two that claim the same one, the node that answered last."""
        return {client: node for node, answer in self.answers.items() for client in answer.client_ids}

    @property
    def client_ids(self) -> tuple[str, ...]:
        """All clients that can be reached, in stable order."""
        return tuple(sorted(self.node_of, key=client_order))

    @property
    def logical(self) -> bool:
        """Whether nodes are simulated ones that share the run's clients."""
        return any(answer.hosting == LOGICAL for answer in self.answers.values())

    def update(self, online: Iterable[int]) -> set[int]:
        """Forget nodes that are gone; return those that have not been asked yet."""
        nodes = set(online)
        for known in (self.answers, self.silent):
            for node in known.keys() - nodes:
                del known[node]
        return nodes - self.answers.keys() - self.silent.keys()

    def missing(self, needed: int) -> str | None:
        """What is still missing before a round can start, in words; None if nothing is.

        Parameters
        ----------
        needed : int
            The least number of nodes. Simulated nodes must all be there, else some clients would be unreachable.
        """
        needed = max([needed if not self.logical else 1, *(a.num_partitions for a in self.answers.values())])
        if len(self.answers) >= needed:
            return None
        reasons = "".join(f"\n  node {node}: {reason}" for node, reason in sorted(self.silent.items()))
        return f"{len(self.answers)} of {needed} nodes are ready, {needed - len(self.answers)} missing{reasons}"

    def check_code(self, expected: str | None) -> None:
        """Refuse nodes that run other code than the server.

        Raises
        ------
        RosterError
            Naming the node, with the usual cause and the remedy.
        """
        for node, answer in self.answers.items():
            if expected is not None and answer.code_hash != expected:
                raise RosterError(
                    f"node {node} runs other client code (hash {answer.code_hash}) than this server (hash {expected}). "
                    "Usually a SuperLink or SuperNode was started in another project's folder, or with another version "
                    "of this app: end that process and start it again."
                )
