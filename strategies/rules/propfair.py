"""PropFair (Zhang et al. 2023): proportional fairness by a transform of the clients' training loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .fedavg import averaging_step
from .rule import ClientValue, Rule
from .updates import Aggregate, State, Updates
from .validation import check_choice, check_learning_rate, check_range


@dataclass(frozen=True)
class PropFair(Rule):
    """The weighted mean of updates that clients trained on the logarithm of their utility.

    Clients minimise ``-log(1 - l / M)`` on each mini-batch of loss l, for ``max sum_i p_i log(M - F_i)``; the server
    is FedAvg: ``theta <- theta - (eta_g / eta_l) sum_i p_i Delta_i``.

    Needs: nothing beyond the updates; clients that apply the loss transform they are sent.

    Guarantees: permutation-invariant, scale-equivariant, fedavg-when-identical.

    Cost: as FedAvg.

    Use it when the server may only average (secure aggregation) and clients run code of yours.

    Parameters
    ----------
    utility_baseline : float
        M, in [1e-3, 1e6]: the loss at which utility ``M - l`` ends; published grids span 2 to 5. Slopes are about
        ``1/M`` at small losses, so the learning rate is tuned along with it.
    utility_margin : float
        eps, in [1e-6, M]: batches with ``M - l < eps`` take the fallback.
    utility_fallback : {"linear", "huber"}
        "linear": ``l / M``, as the authors do. "huber": ``l / eps``, whose slope continues that of the logarithm.
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round.

    Raises
    ------
    ValueError
        If a parameter lies outside its range; the message names it.

    Notes
    -----
    Departs from the paper in nothing. With many classes the first losses exceed M, and all batches take the fallback.

    References
    ----------
    Zhang, Malekmohammadi, Chen, Yu, *Proportional Fairness in Federated Learning*, arXiv 2202.01666.
    """

    individual_updates: ClassVar[bool] = False
    guarantees: ClassVar[tuple[str, ...]] = ("permutation-invariant", "scale-equivariant", "fedavg-when-identical")

    utility_baseline: float = 2.0
    utility_margin: float = 0.2
    utility_fallback: str = "linear"
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_range("utility_baseline", self.utility_baseline, 1e-3, 1e6)
        check_range("utility_margin", self.utility_margin, 1e-6, self.utility_baseline)
        check_choice("utility_fallback", self.utility_fallback, ("linear", "huber"))
        check_learning_rate(self.server_learning_rate)

    def client_config(self) -> dict[str, ClientValue]:
        """The loss transform of the clients."""
        return {
            "loss-transform": "propfair",
            "utility-baseline": float(self.utility_baseline),
            "utility-margin": float(self.utility_margin),
            "utility-fallback": self.utility_fallback,
        }

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Average one round.

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
        return Aggregate(averaging_step(updates, self.server_learning_rate), {"status": "solved"}), state
