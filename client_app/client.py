"""A client's work on one message, the same for both of Flower's APIs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from torch import nn

from client_app import client_state, hosting, streams
from client_app.config import ConfigError, TaskConfig
from client_app.data import load_dataset
from client_app.data_sources import DataError
from client_app.models import build_model
from client_app.needs import NO_NEEDS, Needs
from client_app.newton import quasi_newton
from client_app.partition import examples_of
from client_app.personal import load_personal, pull_towards, save_personal
from client_app.training import TORCH_LOCK, evaluate, resolve_device, torch_seed, torch_threads, train_locally
from strategies import protocol
from strategies.rules.updates import (
    ACCURACY_AFTER,
    ACCURACY_BEFORE,
    LOSS_BEFORE,
    NEWTON_DIRECTION,
    PERSONAL_MODEL,
)

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Order:
    """What a message asks of a client.

    Parameters
    ----------
    client_id : str
        The client that is meant.
    server_round : int
        Round, counted from 1 (0 for an evaluation before the first round).
    strategy : str
        Name of the strategy that trains; empty if the server does not say.
    """

    client_id: str
    server_round: int
    strategy: str = ""

    @property
    def memory(self) -> str:
        """Name under which the client keeps what it remembers: strategies that run in turn do not share it."""
        return f"{self.strategy}/{self.client_id}" if self.strategy else self.client_id


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """A trained model (CPU tensors in state-dict order) and what is reported with it."""

    state: dict[str, torch.Tensor]
    num_examples: int
    train_loss: float
    participations: int
    metrics: dict[str, float] = field(default_factory=dict)
    newton_direction: dict[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class EvaluationResult:
    """A model's performance on a client's own test examples."""

    num_examples: int
    accuracy: float
    loss: float
    personal: dict[str, float] = field(default_factory=dict)


def task_of(context: Context) -> TaskConfig:
    """Return the run's task on this node, whose own data and device go before the run's."""
    return hosting.task_on_node(context.run_config, context.node_config)


def describe_node(context: Context) -> hosting.Roster:
    """Return the node's roster, after checking that the run's settings work on this node.

    Raises
    ------
    ConfigError
        If the node's device, identity or part of the data is not usable; a deployed node also looks at its data.
    DataError
        If a deployed node's data are missing or damaged.
    """
    site = context.node_config.get(hosting.CLIENT_ID)
    try:
        return _describe(context)
    except (ConfigError, DataError) as error:
        if site is None:
            raise
        # The server knows the node by its number only.
        raise type(error)(f"{hosting.CLIENT_ID}={site!r}: {error}") from error


def _describe(context: Context) -> hosting.Roster:
    task = task_of(context)
    resolve_device(task.device)
    roster = hosting.describe(task, context.node_config)
    if roster.hosting == protocol.OWN:
        examples_of(task, hosting.partition_index(context.node_config, roster.client_ids[0], task.num_clients))
    return roster


def read_order(config: Mapping[str, Any]) -> Order:
    """Read client id and round from a message's config.

    Raises
    ------
    ValueError
        If one is missing or of the wrong type; the text names the key.
    """
    client_id = _require(config, protocol.CLIENT_ID, str)
    strategy = str(config.get(protocol.STRATEGY, ""))
    return Order(client_id, _require(config, protocol.SERVER_ROUND, int), strategy)


def read_learning_rate(config: Mapping[str, Any]) -> float:
    """Read the round's local learning rate from a message's config.

    Raises
    ------
    ValueError
        If it is missing or not a finite number > 0.
    """
    rate = float(_require(config, protocol.LOCAL_LEARNING_RATE, float))
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"{protocol.LOCAL_LEARNING_RATE}={rate} in the message: expected a finite number > 0")
    return rate


def train_client(
    context: Context, order: Order, learning_rate: float, state: State, needs: Needs = NO_NEEDS
) -> TrainingResult:
    """Train the received model on a client's training examples.

    Parameters
    ----------
    context : Context
        The node's context; the client's own state in it is updated.
    order : Order
        Which client, which round.
    learning_rate : float
        The round's local learning rate.
    state : Mapping
        The received model's state dict.
    needs : Needs
        What is computed beyond the update.

    Returns
    -------
    TrainingResult
        Bit-identical for equal seed, round, client and model, whichever worker computes it.

    Raises
    ------
    ValueError
        If the node does not serve the client.
    """
    task = _task(context, order)
    images, labels = _train_examples(context, order, task)
    device = images.device
    sequence = streams.client_sequence(task.seed, order.server_round, order.client_id)
    with TORCH_LOCK, torch_threads(task.torch_threads), torch_seed(streams.integer_seed(sequence), device):
        model = _model(task)
        model.load_state_dict(state)
        metrics = _metrics_before(model, images, labels, needs)
        direction = None
        if NEWTON_DIRECTION in needs:
            loss, direction = _train_newton(context, order, task, model, images, labels, learning_rate, needs)
        else:
            loss = train_locally(
                model,
                images,
                labels,
                learning_rate=learning_rate,
                local_epochs=task.local_epochs,
                batch_size=task.batch_size,
                rng=np.random.default_rng(sequence),
                transform=needs.utility,
            )
        if ACCURACY_AFTER in needs:
            metrics[ACCURACY_AFTER] = evaluate(model, images, labels)[0]
        trained = {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
        participations = client_state.count_participation(context.state, order.memory)
    if PERSONAL_MODEL in needs:
        # A stream of its own: the global model's training stays FedAvg's, bit for bit.
        (own,) = sequence.spawn(1)
        _train_personal(context, order, task, state, images, labels, learning_rate, needs, own)
    return TrainingResult(trained, len(labels), loss, participations, metrics, direction)


def _train_newton(
    context: Context,
    order: Order,
    task: TaskConfig,
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    learning_rate: float,
    needs: Needs,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Leave ``theta_t - eta g`` in the model, and return the mean local loss and the quasi-Newton direction."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    received = [p.detach().clone() for _, p in named]
    gradient, direction, loss = quasi_newton(
        model,
        images,
        labels,
        learning_rate=learning_rate,
        steps=task.local_epochs,
        memory=needs.newton_memory,
        state=context.state,
        name=order.memory,
    )
    sizes = [p.numel() for _, p in named]
    with torch.no_grad():
        for (_, parameter), start, part in zip(named, received, torch.split(gradient, sizes), strict=True):
            parameter.copy_(start - learning_rate * part.view_as(start))
    parts = zip(named, torch.split(direction, sizes), strict=True)
    return loss, {name: part.view_as(parameter).to("cpu", copy=True) for (name, parameter), part in parts}


def _train_personal(
    context: Context,
    order: Order,
    task: TaskConfig,
    received: State,
    images: torch.Tensor,
    labels: torch.Tensor,
    learning_rate: float,
    needs: Needs,
    sequence: np.random.SeedSequence,
) -> None:
    """Train and keep the client's personal model; the first time it starts at the received one."""
    device = images.device
    with TORCH_LOCK, torch_threads(task.torch_threads), torch_seed(streams.integer_seed(sequence), device):
        model = _model(task)
        model.load_state_dict(load_personal(context.state, order.memory) or received)
        train_locally(
            model,
            images,
            labels,
            learning_rate=learning_rate,
            local_epochs=needs.personal_epochs or task.local_epochs,
            batch_size=task.batch_size,
            rng=np.random.default_rng(sequence),
            pull=pull_towards(model, received, needs.personal_weight, learning_rate),
        )
        save_personal(context.state, order.memory, model)


def evaluate_client(context: Context, order: Order, state: State, needs: Needs = NO_NEEDS) -> EvaluationResult:
    """Evaluate the received model on a client's own test examples.

    Parameters
    ----------
    context : Context
        The node's context.
    order : Order
        Which client, which round.
    state : Mapping
        The received model's state dict.
    needs : Needs
        Whether the client's personal model is evaluated too; the received one stands for it before it exists.

    Returns
    -------
    EvaluationResult
        Metrics in float64.

    Raises
    ------
    ValueError
        If the node does not serve the client.
    """
    task = _task(context, order)
    _, where = examples_of(task, _index(context, order, task))
    device = resolve_device(task.device)
    images, labels = (tensor.to(device) for tensor in load_dataset(task).test_examples(where))
    with TORCH_LOCK, torch_threads(task.torch_threads):
        model = _model(task)
        model.load_state_dict(state)
        accuracy, loss = evaluate(model, images, labels)
        personal: dict[str, float] = {}
        if PERSONAL_MODEL in needs:
            model.load_state_dict(load_personal(context.state, order.memory) or state)
            own_accuracy, own_loss = evaluate(model, images, labels)
            personal = {protocol.PERSONAL_ACCURACY: own_accuracy, protocol.PERSONAL_LOSS: own_loss}
    return EvaluationResult(len(labels), accuracy, loss, personal)


def training_loss(context: Context, order: Order, state: State) -> tuple[int, float]:
    """Return the number of a client's training examples and the received model's mean loss on them."""
    task = _task(context, order)
    images, labels = _train_examples(context, order, task)
    with TORCH_LOCK, torch_threads(task.torch_threads):
        model = _model(task)
        model.load_state_dict(state)
        return len(labels), evaluate(model, images, labels)[1]


def _metrics_before(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, needs: Needs) -> dict[str, float]:
    if LOSS_BEFORE not in needs and ACCURACY_BEFORE not in needs:
        return {}
    accuracy, loss = evaluate(model, images, labels)
    return {name: value for name, value in ((LOSS_BEFORE, loss), (ACCURACY_BEFORE, accuracy)) if name in needs}


def initial_state(context: Context) -> State:
    """Return the initial model of the run's seed, for servers that ask a client for it and for the arrays' names."""
    return _initial_state(task_of(context))


@lru_cache(maxsize=1)
def _initial_state(task: TaskConfig) -> State:
    return MappingProxyType(build_model(task).state_dict())


@lru_cache(maxsize=1)
def _model(task: TaskConfig) -> nn.Module:
    """Build the process's one model; its parameters are overwritten by every message."""
    return build_model(task).to(resolve_device(task.device))


def _task(context: Context, order: Order) -> TaskConfig:
    task = task_of(context)
    hosting.read_roster(context.node_config, task.num_clients).require(order.client_id)
    return task


def _index(context: Context, order: Order, task: TaskConfig) -> int | None:
    return hosting.partition_index(context.node_config, order.client_id, task.num_clients)


def _train_examples(context: Context, order: Order, task: TaskConfig) -> tuple[torch.Tensor, torch.Tensor]:
    where, _ = examples_of(task, _index(context, order, task))
    images, labels = load_dataset(task).train_examples(where)
    device = resolve_device(task.device)
    return images.to(device), labels.to(device)


def _require(config: Mapping[str, Any], key: str, kind: type) -> Any:
    if key not in config:
        raise ValueError(f"the message's config lacks {key!r}: the server does not speak this app's protocol")
    value = config[key]
    allowed = (int, float) if kind is float else (kind,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ValueError(f"{key}={value!r} in the message is of type {type(value).__name__}: expected {kind.__name__}")
    return value
