"""The app's ClientApp with clients that misbehave after they have really trained; one plan for every engine.

A test copies this file into an app as ``client_app/faulty_client.py`` to run the same clients under Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

from client_app.app import DualApiClientApp
from client_app.app import app as honest_app
from strategies.protocol import ARRAYS, CLIENT_ID, CONFIG, METRICS, SERVER_ROUND

Arrays = dict[str, np.ndarray]

SHARES = {"raises": 0.2, "nan": 0.1, "shape": 0.1, "huge": 0.1, "silent": 0.1}
"""Shares of the clients by what they do; the others are honest."""

REJECTIONS = {
    # Flower's simulation keeps only an exception's text, and a MemoryError has none.
    "raises": (
        "error",
        r"no label in /data/zürich|CUDA error: out of memory|^MemoryError|^Exception ClientAppException",
    ),
    "nan": ("invalid", r"^array '\d\.(weight|bias)' holds NaN or infinity$"),
    "shape": ("invalid", r"^array ('.+' has shape \(.*\), expected|names differ: missing \[.*\], unexpected)"),
    "huge": ("invalid", r"^its update (has length \S+, more than 10 times .*\(norm-screen\)|overflows float32)$"),
    "silent": ("silent", r"^did not answer before the round's deadline$"),
}
"""Kind of the rejection and pattern of its reason, by fault."""


@dataclass(frozen=True)
class Plan:
    """Who misbehaves when, and how; decided by the seed, the round and the client alone.

    Parameters
    ----------
    clients : int
        Number of clients, named "0", "1", ...
    seed : int
        Decides which clients are bad.
    reliability : float
        Probability with which a bad client is honest in a round; of its bad rounds one in four is another fault.
    """

    clients: int
    seed: int
    reliability: float = 0.0

    @property
    def habits(self) -> dict[str, str]:
        """The bad clients and the fault that each prefers."""
        order = iter(np.random.default_rng([self.seed, 77]).permutation(self.clients).tolist())
        return {str(next(order)): fault for fault, share in SHARES.items() for _ in range(round(share * self.clients))}

    @property
    def honest(self) -> set[str]:
        """Clients that never misbehave."""
        return {str(client) for client in range(self.clients)} - self.habits.keys()

    def fault(self, client: str, server_round: int) -> str | None:
        """What the client does wrong in a round; None if nothing."""
        habit, (honest, other, which) = self.habits.get(client), self.draws(client, server_round).random(3)
        if habit is None or honest < self.reliability:
            return None
        return list(SHARES)[int(which * len(SHARES))] if self.reliability > 0.0 and other < 0.25 else habit

    def draws(self, client: str, server_round: int) -> np.random.Generator:
        """The random stream of a client's misbehaviour in a round."""
        return np.random.default_rng([self.seed, server_round, int(client), 78])

    def of(self, message: Message) -> str | None:
        """The fault with which a message is answered."""
        if message.metadata.message_type != MessageType.TRAIN:
            return None
        config = message.content[CONFIG]
        assert isinstance(config, ConfigRecord)
        return self.fault(str(config[CLIENT_ID]), int(str(config[SERVER_ROUND])))


class FaultyClientApp(DualApiClientApp):
    """Trains as the app does, then answers as `plan` says.

    Parameters
    ----------
    plan : callable (Context) -> Plan
        The run's plan.
    """

    def __init__(self, plan: Callable[[Context], Plan]) -> None:
        super().__init__()
        self.plan = plan

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one message."""
        plan = self.plan(context)
        fault = plan.of(message)
        config = message.content[CONFIG] if fault is not None else ConfigRecord()
        reply = honest_app(message, context)
        if fault is None or reply.has_error():
            return reply
        draws = plan.draws(str(config[CLIENT_ID]), int(str(config[SERVER_ROUND])))
        draws.random(3)  # what decided that there is a fault
        if fault == "silent":
            time.sleep(float(str(context.run_config["round-timeout"])) + 2.0)
        received, trained = (_numpy(content[ARRAYS]) for content in (message.content, reply.content))
        spoilt = SPOILERS[fault](draws, received, trained)
        content = RecordDict({ARRAYS: _record(spoilt), METRICS: reply.content[METRICS]})
        return Message(content, reply_to=message)


def raises(draws: np.random.Generator, received: Arrays, trained: Arrays) -> Arrays:
    """Raise what clients raise."""
    errors = [
        ValueError("first line\n\nno label in /data/zürich\t✓"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
    ]
    raise errors[draws.integers(len(errors))]


def nan(draws: np.random.Generator, received: Arrays, trained: Arrays) -> Arrays:
    """One value, one array or everything is no number."""
    value = draws.choice([np.nan, np.inf, -np.inf])
    if draws.random() < 0.3:
        return {name: np.full_like(array, value) for name, array in trained.items()}
    name = list(trained)[draws.integers(len(trained))]
    flat = trained[name].copy().ravel()
    flat[draws.integers(flat.size)] = value
    return {**trained, name: flat.reshape(trained[name].shape)}


def shape(draws: np.random.Generator, received: Arrays, trained: Arrays) -> Arrays:
    """An array is missing, or too many, or has another shape."""
    name = list(trained)[draws.integers(len(trained))]
    array, others = trained[name], {n: a for n, a in trained.items() if n != name}
    changed = [
        {**trained, name: array[:-1]},
        {**trained, name: array[None]},
        {**trained, name: np.asarray(array.ravel()[0])},
        {**trained, name: np.zeros(0, dtype=array.dtype)},
        others,
        {**others, f"module.{name}": array},
        {**trained, "more": array},
        {},
    ]
    return changed[draws.integers(len(changed))]


def huge(draws: np.random.Generator, received: Arrays, trained: Arrays) -> Arrays:
    """Its own update or the opposite, but thousands of times as long as the model; or a constant near infinity."""
    if draws.random() < 0.2:
        return {name: np.full_like(array, 3e38) for name, array in trained.items()}
    update = {name: trained[name].astype(np.float64) - array for name, array in received.items()}
    if not any(array.any() for array in update.values()):  # it had nothing left to learn
        update = {name: draws.standard_normal(array.shape) for name, array in received.items()}
    factor = draws.choice([-1.0, 1.0]) * 10.0 ** draws.uniform(3.0, 20.0) * _length(received) / _length(update)
    moved = {name: received[name] + factor * array for name, array in update.items()}
    return {name: np.asarray(array, dtype=trained[name].dtype) for name, array in moved.items()}


def silent(draws: np.random.Generator, received: Arrays, trained: Arrays) -> Arrays:
    """Right, but much too late."""
    return trained


SPOILERS: dict[str, Callable[[np.random.Generator, Arrays, Arrays], Arrays]] = {
    "raises": raises,
    "nan": nan,
    "shape": shape,
    "huge": huge,
    "silent": silent,
}


def _length(arrays: Arrays) -> float:
    return float(np.linalg.norm([np.linalg.norm(array) for array in arrays.values()]))


def _numpy(record: object) -> Arrays:
    assert isinstance(record, ArrayRecord)
    return {name: array.numpy() for name, array in record.items()}


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def plan_of_run(context: Context) -> Plan:
    """The plan that follows from the run config alone."""
    return Plan(*(int(str(context.run_config[key])) for key in ("num-clients", "seed")))


app = FaultyClientApp(plan_of_run)
