"""The same client for Flower's older API (``NumPyClient``), where models are lists of arrays without names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.client import NumPyClient
from numpy.typing import NDArray

from client_app import client
from client_app.client_state import PARTICIPATIONS
from client_app.code_hash import code_hash
from client_app.needs import read_needs, wants_training_split
from strategies import protocol
from strategies.rules.updates import LOSS_BEFORE

Arrays = list[NDArray[Any]]


class LegacyClient(NumPyClient):  # type: ignore[misc, unused-ignore]
    """Answers the older API's requests; arrays travel in state-dict order.

    Parameters
    ----------
    context : flwr.app.Context
        The node's context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the node's roster; the client ids are one string with commas, since lists cannot travel here."""
        del config  # part of Flower's signature
        roster = client.describe_node(self._context)
        part = {} if roster.partition_id is None else {protocol.PARTITION_ID: roster.partition_id}
        return {
            protocol.CLIENT_IDS: ",".join(roster.client_ids),
            protocol.HOSTING: roster.hosting,
            protocol.NUM_PARTITIONS: roster.num_partitions,
            protocol.CODE_HASH: code_hash(),
            **part,
        }

    def get_parameters(self, config: dict[str, Any]) -> Arrays:
        """Return the initial model of the run's seed."""
        del config  # part of Flower's signature
        return _to_arrays(client.initial_state(self._context))

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        """Train the received model on the training examples of the client that the config names."""
        order, rate = client.read_order(config), client.read_learning_rate(config)
        result = client.train_client(self._context, order, rate, self._to_state(parameters), read_needs(config))
        metrics = {protocol.TRAIN_LOSS: result.train_loss, PARTICIPATIONS: result.participations, **result.metrics}
        directions = _to_arrays(result.newton_direction or {})
        return [*_to_arrays(result.state), *directions], result.num_examples, metrics

    def evaluate(self, parameters: Arrays, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Evaluate the received model on the test examples of the client that the config names."""
        order = client.read_order(config)
        if wants_training_split(config):
            count, loss = client.training_loss(self._context, order, self._to_state(parameters))
            return loss, count, {LOSS_BEFORE: loss}
        result = client.evaluate_client(self._context, order, self._to_state(parameters), read_needs(config))
        return result.loss, result.num_examples, {protocol.ACCURACY: result.accuracy, **result.personal}

    def _to_state(self, parameters: Arrays) -> dict[str, torch.Tensor]:
        names = list(client.initial_state(self._context))
        if len(parameters) != len(names):
            raise ValueError(f"the message has {len(parameters)} arrays, the model {len(names)}: {', '.join(names)}")
        return {name: torch.from_numpy(array) for name, array in zip(names, parameters, strict=True)}


def _to_arrays(state: client.State) -> Arrays:
    return [np.asarray(value.numpy()) for value in state.values()]
