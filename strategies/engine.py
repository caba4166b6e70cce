"""One round of any rule: replies in, new model and report out. Knows nothing of Flower; both of its APIs use it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .evaluation import weighted_means
from .model import BUFFER_PATTERNS, Arrays, Model
from .protocol import NEEDS, SPLIT, TRAINING_SPLIT
from .replies import (
    Accepted,
    MissingNeedError,
    Reply,
    are_individual,
    screen,
    to_updates,
    undelivered,
)
from .reports import EvaluationReport, RoundReport
from .rules import Rule, State
from .rules.rule import ClientValue
from .rules.updates import LOSS_BEFORE, PERSONAL_MODEL, TRIAL_LOSSES, Diagnostics, Floats, TrialLosses
from .rules.validation import check_choice, check_range, check_whole, is_real

TOO_FEW_REPLIES = "too-few-replies"
"""Status of a round with usable replies, but fewer than `Options.min_replies`."""

RECENT_LENGTHS = 100
"""Lengths of accepted updates that are remembered for the norm screen."""

AskTrial = Callable[[Arrays, tuple[str, ...]], dict[str, float]]
"""Sends a trial model to clients and returns their training losses at it; whoever does not answer is left out."""


@dataclass(frozen=True)
class Options:
    """What a strategy of this package takes besides its rule's hyper-parameters and Flower's own keywords.

    Parameters
    ----------
    seed : int
        Seed of the cohorts, >= 0.
    client_ids : {"node", "ask"}
        "node": a client is a node, known by Flower's node id (random per run in simulation). "ask": nodes are asked
        once which clients they serve (see ``protocol.py``); cohorts are then the same in every run and engine.
    code_hash : str or None
        With "ask": refuse nodes that run other code than this.
    wait_timeout : float
        Seconds to wait for enough nodes, and for their answers.
    local_learning_rate : float or callable (round) -> float
        The clients' local learning rate, sent to them as ``local-learning-rate`` with "ask". It matters to rules only
        when it changes over rounds or differs from the server's.
    min_replies : int
        With fewer usable replies the model stays as it is and the round is skipped, >= 1.
    norm_screen : float
        Refuse updates longer than this many times the others' median and than the model itself; 0: never.
    examples_screen : float
        Refuse replies that claim more examples than this many times the others' median; 0: never.
    buffer_patterns : tuple of str
        Shell patterns of array names that are statistics, averaged rather than directed.
    evaluate_every : int
        Rounds between federated evaluations; the last round always is evaluated if `num_rounds` is known.
    num_rounds : int or None
        Rounds of the run; the Message API sets it by itself.
    on_round, on_evaluation : callable or None
        Called with every `RoundReport` and `EvaluationReport`.
    """

    seed: int = 0
    client_ids: str = "node"
    code_hash: str | None = None
    wait_timeout: float = 300.0
    local_learning_rate: float | Callable[[int], float] = 1.0
    min_replies: int = 1
    norm_screen: float = 10.0
    examples_screen: float = 1000.0
    buffer_patterns: tuple[str, ...] = BUFFER_PATTERNS
    evaluate_every: int = 1
    num_rounds: int | None = None
    on_round: Callable[[RoundReport], None] | None = None
    on_evaluation: Callable[[EvaluationReport], None] | None = None

    def __post_init__(self) -> None:
        check_choice("client_ids", self.client_ids, ("node", "ask"))
        check_range("wait_timeout", self.wait_timeout, 0.0, float("inf"))
        check_range("norm_screen", self.norm_screen, 0.0, float("inf"))
        check_range("examples_screen", self.examples_screen, 0.0, float("inf"))
        check_whole("evaluate_every", self.evaluate_every, 1)
        check_whole("min_replies", self.min_replies, 1)
        check_whole("seed", self.seed, 0)
        if self.code_hash is not None and self.client_ids != "ask":
            raise ValueError("code_hash needs client_ids='ask': otherwise nodes are not asked what they run")
        if isinstance(self.buffer_patterns, str):  # type: ignore[unreachable]
            raise ValueError(f"buffer_patterns must be a sequence of patterns, got the string {self.buffer_patterns!r}")
        if not callable(self.local_learning_rate):
            self.learning_rate(1)

    def learning_rate(self, server_round: int) -> float:
        """The local learning rate of a round."""
        rate = self.local_learning_rate
        value = rate(server_round) if callable(rate) else rate
        if not (is_real(value) and math.isfinite(value) and value > 0.0):
            raise ValueError(f"local_learning_rate must be a finite number > 0, got {value!r} for round {server_round}")
        return float(value)

    def evaluates(self, server_round: int) -> bool:
        """Whether a round ends with a federated evaluation."""
        return server_round % self.evaluate_every == 0 or server_round == self.num_rounds


@dataclass(frozen=True, eq=False)
class Memory:
    """All that an engine knows after a round: with it, the model and the number of the next round a run can go on.

    Parameters
    ----------
    state : dict
        The rule's memory: arrays, numbers, strings and lists by name. Never changed, only replaced.
    output : dict of str to ndarray, or None
        See `Engine`.
    individual, delivered, searched : bool
        What is known about the clients: that their updates are their own, that somebody delivers what the rule needs,
        and answers its questions.
    lengths : tuple of float
        Lengths of the updates accepted last, per unit of the local learning rate.
    """

    state: State = field(default_factory=dict)
    output: dict[str, NDArray[Any]] | None = None
    individual: bool = False
    delivered: bool = False
    searched: bool = False
    lengths: tuple[float, ...] = ()


class Engine:
    """Rule, memory and options of one run.

    Parameters
    ----------
    rule : Rule
        The aggregation rule.
    options : Options
        See there.

    Attributes
    ----------
    state : dict
        The rule's memory between rounds.
    output : dict of str to ndarray, or None
        The method's result so far, where that is not the model which training continues from.
    """

    def __init__(self, rule: Rule, options: Options) -> None:
        self.rule = rule
        self.options = options
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next round is a run's first."""
        self.restore(Memory())

    @property
    def memory(self) -> Memory:
        """What there is to know after a round."""
        return Memory(self.state, self.output, self._individual, self._delivered, self._searched, self._lengths)

    def restore(self, memory: Memory) -> None:
        """Go on where another engine with the same rule stopped."""
        self.state, self.output = memory.state, memory.output
        self._individual, self._delivered, self._searched = memory.individual, memory.delivered, memory.searched
        self._lengths = tuple(memory.lengths)

    def train_config(self) -> dict[str, ClientValue]:
        """What the rule asks of clients with every training message; empty for rules that ask for nothing."""
        needs = self.rule.required()
        return {**({NEEDS: ",".join(needs)} if needs else {}), **self.rule.client_config()}

    def evaluate_config(self) -> dict[str, ClientValue]:
        """What the rule asks of clients with every evaluation message."""
        return {NEEDS: PERSONAL_MODEL} if PERSONAL_MODEL in self.rule.required() else {}

    def model(self, arrays: Arrays) -> Model:
        """The global model that is about to be sent."""
        return Model(arrays, self.options.buffer_patterns)

    def aggregate(
        self,
        server_round: int,
        model: Model,
        replies: Iterable[Reply],
        cohort: Sequence[str],
        waited: float,
        population: tuple[str, ...] = (),
        ask_trial: AskTrial | None = None,
    ) -> tuple[dict[str, NDArray[Any]] | None, RoundReport]:
        """Finish a round of training.

        Parameters
        ----------
        server_round : int
            The round, counted from 1.
        model : Model
            What the clients were sent.
        replies : iterable of Reply
            What came back.
        cohort : sequence of str
            Who was asked.
        waited : float
            Seconds spent waiting for replies.
        population : tuple of str
            All clients that could have been asked, in stable order.
        ask_trial : callable, optional
            Asks clients for their loss at a trial model, for rules that search along their direction.

        Returns
        -------
        tuple of (dict of str to ndarray or None, RoundReport)
            The next global model, None if no update was usable, and the account of the round.

        Raises
        ------
        SecureAggregationError
            If the first updates are not individual ones.
        MissingNeedError
            If no client has ever delivered something that the rule needs.
        """
        start = time.perf_counter()
        answers, needs = list(replies), self.rule.required()
        rate = self.options.learning_rate(server_round)
        accepted, rejections = screen(
            model,
            answers,
            cohort,
            self.options.norm_screen,
            needs,
            self.options.examples_screen,
            [rate * length for length in self._lengths],
        )
        self._require_delivery(answers, needs, bool(accepted))
        arrays: dict[str, NDArray[Any]] | None = None
        diagnostics: Diagnostics = {}
        if len(accepted) >= self.options.min_replies:
            arrays, diagnostics = self._apply(server_round, model, accepted, population, ask_trial)
        elif accepted:
            unused = [reply.client_id for reply in accepted]
            diagnostics = {"status": TOO_FEW_REPLIES, "min-replies": self.options.min_replies, "unused-clients": unused}
            accepted = []
        lengths = (reply.length / rate for reply in accepted if reply.length > 0.0)
        self._lengths = (*self._lengths, *lengths)[-RECENT_LENGTHS:]
        report = RoundReport(
            server_round,
            tuple(cohort),
            tuple(reply.client_id for reply in accepted),
            tuple(rejections),
            arrays is None,
            diagnostics,
            {reply.client_id: reply.metrics for reply in accepted},
            {"clients": waited, "aggregation": time.perf_counter() - start},
        )
        if self.options.on_round is not None:
            self.options.on_round(report)
        return arrays, report

    def _require_delivery(self, answers: Sequence[Reply], needs: Sequence[str], delivered: bool) -> None:
        self._delivered = self._delivered or delivered
        # Our own ClientApp delivers what it is asked for: there it is one client's fault, and costs that client only.
        known = self._delivered or self.options.code_hash is not None
        missing = None if known else undelivered(answers, needs)
        if missing is not None:
            raise MissingNeedError(
                f"{type(self.rule).__name__} needs {missing!r} from every client, and no client sends it: the "
                f"ClientApp must answer the config key {NEEDS!r} of a training message (see docs/methods)"
            )

    def _apply(
        self,
        server_round: int,
        model: Model,
        accepted: Sequence[Accepted],
        population: tuple[str, ...],
        ask_trial: AskTrial | None,
    ) -> tuple[dict[str, NDArray[Any]] | None, Diagnostics]:
        if self.rule.individual_updates and not self._individual:
            self._individual = are_individual(accepted)
        needs = self.rule.required()
        search = None
        if TRIAL_LOSSES in needs and ask_trial is not None:
            search = self._search(model, tuple(reply.client_id for reply in accepted), ask_trial)
        rate = self.options.learning_rate(server_round)
        updates = to_updates(model, accepted, server_round, rate, needs, population, search)
        aggregate, state = self.rule.aggregate(updates, self.state)
        try:
            buffers = [reply.buffers for reply in accepted]
            arrays = model.moved(aggregate, buffers, updates.weights)
            if aggregate.output_offset is not None:
                output = replace(aggregate, step=aggregate.step - aggregate.output_offset)
                self.output = model.moved(output, buffers, updates.weights)
        except FloatingPointError as error:  # However it came about, a step out of range must not end the run.
            return None, {**aggregate.diagnostics, "status": "overflow", "error": str(error)}
        self.state = state
        return arrays, aggregate.diagnostics

    def _search(self, model: Model, clients: tuple[str, ...], ask: AskTrial) -> TrialLosses:
        def losses(step: Floats) -> Floats:
            try:
                trial = model.shifted(step)
            except FloatingPointError:  # A trial out of range is one that nobody accepts.
                return np.full(len(clients), np.nan)
            answers = ask(trial, clients)
            found = np.array([answers.get(client, np.nan) for client in clients])
            self._searched = self._searched or bool(np.isfinite(found).any())
            if not self._searched and self.options.code_hash is None:
                raise MissingNeedError(
                    f"{type(self.rule).__name__} needs {TRIAL_LOSSES!r}, and no client answers: the ClientApp must "
                    f"answer an evaluation message with {SPLIT}={TRAINING_SPLIT!r} by {LOSS_BEFORE!r}, its mean loss "
                    "on its training examples (see docs/methods)"
                )
            return found

        return losses


def round_metrics(report: RoundReport, weight_key: str) -> dict[str, float]:
    """A round in numbers: means of the clients' metrics, how many counted, and the rule's own numbers.

    Flower logs these in every round, so they are rounded, and the report has more. Times are left out, so that two runs
    with one seed give the same numbers.
    """
    result: dict[str, float] = {}
    if report.train_metrics:
        weights = {client: metrics[weight_key] for client, metrics in report.train_metrics.items()}
        result = weighted_means(report.train_metrics, weights)
        del result[weight_key]
    result["clients-accepted"] = float(len(report.accepted))
    result["clients-rejected"] = float(len(report.rejections))
    for key, value in report.diagnostics.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not key.startswith("seconds"):
            result[key] = float(f"{value:.6g}")
    return result
