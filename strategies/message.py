"""Flower strategies for the Message API (``flwr.serverapp``): every rule as a class with ``aggregate_train``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, ClassVar, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from . import cohort
from .engine import Engine, round_metrics
from .keywords import split, subclass
from .protocol import CLIENT_ID, LOCAL_LEARNING_RATE, OWN, ROSTER, SERVER_ROUND
from .replies import Model, Reply, finite_metrics
from .reports import EvaluationReport, Rejection, RoundReport
from .roster import Answer, Roster, RosterError
from .rules import Rule
from .wrapping import refuse_privacy_wrapper

_POLL_SECONDS = 0.5


class MessageStrategy(FlowerFedAvg):
    """Base of all Message-API strategies: cohorts, reply checks, reports; subclasses name a rule."""

    rule_class: ClassVar[type[Rule]]

    def __init__(self, **keywords: Any) -> None:
        rule, options, flower = split(type(self).__name__, self.rule_class, FlowerFedAvg, keywords)
        super().__init__(**flower)
        self.engine = Engine(rule, options)
        self._train_metrics_fn = flower.get("train_metrics_aggr_fn")
        self._evaluate_metrics_fn = flower.get("evaluate_metrics_aggr_fn")
        self._roster = Roster()
        self._model: Model | None = None
        self._asked: dict[str, Message] = {}
        self._sent_at = 0.0

    @property
    def rule(self) -> Rule:
        """The aggregation rule with its hyper-parameters."""
        return self.engine.rule

    def summary(self) -> None:
        """Log the rule and Flower's own settings."""
        log(INFO, "\t├──> Rule: %s", self.rule)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation; see Flower's ``Strategy.start``. The result always holds a model."""
        self.engine.options = replace(self.engine.options, num_rounds=num_rounds)
        result = super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
        if len(result.arrays) == 0:  # No round changed the model.
            result.arrays = initial_arrays
        return result

    def roster(self, grid: Grid) -> Roster:
        """Wait for the nodes and learn which clients they serve.

        Parameters
        ----------
        grid : Grid
            Flower's grid.

        Returns
        -------
        Roster
            The clients that can be reached now.

        Raises
        ------
        RosterError
            If nodes are missing after `wait_timeout` seconds, do not answer, or run other code.
        """
        deadline = time.monotonic() + self.engine.options.wait_timeout
        while True:
            new = self._roster.update(grid.get_node_ids())
            self._ask(grid, sorted(new))
            self._roster.check_code(self.engine.options.code_hash)
            missing = self._roster.missing(max(1, self.min_available_nodes))
            if missing is None:
                return self._roster
            if time.monotonic() >= deadline:
                waited = self.engine.options.wait_timeout
                raise RosterError(f"after waiting for {waited:g} s (wait_timeout) {missing}")
            time.sleep(_POLL_SECONDS)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort and address one message to each of its clients."""
        if self.rule.individual_updates:
            refuse_privacy_wrapper()
        self._asked = {}
        if self.fraction_train == 0.0:
            return []
        self._model = self.engine.model({name: array.numpy() for name, array in arrays.items()})
        clients = self.roster(grid).client_ids
        size = cohort.size(self.fraction_train, self.min_train_nodes, len(clients))
        chosen = cohort.draw(clients, size, self.engine.options.seed, server_round)
        log(INFO, "configure_train: %s of %s clients", len(chosen), len(clients))
        self._sent_at = time.perf_counter()
        return self._address(chosen, server_round, arrays, config, MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and apply the rule; (None, metrics) leaves the model as it is."""
        if self._model is None:
            return None, None
        messages = list(replies)
        waited = time.perf_counter() - self._sent_at
        answers = [self._reply(client, message) for client, message in self._by_client(messages)]
        arrays, report = self.engine.aggregate(server_round, self._model, answers, tuple(self._asked), waited)
        log_rejections("aggregate_train", len(report.accepted), report.rejections)
        metrics = self._train_metrics(messages, report, answers)
        if arrays is None:
            return None, metrics
        return ArrayRecord({name: Array(array) for name, array in arrays.items()}), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Address one message to each client that shall evaluate the model; none between evaluations."""
        self._asked = {}
        if self.fraction_evaluate == 0.0 or not self.engine.options.evaluates(server_round):
            return []
        clients = self.roster(grid).client_ids
        size = cohort.size(self.fraction_evaluate, self.min_evaluate_nodes, len(clients))
        chosen = cohort.draw(clients, size, self.engine.options.seed, server_round)
        return self._address(chosen, server_round, arrays, config, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Collect every client's own metrics; the result is their mean, weighted by examples."""
        if not self._asked:
            return None
        messages = list(replies)
        answers = [self._reply(client, message) for client, message in self._by_client(messages)]
        report = evaluation_report(server_round, answers, tuple(self._asked), self.weighted_by_key)
        log_rejections("aggregate_evaluate", len(report.metrics), report.rejections)
        if self.engine.options.on_evaluation is not None:
            self.engine.options.on_evaluation(report)
        if not report.metrics:
            return None
        if self._evaluate_metrics_fn is not None:
            valid = [m.content for c, m in self._by_client(messages) if c in report.metrics]
            return cast(MetricRecord, self._evaluate_metrics_fn(valid, self.weighted_by_key))
        return MetricRecord(dict(weighted_means(report.metrics, self.weighted_by_key)))

    def _ask(self, grid: Grid, nodes: list[int]) -> None:
        if self.engine.options.client_ids == "node":
            for node in nodes:
                self._roster.answers[node] = Answer((str(node),), OWN, 0, self.engine.options.code_hash)
            return
        if not nodes:
            return
        questions = {node: Message(RecordDict(), node, MessageType.QUERY) for node in nodes}
        timeout = max(1.0, self.engine.options.wait_timeout)
        replies = grid.send_and_receive(list(questions.values()), timeout=timeout)
        by_question = {message.metadata.reply_to_message_id: message for message in replies}
        for node, question in questions.items():
            reply = by_question.get(question.metadata.message_id)
            try:
                self._roster.answers[node] = _answer(reply)
            except RosterError as error:
                self._roster.silent[node] = str(error)
                log(WARNING, "node %s does not say which clients it serves: %s", node, error)

    def _address(
        self, chosen: tuple[str, ...], server_round: int, arrays: ArrayRecord, config: ConfigRecord, kind: str
    ) -> list[Message]:
        node_of = self._roster.node_of
        for client in chosen:
            own = ConfigRecord(dict(config))
            own[SERVER_ROUND] = server_round
            if self.engine.options.client_ids == "ask":
                own[CLIENT_ID] = client
            if self.engine.options.client_ids == "ask" and kind == MessageType.TRAIN:
                own[LOCAL_LEARNING_RATE] = self.engine.options.learning_rate(server_round)
            record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own})
            self._asked[client] = Message(record, node_of[client], kind)
        return list(self._asked.values())

    def _by_client(self, messages: list[Message]) -> list[tuple[str, Message]]:
        # An error reply's source may be the SuperLink; only the question's id tells whom it concerns.
        asked = {question.metadata.message_id: client for client, question in self._asked.items()}
        known = ((asked.get(m.metadata.reply_to_message_id), m) for m in messages)
        return [(client, message) for client, message in known if client is not None]

    def _reply(self, client: str, message: Message) -> Reply:
        if message.has_error():
            return Reply(client, error=last_line(message.error.reason))
        metrics: dict[str, object] = {}
        for record in message.content.metric_records.values():
            metrics.update(record)
        try:
            arrays = _decode(message.content)
        except Exception as error:  # Bytes from outside: any fault is the sender's.
            return Reply(client, error=f"its arrays cannot be read: {error}")
        return Reply(client, arrays, metrics.get(self.weighted_by_key), metrics)

    def _train_metrics(self, messages: list[Message], report: RoundReport, answers: list[Reply]) -> MetricRecord:
        counts = {a.client_id: a.num_examples for a in answers}
        weights = {c: float(counts[c]) for c in report.accepted}  # type: ignore[arg-type]
        metrics = round_metrics(report, weights)
        if self._train_metrics_fn is not None and report.accepted:
            valid = [m.content for c, m in self._by_client(messages) if c in weights]
            metrics.update(self._train_metrics_fn(valid, self.weighted_by_key))
        return MetricRecord(dict(metrics))


def strategy_class(rule_class: type[Rule]) -> type[MessageStrategy]:
    """The Message-API strategy of a rule: a class of the rule's name, with its docstring and signature."""
    return subclass(MessageStrategy, rule_class, FlowerFedAvg)


def evaluation_report(
    server_round: int, answers: Iterable[Reply], asked: tuple[str, ...], weight_key: str
) -> EvaluationReport:
    """Sort evaluation replies into per-client metrics and rejections."""
    metrics: dict[str, dict[str, float]] = {}
    rejections: dict[str, Rejection] = {}
    for answer in answers:
        numbers = finite_metrics(answer.metrics)
        if answer.error is not None:
            rejections[answer.client_id] = Rejection(answer.client_id, "error", answer.error)
        elif not numbers.get(weight_key, 0.0) > 0.0:
            reason = f"{weight_key} must be a finite number > 0, got {answer.metrics.get(weight_key)!r}"
            rejections[answer.client_id] = Rejection(answer.client_id, "invalid", reason)
        else:
            metrics[answer.client_id] = numbers
    for client in asked:
        if client not in metrics and client not in rejections:
            rejections[client] = Rejection(client, "silent", "did not answer before the round's deadline")
    order = {client: position for position, client in enumerate(asked)}
    return EvaluationReport(
        server_round,
        {c: metrics[c] for c in sorted(metrics, key=order.__getitem__)},
        tuple(rejections[c] for c in sorted(rejections, key=order.__getitem__)),
    )


def weighted_means(metrics: Mapping[str, dict[str, float]], weight_key: str) -> dict[str, float]:
    """Means over clients, weighted by examples, of every metric that all of them report."""
    shared = set.intersection(*(set(m) for m in metrics.values())) - {weight_key}
    weights = np.array([m[weight_key] for m in metrics.values()])
    return {key: float(np.average([m[key] for m in metrics.values()], weights=weights)) for key in sorted(shared)}


def _answer(reply: Message | None) -> Answer:
    if reply is None:
        raise RosterError("it did not answer")
    if reply.has_error():
        raise RosterError(last_line(reply.error.reason))
    record = reply.content.get(ROSTER)
    if not isinstance(record, ConfigRecord):
        raise RosterError(f"its answer has no {ROSTER!r} record; is this another project's client?")
    return Answer.parse(dict(record))


def _decode(content: RecordDict) -> dict[str, Any] | None:
    records = list(content.array_records.values())
    if len(records) != 1:
        return None
    return {name: array.numpy() for name, array in records[0].items()}


def log_rejections(what: str, accepted: int, rejections: tuple[Rejection, ...]) -> None:
    """Log how many replies count, and why each of the others does not."""
    log(INFO, "%s: %s replies count, %s do not", what, accepted, len(rejections))
    for rejection in rejections:
        log(WARNING, "\t> client %s (%s): %s", rejection.client_id, rejection.kind, rejection.reason)


def last_line(text: str | None) -> str:
    """Return what an error text ends with."""
    # In simulation a reason is a whole traceback; its last line says what happened.
    lines = [line.strip() for line in (text or "").strip().splitlines() if line.strip()]
    return lines[-1] if lines else "unknown error"
