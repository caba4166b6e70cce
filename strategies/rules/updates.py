"""What every rule reads and returns.

Sign and units, said once: row *i* is the displacement ``Delta_i = theta_t - theta_i`` of client *i*, the global
parameters minus the client's after local training, so it points *uphill*; the server **subtracts**
`Aggregate.step`. The pseudo-gradient is ``g_i = Delta_i / local learning rate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Row = NDArray[np.floating[Any]]
State = dict[str, Any]
"""A rule's memory between rounds: a plain dict of arrays, numbers and lists of client ids."""
Diagnostics = dict[str, Any]
"""What a rule says about one round: values that JSON can hold."""

_LONGEST_NUMBER = 18
"""Digits of an id that is ordered as a number."""


def client_order(client_id: str) -> tuple[int, int, str]:
    """Sort key that gives client ids one stable order: decimal ids by value, then all others by text.

    Parameters
    ----------
    client_id : str
        A client id.

    Returns
    -------
    tuple of (int, int, str)
        The sort key.
    """
    if client_id.isascii() and client_id.isdecimal() and len(client_id) <= _LONGEST_NUMBER:
        return (0, int(client_id), client_id)
    return (1, 0, client_id)


@dataclass(frozen=True)
class Updates:
    """The validated updates of one round, in the stable order of client ids.

    Parameters
    ----------
    round : int
        The round, counted from 1.
    client_ids : tuple of str
        The k participants, distinct, sorted by `client_order`.
    rows : sequence of ndarray, each of shape (n,)
        Displacements ``Delta_i``, finite, all of one floating dtype.
    num_examples : ndarray of shape (k,), float64
        Examples of each client, > 0.
    local_learning_rate : float
        The local learning rate of this round, > 0.

    Raises
    ------
    ValueError
        If the parts disagree in number or shape, or the clients are unsorted or repeated.
    """

    round: int
    client_ids: tuple[str, ...]
    rows: Sequence[Row]
    num_examples: Floats
    local_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        k = len(self.client_ids)
        if k == 0:
            raise ValueError("a round needs at least one update")
        if len(self.rows) != k or self.num_examples.shape != (k,):
            raise ValueError(
                f"{k} client ids, {len(self.rows)} rows and {self.num_examples.shape} example counts disagree"
            )
        if list(self.client_ids) != sorted(set(self.client_ids), key=client_order):
            raise ValueError("client ids must be distinct and sorted by client_order")
        if len({row.shape for row in self.rows}) != 1 or self.rows[0].ndim != 1:
            raise ValueError(f"rows must be vectors of one length, got {[row.shape for row in self.rows]}")
        if not (self.num_examples > 0).all():
            raise ValueError(f"num_examples must be > 0, got {self.num_examples.tolist()}")
        if not self.local_learning_rate > 0:
            raise ValueError(f"local_learning_rate must be > 0, got {self.local_learning_rate}")

    @property
    def weights(self) -> Floats:
        """FedAvg's aggregation weights ``p_i = n_i / sum_j n_j``, shape (k,)."""
        weights: Floats = self.num_examples / self.num_examples.sum()
        return weights


@dataclass(frozen=True)
class Aggregate:
    """What a rule decided.

    Parameters
    ----------
    step : ndarray of shape (n,), float64
        The server's new parameters are ``theta_t - step``.
    diagnostics : dict
        What happened, for people and for the results on disk.
    """

    step: Floats
    diagnostics: Diagnostics = field(default_factory=dict)
