"""AdaFed (Hamidi, Yang 2024): a direction along which every client's loss falls in proportion to its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .fedavg import averaging_step
from .gram import cosines, norm
from .leastsquares import Rates, common_direction
from .rule import Rule
from .updates import LOSS_BEFORE, Aggregate, Diagnostics, Floats, State, Updates
from .validation import check_choice, check_learning_rate, check_range


@dataclass(frozen=True)
class AdaFed(Rule):
    """The shortest common descent direction whose rates of decrease are proportional to powers of the losses.

    ``u = G^+ r`` with ``r_i = f_i^gamma``, ``d = u / |u|^2`` and ``theta <- theta - eta_g d``; then
    ``<g_i, d> = |d|^2 f_i^gamma``. This is the order-free closed form of the paper's Gram-Schmidt construction.

    Needs: loss-before.

    Guarantees: permutation-invariant, scale-equivariant, non-conflicting, fedavg-direction-when-identical.

    Cost: k^2 n / 2 multiplications for the cosines and k n for the step; no memory between rounds.

    Use it when clients with large losses should improve fastest and no participant may lose.

    Parameters
    ----------
    loss_exponent : float
        ``gamma`` in [0, 100]; 0 gives equal rates, which is MGDA where all of MGDA's weights are positive.
    normalize_rows : bool
        True replaces every ``g_i`` by its unit vector, as one public implementation does; the step then has a length
        of order ``eta_g``.
    rescale : {"none", "mean-norm"}
        "none": the length of d, which changes with the scale of the losses as ``f^-gamma``. "mean-norm": the length of
        FedAvg's step.
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round.

    Notes
    -----
    Departs from the paper: the closed form needs no order of clients and no division by its denominators, which can
    vanish. Non-conflict holds where the updates are linearly independent; dependent ones get the least-squares answer
    in units of cosines (eigenvalues below 1e-10 of the largest count as zero). Zero updates are dropped. No step if
    all losses are zero, or if they are so small that ``f^-gamma`` overflows.

    References
    ----------
    Hamidi, Yang, *AdaFed: Fair Federated Learning via Adaptive Common Descent Direction*, TMLR 2024, arXiv 2401.04993.
    """

    needs: ClassVar[tuple[str, ...]] = (LOSS_BEFORE,)
    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "scale-equivariant",
        "non-conflicting",
        "fedavg-direction-when-identical",
    )

    loss_exponent: float = 1.0
    normalize_rows: bool = False
    rescale: str = "none"
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_range("loss_exponent", self.loss_exponent, 0.0, 100.0)
        if not isinstance(self.normalize_rows, bool):
            raise ValueError(f"normalize_rows must be true or false, got {self.normalize_rows!r}")
        check_choice("rescale", self.rescale, ("none", "mean-norm"))
        check_learning_rate(self.server_learning_rate)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round; the state is not used.

        Parameters
        ----------
        updates : Updates
            The round's updates, with ``loss-before``.
        state : dict
            Not used.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the state as it was.
        """
        norms, block = cosines(updates.rows, (), np.zeros(0))
        losses = updates.metrics[LOSS_BEFORE]
        largest = float(losses.max())
        # 0^0 = 1: with exponent 0 all clients count alike, whatever their losses.
        rates = (losses / (largest or 1.0)) ** self.loss_exponent
        lengths = np.where(norms > 0.0, 1.0 if self.normalize_rows else norms, 1.0)
        # Rates per unit of the longest row: the quotients stay in range however small the updates are.
        reach = float(lengths.max())
        found = common_direction(updates, norms, block, rates * (reach / lengths))
        length = self._length(updates, found, reach, largest)
        status = "stationary" if found.length == 0.0 else "solved" if np.isfinite(length) else "unbounded"
        step = found.unit * length if status == "solved" else np.zeros_like(found.unit)
        return Aggregate(step, _describe(updates, status, found, norms, length)), state

    def _length(self, updates: Updates, found: Rates, reach: float, largest: float) -> float:
        """The step's length; infinite where it leaves the range of float64."""
        if self.rescale == "mean-norm":
            return norm(averaging_step(updates, self.server_learning_rate))
        if found.length == 0.0:
            return 0.0
        rate = self.server_learning_rate or updates.local_learning_rate
        units = rate if self.normalize_rows else rate / updates.local_learning_rate
        with np.errstate(over="ignore"):
            loss_factor = np.float64(largest or 1.0) ** -self.loss_exponent
            return float(units * loss_factor * (reach / (found.scale * found.length)))


def _describe(updates: Updates, status: str, found: Rates, norms: Floats, length: float) -> Diagnostics:
    weights = found.weights * (length if status == "solved" else 0.0) / np.where(norms > 0.0, norms, 1.0)
    return {
        "status": status,
        "rank": found.rank,
        "clients-used": int((norms > 0.0).sum()),
        "weights": dict(zip(updates.client_ids, weights.tolist(), strict=True)),
    }
