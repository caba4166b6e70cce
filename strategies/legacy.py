"""The same strategies for Flower's older API (``flwr.server``): every rule as a class with ``aggregate_fit``.

``from fedpcd.legacy import FedPCD`` where a project uses ``flwr.server.strategy``. That API knows arrays by position
only: array names, which tell parameters from statistics, are given as `parameter_names` (a model's ``state_dict``
keys); without it the names are "0", "1", ..., and `buffer_patterns` refers to these.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from logging import WARNING
from typing import Any, ClassVar, TypeVar

from flwr.common import (
    Code,
    DisconnectRes,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    ReconnectIns,
    Scalar,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.logger import log
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp import Grid

from . import cohort
from .engine import Engine, round_metrics
from .evaluation import evaluation_report, weighted_means
from .guarded_grid import guarded, is_deployed
from .keywords import split, subclass
from .logs import last_line, log_rejections
from .model import Arrays, Model
from .protocol import (
    CLIENT_ID,
    LOCAL_LEARNING_RATE,
    LOSS,
    NEWTON_DIRECTION,
    NUM_EXAMPLES,
    OWN,
    SERVER_ROUND,
    SPLIT,
    TRAINING_SPLIT,
)
from .replies import Reply, finite_metrics
from .roster import Answer, NoAnswerError, Node, Roster, RosterError
from .rules import RULES, Rule
from .rules.updates import LOSS_BEFORE
from .wire import WireError, check_arrays, check_direction
from .wrapping import refuse_privacy_wrapper

_DISCARDED = "not used: another client failed, and accept_failures is False"

Result = TypeVar("Result", FitRes, EvaluateRes)


class LegacyStrategy(FlowerFedAvg):
    """Base of all older-API strategies: cohorts, reply checks, reports; subclasses name a rule."""

    rule_class: ClassVar[type[Rule]]

    def __init__(self, *, parameter_names: Sequence[str] | None = None, **keywords: Any) -> None:
        rule, options, flower = split(type(self).__name__, self.rule_class, FlowerFedAvg, keywords)
        super().__init__(**flower)
        self.engine = Engine(rule, options)
        self.parameter_names = None if parameter_names is None else tuple(parameter_names)
        self._roster = Roster(options.code_hash)
        self._model: Model | None = None
        self._asked: dict[str, _Client] = {}
        self._sent_at = 0.0
        self._config: dict[str, Scalar] = {}

    @property
    def rule(self) -> Rule:
        """The aggregation rule with its hyper-parameters."""
        return self.engine.rule

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Draw the cohort and address one instruction to each of its clients."""
        if self.rule.individual_updates:
            refuse_privacy_wrapper()
        self._model = self.engine.model(self._named(parameters))
        proxies = self._proxies(client_manager)
        clients = self._roster.client_ids
        size = cohort.size(self.fraction_fit, self.min_fit_clients, len(clients))
        chosen = cohort.draw(clients, size, self.engine.options.seed, server_round)
        config = self.on_fit_config_fn(server_round) if self.on_fit_config_fn is not None else {}
        if self.engine.options.client_ids == "ask":
            config = {**config, LOCAL_LEARNING_RATE: self.engine.options.learning_rate(server_round)}
        self._config = {**config, **self.engine.train_config()}
        self._sent_at = time.perf_counter()
        self._asked = self._address(chosen, proxies)
        return [
            (client, FitIns(parameters, self._own_config(self._config, client, server_round)))
            for client in self._asked.values()
        ]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Check the results and apply the rule; None leaves the model as it is."""
        if self._model is None:
            raise RuntimeError("aggregate_fit was called without configure_fit, so what was sent is not known")
        waited = time.perf_counter() - self._sent_at
        answers = [self._reply(_name(proxy), result) for proxy, result in (*results, *_refusals(failures))]
        answers += self._failed()
        if failures and not self.accept_failures:
            answers = [a if a.error is not None else Reply(a.client_id, error=_DISCARDED) for a in answers]
        arrays, report = self.engine.aggregate(
            server_round,
            self._model,
            answers,
            tuple(self._asked),
            waited,
            self._roster.client_ids,
            partial(self._ask_trial, server_round),
        )
        log_rejections("aggregate_fit", len(report.accepted), report.rejections)
        metrics: dict[str, Scalar] = dict(round_metrics(report, NUM_EXAMPLES))
        if self.fit_metrics_aggregation_fn is not None:
            usable = [(r.num_examples, r.metrics) for p, r in results if _name(p) in report.train_metrics]
            metrics.update(self.fit_metrics_aggregation_fn(usable))
        return (None if arrays is None else ndarrays_to_parameters(list(arrays.values()))), metrics

    def _ask_trial(self, server_round: int, arrays: Arrays, clients: tuple[str, ...]) -> dict[str, float]:
        """Training losses of clients at a trial model; whoever fails is left out."""
        parameters = ndarrays_to_parameters(list(arrays.values()))

        def ask(client: _Client) -> float:
            config = {**self._own_config(self._config, client, server_round), SPLIT: TRAINING_SPLIT}
            try:
                result = client.proxy.evaluate(EvaluateIns(parameters, config), None, server_round)
            except Exception:  # Whatever a client raises, it only has no say in this trial.
                return float("nan")
            return finite_metrics(result.metrics).get(LOSS_BEFORE, float("nan"))

        asked = [self._asked[client] for client in clients]
        # As Flower asks its clients: from one thread each.
        with ThreadPoolExecutor(max_workers=max(1, len(asked))) as pool:
            return dict(zip(clients, pool.map(ask, asked), strict=True))

    def evaluate(self, server_round: int, parameters: Parameters) -> tuple[float, dict[str, Scalar]] | None:
        """Evaluate the method's result with `evaluate_fn`."""
        return super().evaluate(server_round, self._output(parameters))

    def _output(self, parameters: Parameters) -> Parameters:
        """The method's result, given the model that training continues from."""
        output = self.engine.output
        return parameters if output is None else ndarrays_to_parameters(list(output.values()))

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Address one instruction to each client that shall evaluate the model; none between evaluations."""
        self._asked = {}
        if self.fraction_evaluate == 0.0 or not self.engine.options.evaluates(server_round):
            return []
        proxies = self._proxies(client_manager)
        clients = self._roster.client_ids
        size = cohort.size(self.fraction_evaluate, self.min_evaluate_clients, len(clients))
        chosen = cohort.draw(clients, size, self.engine.options.seed, server_round, "evaluate")
        config = self.on_evaluate_config_fn(server_round) if self.on_evaluate_config_fn is not None else {}
        config = {**config, **self.engine.evaluate_config()}
        parameters = self._output(parameters)
        self._asked = self._address(chosen, proxies)
        return [
            (client, EvaluateIns(parameters, self._own_config(config, client, server_round)))
            for client in self._asked.values()
        ]

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Collect every client's own metrics; the result is their mean, weighted by examples."""
        if not self._asked or (failures and not self.accept_failures):
            return None, {}
        answers = [
            Reply(
                _name(proxy),
                metrics={**result.metrics, LOSS: result.loss, NUM_EXAMPLES: result.num_examples},
                error=_status_error(result),
            )
            for proxy, result in (*results, *_refusals(failures))
        ]
        report = evaluation_report(server_round, answers + self._failed(), tuple(self._asked), NUM_EXAMPLES)
        log_rejections("aggregate_evaluate", len(report.metrics), report.rejections)
        if self.engine.options.on_evaluation is not None:
            self.engine.options.on_evaluation(report)
        if not report.metrics:
            return None, {}
        means = weighted_means(report.metrics, {c: m[NUM_EXAMPLES] for c, m in report.metrics.items()})
        del means[NUM_EXAMPLES]
        metrics: dict[str, Scalar] = dict(means)
        if self.evaluate_metrics_aggregation_fn is not None:
            usable = [(r.num_examples, r.metrics) for p, r in results if _name(p) in report.metrics]
            metrics = self.evaluate_metrics_aggregation_fn(usable)
        return means.get(LOSS), metrics

    def _named(self, parameters: Parameters) -> Arrays:
        arrays = parameters_to_ndarrays(parameters)
        names = self.parameter_names or tuple(str(i) for i in range(len(arrays)))
        if len(names) != len(arrays):
            raise ValueError(f"parameter_names has {len(names)} names, the model {len(arrays)} arrays")
        return dict(zip(names, arrays, strict=True))

    def _proxies(self, client_manager: ClientManager) -> dict[Node, ClientProxy]:
        """Wait for the nodes, learn which clients they serve, and return their proxies."""
        proxies: dict[Node, ClientProxy] = {}

        def online() -> list[Node]:
            # num_available() makes Flower's manager look at the nodes now; all() alone lags behind.
            client_manager.num_available()
            proxies.clear()
            # A copy: Flower's own thread adds and removes clients at any time.
            proxies.update({str(proxy.cid): proxy for proxy in list(client_manager.all().values())})
            deployed = [_guard(proxy) for proxy in proxies.values()]
            self._roster.deployed = any(deployed)
            return list(proxies)

        def ask(nodes: list[Node], patience: float) -> dict[Node, Answer | RosterError]:
            return {node: self._ask(proxies[node], patience) for node in nodes}

        warnings = self._roster.wait(
            online,
            ask,
            nodes=self.min_available_clients,
            clients=self.min_fit_clients,
            timeout=self.engine.options.wait_timeout,
        )
        for warning in warnings:
            log(WARNING, "%s", warning)
        return proxies

    def _ask(self, proxy: ClientProxy, patience: float) -> Answer | RosterError:
        if self.engine.options.client_ids == "node":
            return Answer((str(proxy.cid),), OWN)
        try:
            answer = proxy.get_properties(GetPropertiesIns({}), timeout=patience, group_id=0)
            return Answer.parse(answer.properties)
        except RosterError as error:
            return error
        except Exception as error:  # Whatever a node answers, it only counts as missing.
            return NoAnswerError(last_line(str(error)))

    def _address(self, chosen: tuple[str, ...], proxies: dict[Node, ClientProxy]) -> dict[str, _Client]:
        node_of = self._roster.node_of
        return {client: _Client(client, proxies[node_of[client]]) for client in chosen}

    def _own_config(self, config: dict[str, Scalar], client: _Client, server_round: int) -> dict[str, Scalar]:
        own: dict[str, Scalar] = {**config, SERVER_ROUND: server_round}
        if self.engine.options.client_ids == "ask":
            own[CLIENT_ID] = client.cid
        return own

    def _reply(self, client: str, result: FitRes) -> Reply:
        error = _status_error(result)
        if error is not None or self._model is None:
            return Reply(client, error=error)
        try:
            arrays, direction = self._decode(self._model, result.parameters)
        except WireError as fault:
            return Reply(client, unreadable=str(fault))
        except Exception as fault:  # Bytes from outside: any fault is the sender's.
            return Reply(client, unreadable=f"its arrays cannot be read: {fault}")
        metrics = {**result.metrics, NUM_EXAMPLES: result.num_examples}
        return Reply(client, arrays, result.num_examples, metrics, newton_direction=direction)

    def _decode(self, model: Model, sent: Parameters) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The model and, if the rule needs one, the Newton direction; judged before any of it is deserialised."""
        names, parameters, tensors = list(model.arrays), model.parameters, sent.tensors
        both = NEWTON_DIRECTION in self.rule.required() and len(tensors) == len(names) + len(parameters)
        # Names beyond the model's make the count itself the reason for the rejection.
        more = (f"array {i}" for i in range(len(names), len(tensors)))
        check_arrays(model, dict(zip([*names, *more], tensors[: len(names)] if both else tensors, strict=False)))
        if both:
            check_direction(model, dict(zip(parameters, tensors[len(names) :], strict=True)))
        arrays = parameters_to_ndarrays(sent)
        direction = dict(zip(parameters, arrays[len(names) :], strict=True)) if both else None
        return dict(zip(names, arrays, strict=False)), direction

    def _failed(self) -> list[Reply]:
        return [Reply(c, error=client.failure) for c, client in self._asked.items() if client.failure is not None]


class _Client(ClientProxy):
    """One logical client on a node; remembers why it failed, which Flower's failures do not tell."""

    def __init__(self, client_id: str, proxy: ClientProxy) -> None:
        super().__init__(client_id)
        self.proxy = proxy
        self.failure: str | None = None

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Train on the node."""
        try:
            return self.proxy.fit(ins, timeout, group_id)
        except Exception as error:
            self.failure = last_line(str(error))
            raise

    def evaluate(self, ins: EvaluateIns, timeout: float | None, group_id: int | None) -> EvaluateRes:
        """Evaluate on the node."""
        try:
            return self.proxy.evaluate(ins, timeout, group_id)
        except Exception as error:
            self.failure = last_line(str(error))
            raise

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        """Ask the node."""
        return self.proxy.get_properties(ins, timeout, group_id)

    def get_parameters(self, ins: GetParametersIns, timeout: float | None, group_id: int | None) -> GetParametersRes:
        """Ask the node."""
        return self.proxy.get_parameters(ins, timeout, group_id)

    def reconnect(self, ins: ReconnectIns, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Pass on to the node."""
        return self.proxy.reconnect(ins, timeout, group_id)


def _guard(proxy: ClientProxy) -> bool:
    """Guard the grid of a proxy, if it has one, and say whether its node is somebody else's machine."""
    grid = getattr(proxy, "grid", None)
    if isinstance(grid, Grid):
        proxy.grid = guarded(grid)  # type: ignore[attr-defined]  # Flower's GridClientProxy
    return is_deployed(grid)


def _name(proxy: ClientProxy) -> str:
    return str(proxy.cid)


def _refusals(
    failures: list[tuple[ClientProxy, Result] | BaseException],
) -> list[tuple[ClientProxy, Result]]:
    """Clients that answered with a status other than OK; Flower counts them among the failures."""
    return [failure for failure in failures if isinstance(failure, tuple)]


def _status_error(result: FitRes | EvaluateRes) -> str | None:
    if result.status.code == Code.OK:
        return None
    return result.status.message or f"status {result.status.code.name}"


_NAMES = inspect.Parameter("parameter_names", inspect.Parameter.KEYWORD_ONLY, default=None)

METHODS: dict[str, type[LegacyStrategy]] = {
    name: subclass(LegacyStrategy, rule, FlowerFedAvg, _NAMES) for name, rule in RULES.items()
}
"""Every strategy by its name in run-config; each is also an attribute of this module, e.g. ``FedPCD``."""

_CLASSES = {strategy.__name__: strategy for strategy in METHODS.values()}

__all__ = ["METHODS", "LegacyStrategy", *_CLASSES]


def __getattr__(name: str) -> type[LegacyStrategy]:
    try:
        return _CLASSES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
