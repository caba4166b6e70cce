"""What every rule reads and returns.

Sign and units, said once: row *i* is the displacement ``Delta_i = theta_t - theta_i`` of client *i*, the global
parameters minus the client's after local training, so it points *uphill*; the server **subtracts**
`Aggregate.step`. The pseudo-gradient is ``g_i = Delta_i / local learning rate``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
TrialLosses = Callable[[Floats], Floats]

LOSS_BEFORE = "loss-before"
"""Need and metric: mean loss on the client's training examples at the received model, before local training, >= 0."""
ACCURACY_BEFORE = "accuracy-before"
"""Need and metric: accuracy in [0, 1] on the training examples at the received model."""
ACCURACY_AFTER = "accuracy-after"
"""Need and metric: accuracy in [0, 1] on the training examples after local training."""
TRAIN_LOSS = "train-loss"
"""Need and metric: mean mini-batch loss during local training, >= 0."""
NEWTON_DIRECTION = "newton-direction"
"""Need: a second row per client, its quasi-Newton direction (`Updates.newton_directions`)."""
TRIAL_LOSSES = "trial-losses"
"""Need: losses on the training examples at models of the server's choice (`Updates.trial_losses`)."""
PERSONAL_MODEL = "personal-model"
"""Need: a model of its own that each client trains and keeps; the server never sees it."""

METRIC_NEEDS = (LOSS_BEFORE, ACCURACY_BEFORE, ACCURACY_AFTER, TRAIN_LOSS)
"""Needs that are numbers in a client's reply, under these very names."""
NEEDS = (*METRIC_NEEDS, NEWTON_DIRECTION, TRIAL_LOSSES, PERSONAL_MODEL)

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
    metrics : mapping of str to ndarray of shape (k,), float64
        What the rule needs to know of each client: one entry per declared need that is a metric, finite and >= 0.
    newton_directions : sequence of ndarray, each of shape (n,)
        Each client's quasi-Newton direction, in the units of a pseudo-gradient times a step; empty unless needed.
    trial_losses : callable (step) -> ndarray of shape (k,), or None
        Asks the participants for their training losses at ``theta_t - step``; NaN for a client that does not answer.
    population : tuple of str
        All clients that could have taken part, sorted by `client_order`; empty where that is not known.
    arrays : tuple of slice
        Where each parameter array lies in a row; by default the row is one array.
    layers : tuple of slice
        Where each layer (weight with bias and a following normalisation) lies; by default the row is one layer.

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
    metrics: Mapping[str, Floats] = field(default_factory=dict)
    newton_directions: Sequence[Row] = ()
    trial_losses: TrialLosses | None = None
    population: tuple[str, ...] = ()
    arrays: tuple[slice, ...] = ()
    layers: tuple[slice, ...] = ()

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
        for key, values in self.metrics.items():
            if values.shape != (k,):
                raise ValueError(f"metric {key!r} has shape {values.shape}, expected {(k,)}")
        if len(self.newton_directions) not in (0, k):
            raise ValueError(f"{len(self.newton_directions)} Newton directions for {k} clients")
        whole = (slice(0, self.rows[0].size),)
        for name in ("arrays", "layers"):
            object.__setattr__(self, name, getattr(self, name) or whole)

    @property
    def weights(self) -> Floats:
        """FedAvg's aggregation weights ``p_i = n_i / sum_j n_j``, shape (k,)."""
        weights: Floats = self.num_examples / self.num_examples.sum()
        return weights

    def by_client(self, values: Floats) -> dict[str, float]:
        """One number per participant as a dict, for the diagnostics."""
        return dict(zip(self.client_ids, values.tolist(), strict=True))


@dataclass(frozen=True)
class Aggregate:
    """What a rule decided.

    Parameters
    ----------
    step : ndarray of shape (n,), float64
        The server's new parameters are ``theta_t - step``.
    diagnostics : dict
        What happened, for people and for the results on disk.
    output_offset : ndarray of shape (n,), float64, or None
        Set by methods whose result is not the model that training continues from: their output is the new parameters
        *plus* this.
    """

    step: Floats
    diagnostics: Diagnostics = field(default_factory=dict)
    output_offset: Floats | None = None
