"""PCD (Varam, AlHajri 2026) with clients as objectives: a primary direction under minimum progress of all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .gram import combine, norm
from .history import History
from .normalization import observe, scales
from .projection import Program, Solution, solve
from .rows import VANISHED, Rows, gather
from .rule import Rule
from .updates import Aggregate, Diagnostics, Floats, State, Updates
from .validation import check_learning_rate, check_range, server_rate

_MEAN = ""
"""Stands for the FedAvg mean among client ids."""


@dataclass(frozen=True)
class PCD(Rule):
    """The primary's direction, bent only as far as the minimum progress of every participant demands.

    ``d* = argmin 1/2 |d - g~_1|^2  subject to  <g~_j, d> >= tau |g~_j|^2`` for all secondaries j, with ``g~_i`` the
    update over a moving average of its norm; ``d = |g_1| d* / |d*|`` and ``theta <- theta - eta_g d``.

    Needs: nothing beyond the updates, which must be individual (no secure aggregation).

    Guarantees: permutation-invariant, scale-equivariant, non-conflicting, norm-preserving, fedavg-when-identical,
    single-client-is-fedavg.

    Cost: k^2 n / 2 multiplications for the cosines and k n for the step, one QP in k variables; one number per client
    between rounds.

    Use it when one client has priority, or to see what FedPCD gains from its history.

    Parameters
    ----------
    tau : float
        Minimum progress of every secondary, in [0, 1]; at most 0.1 is recommended.
    norm_decay : float
        Decay of the bias-corrected moving average of the squared norm, in [0, 1).
    priority_client : str
        Client id whose update is the primary in the rounds in which it takes part; in all other rounds, and if
        empty, the primary is the FedAvg mean.
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round.

    Notes
    -----
    Departs from the paper: squared norms are not increased by a small epsilon, so results do not depend on the scale
    of the updates; zero updates demand nothing. Averages count participations. Where no direction serves all
    secondaries the step is the primary's, as in the paper, so non-conflict holds where the updates are linearly
    independent. The step is as long as FedAvg's where the mean is the primary, which is the default.

    References
    ----------
    Varam, AlHajri, *Priority-Constrained Descent*, arXiv 2606.29521.
    """

    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "scale-equivariant",
        "non-conflicting",
        "norm-preserving",
        "fedavg-when-identical",
        "single-client-is-fedavg",
    )

    tau: float = 0.02
    norm_decay: float = 0.999
    priority_client: str = ""
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_range("tau", self.tau, 0.0, 1.0)
        check_range("norm_decay", self.norm_decay, 0.0, 1.0 - 1e-9)
        if not isinstance(self.priority_client, str):
            raise ValueError(f"priority_client must be a client id or empty, got {self.priority_client!r}")
        check_learning_rate(self.server_learning_rate)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round.

        Parameters
        ----------
        updates : Updates
            The round's updates.
        state : dict
            What the previous round returned; empty at first.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the state with the moving averages.
        """
        rows = gather(updates, History.from_state({}))
        primary = self.priority_client if self.priority_client in updates.client_ids else _MEAN
        shares, primary_norm, alignments = _primary(updates, rows, primary)
        ids = (*updates.client_ids, *(() if primary else (_MEAN,)))
        lengths = np.append(rows.norms, [] if primary else primary_norm) / updates.local_learning_rate
        averages = observe(state, ids, lengths, self.norm_decay)
        diagnostics: Diagnostics = {"primary": primary or "mean", "multipliers": {}}
        used = rows.norms > 0.0
        if primary:
            used[updates.client_ids.index(primary)] = False
        if primary_norm == 0.0 or not used.any():
            status = "stationary" if primary_norm == 0.0 else "inactive"
            step = np.zeros(updates.rows[0].size) if primary_norm == 0.0 else combine(rows.rows, shares)
            return Aggregate(
                step * server_rate(self.server_learning_rate, updates.local_learning_rate),
                {**diagnostics, "status": status},
            ), averages
        # Both sides of a constraint are divided by the lengths of the row and of the primary, as the program expects.
        scaled = lengths / scales(averages, ids)
        own = scaled[updates.client_ids.index(primary)] if primary else scaled[-1]
        demands = self.tau * scaled[: rows.norms.size][used] / own
        solution = solve(Program(rows.cosines[np.ix_(used, used)], alignments[used], demands))
        step = _bend(rows, shares, primary_norm, used, solution)
        diagnostics |= {
            "status": solution.status,
            "solver": solution.found_by,
            "direction-norm": solution.direction_norm,
            "kkt-residual": solution.residuals.worst,
        }
        multipliers = np.zeros(rows.norms.size)
        # The paper's multiplier belongs to g~_j in the program whose primary is g~_1.
        multipliers[used] = solution.multipliers * own / scaled[: rows.norms.size][used]
        pairs = zip(updates.client_ids, multipliers.tolist(), strict=True)
        diagnostics["multipliers"] = {client: mu for client, mu in pairs if mu > 0.0}
        return Aggregate(
            step * server_rate(self.server_learning_rate, updates.local_learning_rate), diagnostics
        ), averages


def _primary(updates: Updates, rows: Rows, primary: str) -> tuple[Floats, float, Floats]:
    """The primary as shares of the rows, its norm, and its cosines with all rows."""
    if primary == _MEAN:
        return (updates.weights, *rows.primary(updates))
    index = updates.client_ids.index(primary)
    shares = np.zeros(rows.norms.size)
    shares[index] = 1.0
    return shares, float(rows.norms[index]), rows.cosines[:, index]


def _bend(rows: Rows, shares: Floats, primary_norm: float, used: NDArray[np.bool_], solution: Solution) -> Floats:
    """``|g_1| d* / |d*|``; the primary itself, bit for bit, where nothing bends it."""
    if not solution.multipliers.any():
        return combine(rows.rows, shares)
    coefficients = shares.copy()
    coefficients[used] += solution.multipliers * primary_norm / rows.norms[used]
    step = combine(rows.rows, coefficients)
    length = norm(step)
    if length <= VANISHED * primary_norm * (1.0 + solution.multipliers.sum()):
        return np.zeros_like(step)
    return step * (primary_norm / length)
