"""FedAvg (McMahan et al. 2017): the weighted mean of the participants' displacements."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from .gram import combine
from .rule import Rule
from .updates import Aggregate, Floats, State, Updates
from .validation import check_learning_rate


@dataclass(frozen=True)
class FedAvg(Rule):
    """The weighted mean of the participants' updates.

    ``theta <- theta - (eta_g / eta_l) sum_i p_i Delta_i`` with ``p_i = n_i / sum_j n_j`` over the round's participants.

    Needs: nothing beyond the updates.

    Guarantees: permutation-invariant, scale-equivariant, fedavg-when-identical.

    Cost: one pass over the updates.

    Use it when clients hold similar data, or as the reference that every other method is compared with.

    Parameters
    ----------
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round, which is plain averaging of models.

    Notes
    -----
    Departs from the paper in nothing.

    References
    ----------
    McMahan, Moore, Ramage, Hampson, Aguera y Arcas, *Communication-Efficient Learning of Deep Networks from
    Decentralized Data*, arXiv 1602.05629.
    """

    individual_updates: ClassVar[bool] = False
    guarantees: ClassVar[tuple[str, ...]] = ("permutation-invariant", "scale-equivariant", "fedavg-when-identical")

    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_learning_rate(self.server_learning_rate)

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
        start = time.perf_counter()
        step = averaging_step(updates, self.server_learning_rate)
        return Aggregate(step, {"seconds-combination": time.perf_counter() - start}), state


def averaging_step(updates: Updates, server_learning_rate: float) -> Floats:
    """FedAvg's step, shape (n,): what every rule returns, bit for bit, when it has nothing to correct."""
    step = combine(updates.rows, updates.weights)
    if server_learning_rate > 0.0:
        step *= server_learning_rate / updates.local_learning_rate
    return step
