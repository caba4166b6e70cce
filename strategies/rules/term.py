"""TERM (Li et al. 2021): tilted empirical risk, a softmax of the losses as weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gram import combine
from .rule import Rule
from .updates import LOSS_BEFORE, Aggregate, Floats, State, Updates
from .validation import check_choice, check_range

_LARGEST = 1e300
_NORMALIZER = "term-tilted-risk"
_LOG_HALF = float(np.log(0.5))


@dataclass(frozen=True)
class TERM(Rule):
    """The mean of the updates under weights that grow exponentially with the loss: the gradient of the tilted risk.

    ``step = sum_i omega_i Delta_i``, ``omega_i = p_i exp(t F_i) / sum_j p_j exp(t F_j)``, which is the gradient of
    ``(1/t) log sum_i p_i exp(t F_i)``.

    Needs: loss-before.

    Guarantees: permutation-invariant, scale-equivariant, fedavg-when-identical, single-client-is-fedavg,
    convex-combination, weights-sum-to-one, loss-shift-invariant.

    Cost: one pass over the updates.

    Use it when one smooth knob between FedAvg (t near 0) and the worst-off client (t large) is wanted.

    Parameters
    ----------
    tilt : float
        t, in [-1e6, 1e6]; published grids span 0.01 to 10. 0 is FedAvg; negative values favour small losses.
    tilt_prior : {"examples", "uniform"}
        Whether ``p_i`` is the share of examples, or ``1/m``.
    tilt_normalizer : {"round", "ema"}
        "round": the sum above, over this round's participants. "ema": the mean of that sum and its earlier value, in
        log space; weights then sum to one only on average, and the guarantees about weights do not hold.

    Raises
    ------
    ValueError
        If a parameter lies outside its range; the message names it.

    Notes
    -----
    Departs from the authors' federated code, which divides by the number of participants twice and starts its moving
    average at zero, so its steps are about m times shorter; and by default from the uniform prior of that code, so
    that t = 0 is FedAvg.

    References
    ----------
    Li, Beirami, Sanjabi, Smith, *Tilted Empirical Risk Minimization*, arXiv 2007.01162.
    """

    needs: ClassVar[tuple[str, ...]] = (LOSS_BEFORE,)
    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "scale-equivariant",
        "fedavg-when-identical",
        "single-client-is-fedavg",
        "convex-combination",
        "weights-sum-to-one",
        "loss-shift-invariant",
    )

    tilt: float = 1.0
    tilt_prior: str = "examples"
    tilt_normalizer: str = "round"

    def __post_init__(self) -> None:
        check_range("tilt", self.tilt, -1e6, 1e6)
        check_choice("tilt_prior", self.tilt_prior, ("examples", "uniform"))
        check_choice("tilt_normalizer", self.tilt_normalizer, ("round", "ema"))

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round.

        Parameters
        ----------
        updates : Updates
            The round's updates, with `LOSS_BEFORE`.
        state : dict
            With "ema": the logarithm of the moving normaliser, ``t`` times the tilted risk.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the new state.
        """
        k = len(updates.rows)
        prior = updates.weights if self.tilt_prior == "examples" else np.full(k, 1.0 / k)
        losses = updates.metrics[LOSS_BEFORE]
        # A share that underflows to zero has no say in the reference either, or all others would vanish beside it.
        present = losses[prior > 0.0]
        reference = float(present.max() if self.tilt >= 0.0 else present.min())
        with np.errstate(over="ignore", under="ignore"):
            powers: Floats = prior * np.exp(np.minimum(self.tilt * (losses - reference), 0.0))
        total = float(powers.sum())
        weights = powers / total
        log_normalizer = float(np.clip(self.tilt * reference, -_LARGEST, _LARGEST)) + float(np.log(total))
        if self.tilt_normalizer == "ema":
            own = log_normalizer
            if _NORMALIZER in state:
                log_normalizer = float(np.logaddexp(state[_NORMALIZER], own)) + _LOG_HALF
            weights = weights * np.exp(own - log_normalizer)
            state = {**state, _NORMALIZER: log_normalizer}
        diagnostics = {
            "status": "solved",
            "weights": dict(zip(updates.client_ids, weights.tolist(), strict=True)),
            "log-normalizer": log_normalizer,
        }
        return Aggregate(combine(updates.rows, weights), diagnostics), state
