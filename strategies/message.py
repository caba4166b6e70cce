"""Flower strategies for the Message API (``flwr.serverapp``): every rule as a class with ``aggregate_train``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from typing import Any, ClassVar, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from . import cohort
from .engine import Engine, Memory, round_metrics
from .evaluation import evaluation_report, weighted_means
from .guarded_grid import guarded, is_deployed
from .keywords import split, subclass
from .logs import last_line, log_rejections
from .model import Arrays, Model
from .protocol import (
    CLIENT_ID,
    LOCAL_LEARNING_RATE,
    NEWTON_DIRECTION,
    OWN,
    ROSTER,
    SERVER_ROUND,
    SETTINGS,
    SPLIT,
    TRAINING_SPLIT,
)
from .replies import Reply, finite_metrics
from .reports import RoundReport
from .roster import Answer, NoAnswerError, Node, Roster, RosterError
from .rules import Rule
from .rules.rule import ClientValue
from .rules.updates import LOSS_BEFORE
from .wire import WireError, check_arrays, check_direction
from .wrapping import refuse_privacy_wrapper

_CLIENT_APP_REFUSED = (ErrorCode.LOAD_CLIENT_APP_EXCEPTION, ErrorCode.CLIENT_APP_RAISED_EXCEPTION)


class MessageStrategy(FlowerFedAvg):
    """Base of all Message-API strategies: cohorts, reply checks, reports; subclasses name a rule."""

    rule_class: ClassVar[type[Rule]]

    def __init__(self, **keywords: Any) -> None:
        rule, options, flower = split(type(self).__name__, self.rule_class, FlowerFedAvg, keywords)
        super().__init__(**flower)
        self.engine = Engine(rule, options)
        self._train_metrics_fn = flower.get("train_metrics_aggr_fn")
        self._evaluate_metrics_fn = flower.get("evaluate_metrics_aggr_fn")
        self._roster = Roster(options.code_hash)
        self._model: Model | None = None
        self._asked: dict[str, Message] = {}
        self._sent_at = 0.0
        self._grid: Grid | None = None
        self._timeout = 3600.0
        self._config = ConfigRecord()
        self._rounds_before = 0
        self.last_iterate: ArrayRecord | None = None
        """The model that training continues from, where the method's output is another one."""
        self.client_settings: dict[str, ClientValue] = {}
        """Run-config values that clients of this app take instead of those of Flower's run; for resumed runs."""

    @property
    def rule(self) -> Rule:
        """The aggregation rule with its hyper-parameters."""
        return self.engine.rule

    def share_roster(self, roster: Roster) -> None:
        """Use what another strategy knows about the nodes; a run that is under way goes on with whom it can reach."""
        self._roster = roster

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
        *,
        rounds_before: int = 0,
        memory: Memory | None = None,
    ) -> Result:
        """Run the federation, or go on with a run that was interrupted.

        Parameters
        ----------
        grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
            As in Flower's ``Strategy.start``; `initial_arrays` is the model that the first round begins with.
        rounds_before : int
            Rounds that are done already: the first one is round ``rounds_before + 1`` of `num_rounds`.
        memory : Memory, optional
            Of a run that was interrupted: what the engine knew after these rounds (``strategy.engine.memory``).

        Returns
        -------
        Result
            Flower's, with the rounds' own numbers. It always holds a model.
        """
        if not 0 <= rounds_before <= num_rounds:
            raise ValueError(f"rounds_before must be in [0, num_rounds={num_rounds}], got {rounds_before!r}")
        self.engine.options = replace(self.engine.options, num_rounds=num_rounds)
        self.engine.restore(memory or Memory())
        self._timeout, self.last_iterate, self._rounds_before = timeout, None, rounds_before
        grid = guarded(grid)

        def evaluate_output(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            # The model that a resumed run begins with was evaluated when it was made.
            if evaluate_fn is None or (server_round == 0 and memory is not None):
                return None
            return evaluate_fn(server_round + rounds_before, self._output(arrays))

        own = evaluate_output if evaluate_fn is not None else None
        left = num_rounds - rounds_before
        result = super().start(grid, initial_arrays, left, timeout, train_config, evaluate_config, own)
        # Without a round that changed the model Flower's result is empty.
        result.arrays = self._output(result.arrays if len(result.arrays) else initial_arrays)
        _renumber(result, rounds_before)
        return result

    def _output(self, arrays: ArrayRecord) -> ArrayRecord:
        """The method's result, given the model that training continues from."""
        if self.engine.output is None:
            return arrays
        self.last_iterate = arrays
        return _record(self.engine.output)

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
        grid = guarded(grid)
        self._roster.deployed = is_deployed(grid)

        def ask(nodes: list[Node], patience: float) -> dict[Node, Answer | RosterError]:
            return self._ask(grid, nodes, patience)

        warnings = self._roster.wait(
            grid.get_node_ids,
            ask,
            nodes=self.min_available_nodes,
            clients=self.min_train_nodes,
            timeout=self.engine.options.wait_timeout,
        )
        for warning in warnings:
            log(WARNING, "%s", warning)
        return self._roster

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort and address one message to each of its clients."""
        server_round += self._rounds_before
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
        self._grid, self._config = guarded(grid), config
        self._asked = self._address(chosen, server_round, arrays, config, MessageType.TRAIN, self.engine.train_config())
        return list(self._asked.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and apply the rule; (None, metrics) leaves the model as it is."""
        if self._model is None:
            return None, None
        server_round += self._rounds_before
        messages = list(replies)
        waited = time.perf_counter() - self._sent_at
        answers = [self._reply(client, message) for client, message in self._by_client(messages)]
        arrays, report = self.engine.aggregate(
            server_round,
            self._model,
            answers,
            tuple(self._asked),
            waited,
            self._roster.client_ids,
            partial(self._ask_trial, server_round),
        )
        log_rejections("aggregate_train", len(report.accepted), report.rejections)
        metrics = self._train_metrics(messages, report)
        if arrays is None:
            return None, metrics
        return _record(arrays), metrics

    def _ask_trial(self, server_round: int, arrays: Arrays, clients: tuple[str, ...]) -> dict[str, float]:
        """Training losses of clients at a trial model; whoever does not answer in time is left out."""
        if self._grid is None:
            return {}
        more: dict[str, ClientValue] = {SPLIT: TRAINING_SPLIT}
        asked = self._address(clients, server_round, _record(arrays), self._config, MessageType.EVALUATE, more)
        replies = list(self._grid.send_and_receive(list(asked.values()), timeout=self._timeout))
        losses = {}
        for client, message in _by_client(asked, replies):
            metrics = {} if message.has_error() else _metrics(message)
            losses[client] = finite_metrics(metrics).get(LOSS_BEFORE, float("nan"))
        return losses

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Address one message to each client that shall evaluate the model; none between evaluations."""
        server_round += self._rounds_before
        self._asked = {}
        if self.fraction_evaluate == 0.0 or not self.engine.options.evaluates(server_round):
            return []
        clients = self.roster(grid).client_ids
        size = cohort.size(self.fraction_evaluate, self.min_evaluate_nodes, len(clients))
        chosen = cohort.draw(clients, size, self.engine.options.seed, server_round, "evaluate")
        more = self.engine.evaluate_config()
        self._asked = self._address(chosen, server_round, self._output(arrays), config, MessageType.EVALUATE, more)
        return list(self._asked.values())

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Collect every client's own metrics; the result is their mean, weighted by examples."""
        if not self._asked:
            return None
        server_round += self._rounds_before
        messages = list(replies)
        answers = [_measured(client, message) for client, message in self._by_client(messages)]
        report = evaluation_report(server_round, answers, tuple(self._asked), self.weighted_by_key)
        log_rejections("aggregate_evaluate", len(report.metrics), report.rejections)
        if self.engine.options.on_evaluation is not None:
            self.engine.options.on_evaluation(report)
        if not report.metrics:
            return None
        if self._evaluate_metrics_fn is not None:
            valid = [m.content for c, m in self._by_client(messages) if c in report.metrics]
            return cast(MetricRecord, self._evaluate_metrics_fn(valid, self.weighted_by_key))
        weights = {client: metrics[self.weighted_by_key] for client, metrics in report.metrics.items()}
        means = weighted_means(report.metrics, weights)
        del means[self.weighted_by_key]
        return MetricRecord(dict(means))

    def _ask(self, grid: Grid, nodes: list[Node], patience: float) -> dict[Node, Answer | RosterError]:
        if self.engine.options.client_ids == "node":
            return {node: Answer((str(node),), OWN) for node in nodes}
        content = RecordDict({**self._settings_record()})
        questions = {node: Message(content, int(node), MessageType.QUERY) for node in nodes}
        replies = grid.send_and_receive(list(questions.values()), timeout=patience)
        by_question = {message.metadata.reply_to_message_id: message for message in replies}
        return {node: _answer(by_question.get(q.metadata.message_id)) for node, q in questions.items()}

    def _address(
        self,
        chosen: tuple[str, ...],
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        kind: str,
        more: dict[str, ClientValue],
    ) -> dict[str, Message]:
        node_of = self._roster.node_of
        asked: dict[str, Message] = {}
        for client in chosen:
            own = ConfigRecord({**dict(config), **more})
            own[SERVER_ROUND] = server_round
            if self.engine.options.client_ids == "ask":
                own[CLIENT_ID] = client
            if self.engine.options.client_ids == "ask" and kind == MessageType.TRAIN:
                own[LOCAL_LEARNING_RATE] = self.engine.options.learning_rate(server_round)
            record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own, **self._settings_record()})
            asked[client] = Message(record, int(node_of[client]), kind)
        return asked

    def _settings_record(self) -> dict[str, ConfigRecord]:
        return {SETTINGS: ConfigRecord(dict(self.client_settings))} if self.client_settings else {}

    def _by_client(self, messages: list[Message]) -> list[tuple[str, Message]]:
        return _by_client(self._asked, messages)

    def _reply(self, client: str, message: Message) -> Reply:
        if message.has_error():
            return Reply(client, error=last_line(message.error.reason))
        metrics = _metrics(message)
        try:
            arrays, direction = self._decode(message.content)
        except WireError as error:
            return Reply(client, unreadable=str(error))
        except Exception as error:  # Bytes from outside: any fault is the sender's.
            return Reply(client, unreadable=f"its arrays cannot be read: {error}")
        return Reply(client, arrays, metrics.get(self.weighted_by_key), metrics, newton_direction=direction)

    def _decode(self, content: RecordDict) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The model and, if the rule needs one, the Newton direction; judged before any of it is deserialised."""
        records = dict(content.array_records)
        direction = records.pop(NEWTON_DIRECTION, None)
        if not records or self._model is None:
            return None, None
        if len(records) > 1:
            raise WireError(f"sent {len(records)} array records, expected one")
        (model,) = records.values()
        check_arrays(self._model, _bytes(model))
        if direction is None or NEWTON_DIRECTION not in self.rule.required():
            return _arrays(model), None
        check_direction(self._model, _bytes(direction))
        return _arrays(model), _arrays(direction)

    def _train_metrics(self, messages: list[Message], report: RoundReport) -> MetricRecord:
        metrics = round_metrics(report, self.weighted_by_key)
        if self._train_metrics_fn is not None and report.accepted:
            valid = [m.content for c, m in self._by_client(messages) if c in report.train_metrics]
            metrics.update(self._train_metrics_fn(valid, self.weighted_by_key))
        return MetricRecord(dict(metrics))


def strategy_class(rule_class: type[Rule]) -> type[MessageStrategy]:
    """The Message-API strategy of a rule: a class of the rule's name, with its docstring and signature."""
    return subclass(MessageStrategy, rule_class, FlowerFedAvg)


def _renumber(result: Result, rounds_before: int) -> None:
    """Give the metrics of a resumed run the numbers of their rounds."""
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        metrics = getattr(result, name)
        setattr(result, name, {number + rounds_before: value for number, value in metrics.items()})


def _answer(reply: Message | None) -> Answer | RosterError:
    if reply is None:
        return NoAnswerError("it did not answer")
    if reply.has_error():
        # Only the ClientApp's own exception is its word; a node that is away or whose process died may come back.
        kind = RosterError if reply.error.code in _CLIENT_APP_REFUSED else NoAnswerError
        return kind(last_line(reply.error.reason))
    record = reply.content.get(ROSTER)
    if not isinstance(record, ConfigRecord):
        return RosterError(f"its answer has no {ROSTER!r} record; is this another project's client?")
    try:
        return Answer.parse(dict(record))
    except RosterError as error:
        return error


def _by_client(asked: dict[str, Message], messages: list[Message]) -> list[tuple[str, Message]]:
    # An error reply's source may be the SuperLink; only the question's id tells whom it concerns.
    questions = {question.metadata.message_id: client for client, question in asked.items()}
    known = ((questions.get(m.metadata.reply_to_message_id), m) for m in messages)
    return [(client, message) for client, message in known if client is not None]


def _measured(client: str, message: Message) -> Reply:
    """The answer to an evaluation: no array in it is looked at."""
    if message.has_error():
        return Reply(client, error=last_line(message.error.reason))
    return Reply(client, metrics=_metrics(message))


def _metrics(message: Message) -> dict[str, object]:
    metrics: dict[str, object] = {}
    for record in message.content.metric_records.values():
        metrics.update(record)
    return metrics


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _bytes(record: ArrayRecord) -> dict[str, bytes]:
    return {name: array.data for name, array in record.items()}


def _arrays(record: ArrayRecord) -> dict[str, Any]:
    return {name: array.numpy() for name, array in record.items()}
