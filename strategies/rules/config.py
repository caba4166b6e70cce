"""ConFIG (Liu, Chu, Thuerey 2024): the direction that has the same cosine with every client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gram import cosines, norm
from .leastsquares import combine_units, meet
from .rule import Rule
from .updates import Aggregate, Floats, State, Updates
from .validation import check_choice, check_learning_rate, server_rate

LENGTH_MODELS = ("projection", "min", "max", "mean", "harmonic", "geometric")


@dataclass(frozen=True)
class ConFIG(Rule):
    """The direction of equal cosines with all clients, as long as the clients' projections on it together.

    ``v = U^+ 1`` for unit updates U, ``g_u = v / |v|``, ``d = (1 / k sum_i <g_i, g_u>) g_u`` and ``theta <- theta -
    eta_g d``.

    Needs: nothing beyond the updates, which must be individual (no secure aggregation).

    Guarantees: permutation-invariant, scale-equivariant, non-conflicting, single-client-is-fedavg,
    fedavg-when-identical.

    Cost: k^2 n / 2 multiplications for the cosines and k n for the step; no memory between rounds.

    Use it when all participants should gain alike in direction, whatever the size of their update.

    Parameters
    ----------
    length_model : {"projection", "min", "max", "mean", "harmonic", "geometric"}
        "projection": the projections of the updates on the direction. The others put the minimum, maximum, or
        arithmetic, harmonic or geometric mean of the updates' lengths in place of each client's own.
    length_scale : {"mean", "sum"}
        Whether these lengths are averaged over the k clients or, as in the authors' code, added up: k identical clients
        then take k times FedAvg's step, and a learning rate made for FedAvg diverges.
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round.

    Notes
    -----
    Departs from the authors' code: the pseudo-inverse (eigenvalues of the cosines below 1e-10 of the largest count
    as zero) instead of a least-squares routine that depends on the driver; zero updates are dropped; lengths are
    averaged unless `length_scale` says otherwise. Non-conflict holds where the updates are linearly independent;
    dependent ones get the least-squares answer.

    References
    ----------
    Liu, Chu, Thuerey, *ConFIG: Towards Conflict-free Training of Physics Informed Neural Networks*, arXiv 2408.11104.
    """

    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "scale-equivariant",
        "non-conflicting",
        "single-client-is-fedavg",
        "fedavg-when-identical",
    )

    length_model: str = "projection"
    length_scale: str = "mean"
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_choice("length_model", self.length_model, LENGTH_MODELS)
        check_choice("length_scale", self.length_scale, ("mean", "sum"))
        check_learning_rate(self.server_learning_rate)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round; the state is not used.

        Parameters
        ----------
        updates : Updates
            The round's updates.
        state : dict
            Not used.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the state as it was.
        """
        norms, block = cosines(updates.rows, (), np.zeros(0))
        used = norms > 0.0
        rank, weights, factor = 0, np.zeros(norms.size), 0.0
        step = np.zeros(updates.rows[0].size)
        if used.any():
            matrix = block[np.ix_(used, used)]
            demand = meet(matrix, np.ones(int(used.sum())))
            rank, weights[used] = demand.rank, demand.coefficients
            step = combine_units(list(updates.rows), norms, weights)
        length = norm(step)
        if length > 0.0:
            rate = server_rate(self.server_learning_rate, updates.local_learning_rate)
            projections = matrix @ (weights[used] / length)
            rate /= projections.size if self.length_scale == "mean" else 1
            factor = rate * float(self._lengths(norms[used]) @ projections) / length
            step *= factor
        weights = weights * factor / np.where(used, norms, 1.0)
        diagnostics = {
            "status": "solved" if length > 0.0 else "stationary",
            "rank": rank,
            "clients-used": int(used.sum()),
            "weights": dict(zip(updates.client_ids, weights.tolist(), strict=True)),
        }
        return Aggregate(step, diagnostics), state

    def _lengths(self, norms: Floats) -> Floats:
        """What each client's length counts as, shape of `norms`."""
        if self.length_model == "projection":
            return norms
        largest = float(norms.max())
        shares = norms / largest
        mean = {
            "min": lambda: shares.min(),
            "max": lambda: shares.max(),
            "mean": lambda: shares.mean(),
            "harmonic": lambda: 1.0 / (1.0 / shares).mean(),
            "geometric": lambda: np.exp(np.log(shares).mean()),
        }[self.length_model]()
        return np.full(norms.size, float(mean) * largest)
