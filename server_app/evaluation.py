"""The server's own evaluation of every client, in simulation, where it can make their data too."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from flwr.app import ArrayRecord

from client_app.data import load_dataset
from client_app.models import build_model
from client_app.partition import load_partition
from client_app.training import example_metrics, resolve_device, torch_threads
from strategies.protocol import ACCURACY, LOSS, NUM_EXAMPLES
from strategies.reports import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from client_app.config import TaskConfig
    from strategies.reports import EvaluationReport

__all__ = [
    "ClientMetrics",
    "DisagreementError",
    "ServerEvaluation",
    "check_agreement",
    "initial_arrays",
    "usable_metrics",
]

ClientMetrics = dict[str, dict[str, float]]
"""By client id: accuracy in [0, 1], mean loss in nats and number of test examples, under the protocol's names."""

_TOLERANCE: Final = 1e-6
"""Server and clients count the same correct answers, so their accuracies may differ by rounding only."""


class DisagreementError(RuntimeError):
    """Server and clients measured different accuracies of the same model: they do not have the same data."""


class ServerEvaluation:
    """Evaluates the global model on all clients' test examples in one forward pass over their union.

    An example that several clients share is computed once. The numbers are those of the clients' own evaluation:
    accuracies exactly, losses up to float32 rounding in the forward pass.

    Parameters
    ----------
    task : TaskConfig
        The task; its data are loaded here, once.

    Raises
    ------
    ConfigError
        If the partition is impossible or the device does not exist.
    DataError
        If the data set is missing or damaged.
    """

    def __init__(self, task: TaskConfig) -> None:
        partition = load_partition(task)
        union, position = np.unique(np.concatenate(partition.test), return_inverse=True)
        self._positions = np.split(position, np.cumsum([len(test) for test in partition.test])[:-1])
        self._threads = task.torch_threads
        device = resolve_device(task.device)
        images, labels = load_dataset(task).test_examples(union)
        self._images, self._labels = images.to(device), labels.to(device)
        self._model = build_model(task).to(device)

    def __call__(self, arrays: ArrayRecord) -> ClientMetrics:
        """Evaluate a model for every client.

        Parameters
        ----------
        arrays : ArrayRecord
            The model, with the names of its state dict.

        Returns
        -------
        dict
            Metrics of every client, in the order of the clients' numbers.
        """
        with torch_threads(self._threads):
            self._model.load_state_dict(arrays.to_torch_state_dict())
            correct, losses = example_metrics(self._model, self._images, self._labels)
        return {
            str(client): {
                ACCURACY: float(correct[where].mean()),
                LOSS: float(losses[where].mean()),
                NUM_EXAMPLES: len(where),
            }
            for client, where in enumerate(self._positions)
        }


def check_agreement(
    server_round: int,
    on_server: Mapping[str, Mapping[str, float]],
    on_clients: Mapping[str, Mapping[str, float]],
) -> None:
    """Compare the server's accuracies with those of the clients that answered.

    Parameters
    ----------
    server_round : int
        The round, for the error.
    on_server, on_clients : mapping
        Metrics by client id.

    Raises
    ------
    DisagreementError
        If an accuracy differs by more than 1e-6, or a client is unknown to the server; names the client.
    """
    for client, measured in on_clients.items():
        if client not in on_server:
            raise DisagreementError(
                f"round {server_round}: client {client} evaluated, but the server knows no such client; "
                "num-clients must be the same on both sides"
            )
        mine, theirs = on_server[client][ACCURACY], measured[ACCURACY]
        if not abs(mine - theirs) <= _TOLERANCE:
            raise DisagreementError(
                f"round {server_round}: the server measures accuracy {mine} for client {client}, the client itself "
                f"{theirs}; they have different data or code: check data-dir on both sides"
            )


def usable_metrics(report: EvaluationReport) -> tuple[ClientMetrics, list[Rejection]]:
    """Check what clients say about themselves: a bad answer costs its sender the evaluation, never the run.

    Parameters
    ----------
    report : EvaluationReport
        The strategy's account, in which only the number of examples has been checked.

    Returns
    -------
    metrics : dict
        Of the clients whose accuracy is usable; a loss that was missing or not finite is NaN.
    rejections : list of Rejection
        The strategy's own, then one for each client without a usable accuracy.
    """
    metrics: ClientMetrics = {}
    rejections = list(report.rejections)
    for client, values in report.metrics.items():
        accuracy = values.get(ACCURACY)
        if accuracy is None or not 0.0 <= accuracy <= 1.0:
            found = "is missing or not finite" if accuracy is None else f"= {accuracy}"
            reason = f"metric {ACCURACY!r} {found}: expected a number in [0, 1]"
            rejections.append(Rejection(client, "invalid", reason))
        else:
            metrics[client] = {LOSS: math.nan, **values}
    return metrics, rejections


def initial_arrays(task: TaskConfig) -> ArrayRecord:
    """Return the initial model, the same for every strategy of a seed.

    Parameters
    ----------
    task : TaskConfig
        Data set, model and seed are used; no data are loaded.

    Returns
    -------
    ArrayRecord
        Parameters and buffers, in the order of the model's state dict.
    """
    return ArrayRecord(build_model(task).state_dict())
