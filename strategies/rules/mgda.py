"""MGDA (Desideri 2012): the shortest vector in the convex hull of the clients' updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gram import combine, cosines
from .minnorm import minimum_norm
from .rule import Rule
from .updates import Aggregate, State, Updates
from .validation import check_flag, check_learning_rate, server_rate


@dataclass(frozen=True)
class MGDA(Rule):
    """The shortest vector in the convex hull of the updates, along which every client descends equally.

    ``lambda* = argmin |sum_i lambda_i g_i|^2`` over the simplex, ``theta <- theta - eta_g sum_i lambda*_i g_i``.

    Needs: nothing beyond the updates.

    Guarantees: permutation-invariant, scale-equivariant, fedavg-when-identical, single-client-is-fedavg,
    non-conflicting, convex-combination.

    Cost: one Gram matrix of the k updates, a program of k variables, one combination.

    Use it when a common descent direction is all that is asked; steps get short as conflicts grow.

    Parameters
    ----------
    normalize_rows : bool
        Unit updates in place of the updates; the step then has the length of a combination of unit vectors times the
        updates' mean length.
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round.

    Notes
    -----
    Departs from the paper: zero updates are left out, since one client without progress would freeze all others.
    Solved exactly and certified where public code iterates Frank-Wolfe.

    References
    ----------
    Desideri, *Multiple-gradient descent algorithm (MGDA) for multiobjective optimization*, 2012.
    """

    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "scale-equivariant",
        "fedavg-when-identical",
        "single-client-is-fedavg",
        "non-conflicting",
        "convex-combination",
    )

    normalize_rows: bool = False
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_flag("normalize_rows", self.normalize_rows)
        check_learning_rate(self.server_learning_rate)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round; the state is not used."""
        norms, matrix = cosines(updates.rows, (), np.zeros(0))
        used = norms > 0.0
        if not used.any():
            return Aggregate(np.zeros(updates.rows[0].size), {"status": "stationary", "weights": {}}), state
        lengths = np.full(int(used.sum()), norms[used].mean()) if self.normalize_rows else norms[used]
        found = minimum_norm(matrix[np.ix_(used, used)], lengths)
        weights = np.zeros(norms.size)
        if found.status == "solved":
            weights[used] = found.weights
        coefficients = weights.copy()
        coefficients[used] *= lengths / norms[used]
        step = combine(updates.rows, coefficients)
        step *= server_rate(self.server_learning_rate, updates.local_learning_rate)
        return Aggregate(step, {"status": found.status, "weights": updates.by_client(weights)}), state
