"""FedFa (Huang et al. 2022): weights from the information in accuracies and participations, with server momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gram import combine
from .rule import Rule
from .updates import ACCURACY_AFTER, ACCURACY_BEFORE, Aggregate, Floats, State, Updates
from .validation import check_choice, check_range

_PARTICIPATIONS = "fedfa-participations/"
_MOMENTUM = "fedfa-momentum"


@dataclass(frozen=True)
class FedFa(Rule):
    """The mean of the updates, heavier for inaccurate and for frequent clients, carried on by momentum.

    ``omega_i = alpha A_i / sum_j A_j + (1 - alpha) Q_i / sum_j Q_j`` with ``A_i = -log2(acc_i / sum_j acc_j + 1e-6)``
    and ``Q_i = -log2(1 - f_i / sum_j f_j + 1e-5)``, f_i counting the client's rounds, this one included; then
    ``v <- gamma v + sum_i omega_i Delta_i`` is the step.

    Needs: accuracy-after, or accuracy-before.

    Guarantees: permutation-invariant, scale-equivariant, weights-sum-to-one.

    Cost: one pass over the updates; memory for one model.

    Use it when training accuracy tells who is disadvantaged, and losses are not comparable between clients.

    Parameters
    ----------
    accuracy_share : float
        alpha, in [0, 1]: how much of the weight follows accuracy; the rest follows participation.
    accuracy_time : {"after", "before"}
        Whether accuracy is that of the client's own model after local training, or of the model it received.
    server_momentum : float
        gamma, in [0, 1). 0.9 makes a steady direction ten times as fast: lower the learning rate with it.
    momentum_form : {"heavy-ball", "damped"}
        "heavy-ball" as above. "damped": ``v <- gamma v + (1 - gamma) s`` and the step is ``s - eta_l v``, where s is
        the weighted mean.

    Raises
    ------
    ValueError
        If a parameter lies outside its range; the message names it.

    Notes
    -----
    Departs from the authors' code: heavy-ball momentum is our default, theirs is "damped". Information that their
    small constants make negative counts as 0, and equal shares are used where nobody carries any (all accuracies 0).
    Momentum of the clients' own optimiser is a setting of the clients.

    References
    ----------
    Huang, Li, Wang, Du, Zhang, Huang, *Fairness and Accuracy in Horizontal Federated Learning*, arXiv 2012.10069.
    """

    needs: ClassVar[tuple[str, ...]] = (ACCURACY_AFTER, ACCURACY_BEFORE)
    guarantees: ClassVar[tuple[str, ...]] = ("permutation-invariant", "scale-equivariant", "weights-sum-to-one")

    accuracy_share: float = 0.5
    accuracy_time: str = "after"
    server_momentum: float = 0.9
    momentum_form: str = "heavy-ball"

    def __post_init__(self) -> None:
        check_range("accuracy_share", self.accuracy_share, 0.0, 1.0)
        check_choice("accuracy_time", self.accuracy_time, ("after", "before"))
        check_range("server_momentum", self.server_momentum, 0.0, 1.0 - 1e-9)
        check_choice("momentum_form", self.momentum_form, ("heavy-ball", "damped"))

    def required(self) -> tuple[str, ...]:
        """The one of the two accuracies that these hyper-parameters ask for."""
        return (ACCURACY_AFTER if self.accuracy_time == "after" else ACCURACY_BEFORE,)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round.

        Parameters
        ----------
        updates : Updates
            The round's updates, with the required accuracy.
        state : dict
            Participations by client, and the momentum.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the new state.
        """
        counts = {c: int(state.get(_PARTICIPATIONS + c, 0)) + 1 for c in updates.client_ids}
        rounds = np.array([counts[c] for c in updates.client_ids], dtype=np.float64)
        accuracy_part = _shares(-np.log2(_shares(updates.metrics[self.required()[0]]) + 1e-6))
        participation_part = _shares(-np.log2(1.0 - _shares(rounds) + 1e-5))
        weights = self.accuracy_share * accuracy_part + (1.0 - self.accuracy_share) * participation_part
        step, momentum = self._move(combine(updates.rows, weights), updates.local_learning_rate, state)
        diagnostics = {
            "status": "solved",
            "weights": dict(zip(updates.client_ids, weights.tolist(), strict=True)),
            "participations": counts,
        }
        memory = {**state, **{_PARTICIPATIONS + c: n for c, n in counts.items()}, _MOMENTUM: momentum}
        return Aggregate(step, diagnostics), memory

    def _move(self, mean: Floats, rate: float, state: State) -> tuple[Floats, Floats]:
        """The step and the new momentum."""
        fresh = 1.0 if self.momentum_form == "heavy-ball" else 1.0 - self.server_momentum
        momentum: Floats = fresh * mean
        if _MOMENTUM in state:
            momentum += self.server_momentum * state[_MOMENTUM]
        return (momentum.copy() if self.momentum_form == "heavy-ball" else mean - rate * momentum), momentum


def _shares(values: Floats) -> Floats:
    """Values over their sum; what is below 0 counts as 0, and equal shares where nothing is left."""
    positive = np.maximum(values, 0.0)
    total = float(positive.sum())
    return positive / total if total > 0.0 else np.full(values.size, 1.0 / values.size)
