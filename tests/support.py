"""Small federations for tests: clients that pull the model towards targets of their own, in numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from strategies.protocol import (
    ARRAYS,
    CLIENT_ID,
    CLIENT_IDS,
    CODE_HASH,
    CONFIG,
    HOSTING,
    LOCAL_LEARNING_RATE,
    LOGICAL,
    METRICS,
    NEEDS,
    NEWTON_DIRECTION,
    NUM_EXAMPLES,
    NUM_PARTITIONS,
    OWN,
    ROSTER,
    SPLIT,
    TRAINING_SPLIT,
)
from strategies.rules import Updates
from strategies.rules.updates import ACCURACY_AFTER, ACCURACY_BEFORE, LOSS_BEFORE

HASH = "0123abcd"
TARGETS = 12
"""Logical clients of the small federation."""


def initial_model() -> dict[str, np.ndarray]:
    """A model with every awkward kind of array: 0-dim, empty, half precision, statistics, counters, booleans."""
    generator = np.random.default_rng(7)
    return {
        "weight": generator.standard_normal((5, 4)).astype(np.float32),
        "scale": np.asarray(1.5, dtype=np.float32),
        "nothing": np.zeros((0,), dtype=np.float32),
        "half": generator.standard_normal(3).astype(np.float16),
        "bn.running_mean": np.zeros(4, dtype=np.float32),
        "bn.running_var": np.ones(4, dtype=np.float32),
        "bn.num_batches_tracked": np.asarray(0, dtype=np.int64),
        "mask": np.array([True, False]),
    }


def train(arrays: Mapping[str, np.ndarray], client: int, rate: float) -> dict[str, np.ndarray]:
    """One local step of client `client` towards its own target."""
    generator = np.random.default_rng(1000 + client)
    result = {}
    for name, array in arrays.items():
        if name == "bn.num_batches_tracked":
            result[name] = array + np.asarray(client, dtype=array.dtype)
        elif name == "bn.running_var":
            result[name] = np.full_like(array, 0.5 + 0.1 * client)
        elif array.dtype.kind == "f":
            target = generator.standard_normal(array.shape)
            result[name] = np.asarray(array - rate * (array - target)).astype(array.dtype)
        else:
            result[name] = array
    return result


def loss(arrays: Mapping[str, np.ndarray], client: int) -> float:
    """The loss that `train` goes down: half the squared distance to the client's own target."""
    generator, total = np.random.default_rng(1000 + client), 0.0
    for name, array in arrays.items():
        if array.dtype.kind == "f" and name != "bn.running_var":
            distance = array.astype(np.float64) - generator.standard_normal(array.shape)
            total += 0.0 if "running" in name else 0.5 * float((distance**2).sum())
    return total


def wanted(
    received: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], client: int, config: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The metrics and the Newton direction that a message asks for."""
    needs = str(config.get(NEEDS, "")).split(",")
    values = {
        LOSS_BEFORE: loss(received, client),
        ACCURACY_BEFORE: 1 / (2 + client),
        ACCURACY_AFTER: 1 / (1 + client),
    }
    directions: dict[str, np.ndarray] = {}
    if NEWTON_DIRECTION in needs:
        names = [n for n, a in received.items() if a.dtype.kind == "f" and "running" not in n]
        directions = {n: np.asarray((1 + client) * (received[n] - arrays[n])) for n in names}
    return {key: value for key, value in values.items() if key in needs}, directions


def examples(client: int) -> int:
    """How many examples client `client` has."""
    return 10 + 3 * client


def hosted(node_config: Mapping[str, Any], clients: int = TARGETS) -> dict[str, Any]:
    """What a node says about itself, as the app's ClientApp does."""
    if "client-id" in node_config:
        return {CLIENT_IDS: [str(node_config["client-id"])], HOSTING: OWN, NUM_PARTITIONS: 0, CODE_HASH: HASH}
    own, nodes = int(node_config["partition-id"]), int(node_config["num-partitions"])
    ids = [str(c) for c in range(clients) if c % nodes == own]
    return {CLIENT_IDS: ids, HOSTING: LOGICAL, NUM_PARTITIONS: nodes, CODE_HASH: HASH}


def _client(config: Mapping[str, Any], node_config: Mapping[str, Any]) -> int:
    """Whom a message is meant for: the named client, else (in a foreign project) the node itself."""
    return int(config[CLIENT_ID] if CLIENT_ID in config else node_config["partition-id"])


Tamper = Callable[[int, dict[str, np.ndarray], dict[str, Any]], None]


def message_client(tamper: Tamper | None = None) -> ClientApp:
    """A ClientApp for the Message API; `tamper(client, arrays, metrics)` may spoil a training reply or raise."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(RecordDict({ROSTER: ConfigRecord(hosted(context.node_config))}), reply_to=message)

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        config = message.content[CONFIG]
        client = _client(config, context.node_config)
        received = {name: array.numpy() for name, array in message.content[ARRAYS].items()}
        arrays = train(received, client, float(config.get(LOCAL_LEARNING_RATE, 0.1)))
        metrics: dict[str, Any] = {NUM_EXAMPLES: examples(client), "train-loss": 1.0 + client}
        asked, direction = wanted(received, arrays, client, config)
        metrics |= asked
        if tamper is not None:
            tamper(client, arrays, metrics)
        content = {ARRAYS: record(arrays), **({NEWTON_DIRECTION: record(direction)} if direction else {})}
        return Message(RecordDict({**content, METRICS: MetricRecord(metrics)}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        config = message.content[CONFIG]
        client = _client(config, context.node_config)
        metrics = {NUM_EXAMPLES: examples(client), "accuracy": client / 100, "loss": 1.0 + client}
        if config.get(SPLIT) == TRAINING_SPLIT:
            received = {name: array.numpy() for name, array in message.content[ARRAYS].items()}
            metrics = {NUM_EXAMPLES: examples(client), LOSS_BEFORE: loss(received, client)}
        return Message(RecordDict({METRICS: MetricRecord(metrics)}), reply_to=message)

    return app


def legacy_client(names: list[str], tamper: Tamper | None = None) -> ClientApp:
    """The same clients for the older API."""

    class Client(NumPyClient):
        def __init__(self, context: Context) -> None:
            self.node_config = context.node_config

        def get_properties(self, config: Mapping[str, Any]) -> dict[str, Any]:
            answer = hosted(self.node_config)
            return {**answer, CLIENT_IDS: ",".join(answer[CLIENT_IDS])}

        def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict]:
            client = _client(config, self.node_config)
            received = dict(zip(names, parameters, strict=True))
            arrays = train(received, client, float(config.get(LOCAL_LEARNING_RATE, 0.1)))
            metrics: dict[str, Any] = {NUM_EXAMPLES: examples(client), "train-loss": 1.0 + client}
            asked, direction = wanted(received, arrays, client, config)
            metrics |= asked
            if tamper is not None:
                tamper(client, arrays, metrics)
            return [*arrays.values(), *direction.values()], metrics.pop(NUM_EXAMPLES), metrics

        def evaluate(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[float, int, dict]:
            client = _client(config, self.node_config)
            metrics: dict[str, Any] = {"accuracy": client / 100}
            if config.get(SPLIT) == TRAINING_SPLIT:
                metrics = {LOSS_BEFORE: loss(dict(zip(names, parameters, strict=True)), client)}
            return 1.0 + client, examples(client), metrics

    return ClientApp(client_fn=lambda context: Client(context).to_client())


def record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Arrays as Flower carries them."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def arrays_of(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """Arrays as numpy sees them."""
    return {name: array.numpy() for name, array in arrays.items()}


def assert_same_bits(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> None:
    """Fail unless two models agree in names, order, dtypes, shapes and every bit."""
    assert list(first) == list(second)
    for name in first:
        assert first[name].dtype == second[name].dtype, name
        assert first[name].shape == second[name].shape, name
        assert first[name].tobytes() == second[name].tobytes(), name


def updates(rows: Any, num_examples: Any = None, server_round: int = 1, rate: float = 1.0, first: int = 0) -> Updates:
    """Updates of clients "first", "first + 1", ... with the given rows."""
    matrix = np.asarray(rows)
    counts = np.ones(len(matrix)) if num_examples is None else np.asarray(num_examples, dtype=float)
    ids = tuple(str(first + i) for i in range(len(matrix)))
    return Updates(server_round, ids, tuple(matrix), counts, rate)
