"""FedFV (Wang et al. 2021): conflicts between clients are projected away, first among the present, then the absent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gram import combine, norm
from .history import History
from .rows import VANISHED, Rows, gather
from .rule import Rule
from .updates import LOSS_BEFORE, Aggregate, Floats, State, Updates
from .validation import check_learning_rate, check_range, check_whole, server_rate


@dataclass(frozen=True)
class FedFV(Rule):
    """The mean of updates from which their conflicts with each other and with absent clients have been projected away.

    Participants are ordered by loss; all but the `protected_share` with the largest losses lose their components
    against every other update, ``P_i <- P_i - <Delta_j, P_i> / |Delta_j|^2 Delta_j`` where the product is negative, in
    that order. The mean of the ``P_i`` is then projected in the same way against the sum of conflicting updates of
    each of the last rounds, oldest first, and gets the length of the plain mean.

    Needs: loss-before.

    Guarantees: permutation-invariant, scale-equivariant, fedavg-when-identical, single-client-is-fedavg,
    uniform-norm-preserving.

    Cost: products of the k new rows with all m rows in the window; everything else happens in their coefficients.

    Use it when a few clients conflict strongly with the rest; results depend on the ranks of losses, not their values.

    Parameters
    ----------
    protected_share : float
        alpha in [0, 1]: the share of the participants with the largest losses whose updates stay as they are; any
        alpha > 0 keeps at least one.
    history_window : int
        tau >= 0, in rounds; 1 in the authors' code, 10 in FedPCD's comparison. 0: participants only.
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round.

    Notes
    -----
    Departs from the authors' later releases, which look at rounds t - tau + 1 to t and so, with tau = 1, at no absent
    client at all; this is the 2021 release, which looks at rounds t - tau to t - 1, from round tau on. Equal losses are
    ordered by client id. Everything is computed in the Gram matrix, which is exact.

    References
    ----------
    Wang, Fan, Qi, Wen, Wang, Yu, *Federated Learning with Fair Averaging*, arXiv 2104.14937.
    """

    needs: ClassVar[tuple[str, ...]] = (LOSS_BEFORE,)
    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "scale-equivariant",
        "fedavg-when-identical",
        "single-client-is-fedavg",
        "uniform-norm-preserving",
    )

    protected_share: float = 0.1
    history_window: int = 10
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_range("protected_share", self.protected_share, 0.0, 1.0)
        check_whole("history_window", self.history_window, 0)
        check_learning_rate(self.server_learning_rate)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round; the state holds the window's updates.

        Parameters
        ----------
        updates : Updates
            The round's updates, with `LOSS_BEFORE`.
        state : dict
            What the previous round returned; empty at first.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the state for the next round.
        """
        history = History.from_state(state).usable(updates.round, self.history_window, updates.client_ids)
        rows = gather(updates, history)
        gram = _products(rows)
        uniform = np.zeros(rows.norms.size)
        uniform[: rows.current] = 1.0 / rows.current
        projected, among_present = self._among_present(rows, gram, updates.metrics[LOSS_BEFORE])
        mean = projected.mean(axis=0) if among_present else uniform
        mean, with_absent = self._with_absent(rows, gram, mean, updates.round)
        step = combine(rows.rows, mean)
        if among_present or with_absent:
            step = _resized(step, combine(rows.rows, uniform), float(np.abs(mean) @ rows.norms))
        step *= server_rate(self.server_learning_rate, updates.local_learning_rate)
        diagnostics = {
            "status": "solved" if step.any() else "stationary",
            "projections-current": among_present,
            "projections-cached": with_absent,
            "constraints-cached": rows.norms.size - rows.current,
            "weights": updates.by_client(mean[: rows.current]),
        }
        return Aggregate(step, diagnostics), rows.remember(updates, self.history_window).to_state()

    def _among_present(self, rows: Rows, gram: Floats, losses: Floats) -> tuple[Floats, int]:
        """Coefficients of every ``P_i``, shape (k, m), and how many projections there were."""
        k = rows.current
        order = np.argsort(losses, kind="stable")
        kept = order[math.ceil((k - 1) * (1.0 - self.protected_share)) :] if self.protected_share > 0.0 else order[:0]
        coefficients = np.eye(k, rows.norms.size)
        count = 0
        for i in (i for i in order if i not in kept):
            for j in (j for j in order if j != i and gram[j, j] > 0.0):
                product = float(coefficients[i] @ gram[:, j])
                if product < 0.0:
                    coefficients[i, j] -= product / gram[j, j]
                    count += 1
        return coefficients, count

    def _with_absent(self, rows: Rows, gram: Floats, mean: Floats, server_round: int) -> tuple[Floats, int]:
        count = 0
        # The authors' rounds start at 0, and they look back only once tau rounds lie behind.
        lags = range(self.history_window, 0, -1) if server_round - 1 >= self.history_window else ()
        for lag in lags:
            conflicting = (rows.rounds == server_round - lag) & (gram @ mean < 0.0)
            conflicting[: rows.current] = False
            if not conflicting.any():
                continue
            total = conflicting.astype(np.float64)
            product, square = float(total @ gram @ mean), float(total @ gram @ total)
            if product < 0.0 and square > VANISHED**2 * gram[conflicting, conflicting].sum():
                mean = mean - product / square * total
                count += 1
        return mean, count


def _products(rows: Rows) -> Floats:
    """The Gram matrix in units of the longest row, so that no product overflows or vanishes."""
    lengths = rows.norms / (rows.norms.max() or 1.0)
    return np.asarray(rows.cosines * np.outer(lengths, lengths))


def _resized(step: Floats, mean: Floats, reach: float) -> Floats:
    length = norm(step)
    if length <= VANISHED * reach:
        return np.zeros_like(step)
    return np.asarray(step * (norm(mean) / length))
