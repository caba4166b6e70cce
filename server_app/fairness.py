"""How evenly a model serves its clients: fairness metrics over all test accuracies, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strategies.rules import client_order

if TYPE_CHECKING:
    from collections.abc import Mapping

    Values = np.ndarray[tuple[int], np.dtype[np.float64]]

__all__ = ["Fairness", "fairness"]

_CLIENTS_PER_TAIL_CLIENT = 10
"""Each tail, the worst and the best 10%, holds one client of every ten, rounded up."""


@dataclass(frozen=True)
class Fairness:
    r"""Fairness metrics over the test accuracies :math:`a_1, \dots, a_N` of all clients.

    Attributes
    ----------
    clients : int
        :math:`N`, the number of clients, at least 1.
    mean : float
        :math:`\frac{1}{N} \sum_i a_i`, in [0, 1]. Every client counts once, whatever its number of examples.
    sigma_c : float
        Standard deviation across clients (population form, ``ddof = 0``), in [0, 0.5].
    worst_10 : float
        Mean of the lowest :math:`\lceil 0.1 N \rceil` accuracies (at least one), in [0, 1].
    best_10 : float
        Mean of the highest :math:`\lceil 0.1 N \rceil` accuracies (at least one), in [0, 1].
    jain : float
        Jain's index :math:`(\sum_i a_i)^2 / (N \sum_i a_i^2) = 1 / (1 + (\sigma_c / \text{mean})^2)`, in
        [1/N, 1]; 1 when all accuracies are equal. All zero gives 0/0; it is *defined* as 1 here, because the
        clients are served equally (badly).
    worst_client : str
        The client with the lowest accuracy; of several, the first in the stable order of ids.
    worst_accuracy : float
        Its accuracy, in [0, 1].
    """

    clients: int
    mean: float
    sigma_c: float
    worst_10: float
    best_10: float
    jain: float
    worst_client: str
    worst_accuracy: float

    def as_json(self) -> dict[str, int | float | str]:
        """Return the metrics under the names that the results files use.

        Returns
        -------
        dict
            ``clients, mean, sigma-c, worst-10, best-10, jain, worst-client, worst-accuracy``.
        """
        return {name.replace("_", "-"): getattr(self, name) for name in self.__dataclass_fields__}


def fairness(accuracies: Mapping[str, float]) -> Fairness:
    """Compute the fairness metrics over all clients.

    The order of the mapping does not change a bit of the result.

    Parameters
    ----------
    accuracies : mapping of str to float
        Test accuracy in [0, 1] by client id, one entry per client.

    Returns
    -------
    Fairness
        The metrics, accumulated in float64.

    Raises
    ------
    ValueError
        If there is no client, or an accuracy is not a finite number in [0, 1]; the message names the clients.
    """
    if not accuracies:
        raise ValueError("fairness needs the accuracy of at least one client; none was given")
    wrong = {client: value for client, value in accuracies.items() if not 0.0 <= value <= 1.0}
    if wrong:
        first = sorted(wrong, key=client_order)[:5]
        listed = ", ".join(f"client {client!r}: {wrong[client]!r}" for client in first)
        raise ValueError(f"accuracies must be finite and in [0, 1]; {len(wrong)} are not, e.g. {listed}")

    worst_client = min(accuracies, key=lambda client: (accuracies[client], client_order(client)))
    ascending = np.sort(np.array(list(accuracies.values()), dtype=np.float64))
    tail = -(-len(ascending) // _CLIENTS_PER_TAIL_CLIENT)  # in integers: 0.1 * 70 exceeds 7 in floating point
    return Fairness(
        clients=len(ascending),
        mean=_mean(ascending),
        sigma_c=math.sqrt(_mean((ascending - _mean(ascending)) ** 2)),
        worst_10=_mean(ascending[:tail]),
        best_10=_mean(ascending[-tail:]),
        jain=_jain(ascending),
        worst_client=worst_client,
        worst_accuracy=float(accuracies[worst_client]),
    )


def _mean(values: Values) -> float:
    """Exactly rounded mean, clipped to the range of the values: rounding must not put a mean outside it."""
    mean = math.fsum(values) / len(values)
    return min(max(mean, float(values.min())), float(values.max()))


def _jain(ascending: Values) -> float:
    """Jain's index, scaled by the largest accuracy first: squares of tiny accuracies must not underflow."""
    largest = float(ascending[-1])
    if largest == 0.0:
        return 1.0
    scaled = ascending / largest
    index = math.fsum(scaled) ** 2 / (len(scaled) * math.fsum(scaled**2))
    return min(max(index, 1.0 / len(scaled)), 1.0)
