"""q-FedAvg (Li et al. 2020): larger losses count more, and the step length follows an estimated curvature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gram import combine, norm
from .rule import Rule
from .updates import LOSS_BEFORE, Aggregate, Floats, State, Updates
from .validation import check_range

_EPSILON = 1e-10
"""Added to every loss, as in the authors' code."""
SMALLEST_LOSS = 1e-6
"""No loss counts as smaller: ``F^(q-1)`` of a client that fits its data perfectly would stop everyone."""


@dataclass(frozen=True)
class QFedAvg(Rule):
    """The plain mean of the updates, each weighted by the q-th power of its client's loss, shortened by curvature.

    For ``min_w sum_i F_i(w)^(q+1) / (q + 1)``: ``step = sum_i F_i^q g_i / sum_i (q F_i^(q-1) |g_i|^2 + L F_i^q)`` with
    ``g_i = L Delta_i`` and ``L = 1 / eta_l`` of the round.

    Needs: loss-before.

    Guarantees: permutation-invariant.

    Cost: one pass for the norms, one for the combination.

    Use it when accuracies should even out gradually: q = 0 is the unweighted mean, large q serves the worst-off only.

    Parameters
    ----------
    q : float
        Strength of fairness, in [0, 1000]; published grids span 0.1 to 15.

    Raises
    ------
    ValueError
        If a parameter lies outside its range; the message names it.

    Notes
    -----
    Departs from the authors' code: losses are ``max(F + 1e-10, 1e-6)`` instead of ``F + 1e-10``, so one client with
    loss zero does not freeze the model. Powers are taken relative to the largest, in float64, so none overflows.
    Example counts do not enter; the paper samples clients in proportion to them instead.

    References
    ----------
    Li, Sanjabi, Beirami, Smith, *Fair Resource Allocation in Federated Learning*, arXiv 1905.10497.
    """

    needs: ClassVar[tuple[str, ...]] = (LOSS_BEFORE,)
    guarantees: ClassVar[tuple[str, ...]] = ("permutation-invariant",)

    q: float = 0.1

    def __post_init__(self) -> None:
        check_range("q", self.q, 0.0, 1000.0)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round.

        Parameters
        ----------
        updates : Updates
            The round's updates, with `LOSS_BEFORE`.
        state : dict
            Not used.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the state as it was.
        """
        losses = np.maximum(updates.metrics[LOSS_BEFORE] + _EPSILON, SMALLEST_LOSS)
        exponents = self.q * np.log(losses)
        powers = np.exp(exponents - exponents.max())
        weights = powers / powers.sum()
        norms = np.array([norm(row) for row in updates.rows])
        roots = np.sqrt(self.q / losses / updates.local_learning_rate) * norms
        factor = _shrinkage(weights, roots)
        step = combine(updates.rows, weights)
        step *= factor
        diagnostics = {
            "status": "solved",
            "weights": dict(zip(updates.client_ids, weights.tolist(), strict=True)),
            "shrinkage": factor,
        }
        return Aggregate(step, diagnostics), state


def _shrinkage(weights: Floats, roots: Floats) -> float:
    """``1 / sum_i weights_i (1 + roots_i^2)``, without squaring large numbers."""
    counted = weights > 0.0
    largest = max(1.0, float(roots[counted].max()))
    relative = float(weights[counted] @ ((1.0 / largest) ** 2 + (roots[counted] / largest) ** 2))
    return 1.0 / largest / relative / largest
