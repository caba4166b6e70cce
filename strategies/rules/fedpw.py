"""FedPW (Guan et al. 2025): small updates are dropped, agreed ones amplified, weights follow consensus and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .gram import combine, cosines, norm
from .rows import VANISHED
from .rule import Rule
from .updates import TRAIN_LOSS, Aggregate, Floats, Row, State, Updates
from .validation import check_range

_LOSS = "loss"
_CONSENSUS = "consensus"
_FIRST_LOSS = "fedpw-first-loss"
_FIRST_LENGTH = "fedpw-first-length"
_SAMPLED = 10
"""Means of dropped and of agreed coordinates use every tenth of them."""
_BLOCK = 1 << 15
_WHOLE = 1e-9
"""Added before a number of coordinates is rounded down, so that rounding errors do not decide."""


@dataclass(frozen=True)
class FedPW(Rule):
    """The mean of the updates without their small coordinates, amplified where clients agree, under adaptive weights.

    Weights ``lambda = (s_p p + s_q q) / (s_p + s_q)``: p follows the training losses, q the products
    ``<Delta_i, sum_j Delta_j>``, both by increments with momentum, and s is the standard deviation over clients. From
    the second round on, each array of client i loses its share r_i of smallest entries (more for small losses), and
    the share r of coordinates on which clients differ least is multiplied by ``1 + a / b`` if ``a < b``, a and b being
    the mean sizes of dropped and of agreed entries.

    Needs: train-loss.

    Guarantees: permutation-invariant, scale-equivariant, weights-sum-to-one.

    Cost: Gram matrix of the updates, a partial sort of each array of each client, three more passes; working memory of
    m rows of the largest array.

    Use it when all clients take part in most rounds, and losses during training are reported honestly.

    Parameters
    ----------
    drop_rate : float
        r, in [0, 1]: mean share of coordinates dropped; the authors use 0.3. 0: no dropping, no amplification.
    adaptation : float
        In [0, 1]: how fast the weights follow losses and products; the authors use 0.3. 0 keeps those of a fixed cohort
        equal.

    Raises
    ------
    ValueError
        If a parameter lies outside its range; the message names it.

    Notes
    -----
    Departs from the authors' code, which needs all clients in all rounds: state belongs to clients, a newcomer starts
    at the mean of the known participants, increments' momentum is clipped to [0, 1], and equal clients, a single
    client, losses of zero or updates that cancel out get equal shares. Weights may be negative.

    References
    ----------
    Guan et al., FedPW, NeurIPS 2025.
    """

    needs: ClassVar[tuple[str, ...]] = (TRAIN_LOSS,)
    guarantees: ClassVar[tuple[str, ...]] = ("permutation-invariant", "scale-equivariant", "weights-sum-to-one")

    drop_rate: float = 0.3
    adaptation: float = 0.3

    def __post_init__(self) -> None:
        check_range("drop_rate", self.drop_rate, 0.0, 1.0)
        check_range("adaptation", self.adaptation, 0.0, 1.0)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round.

        Parameters
        ----------
        updates : Updates
            The round's updates, with `TRAIN_LOSS`.
        state : dict
            By client: weights and increments; the first round's mean loss and mean product.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the new state.
        """
        losses = updates.metrics[TRAIN_LOSS]
        products, length = _consensus(updates.rows)
        mean_loss = float(losses.mean())
        memory = dict(state)
        loss_ratio = _ratio(memory, _FIRST_LOSS, mean_loss)
        length_ratio = _ratio(memory, _FIRST_LENGTH, length)
        rates = {_LOSS: self._momentum(loss_ratio), _CONSENSUS: self._momentum(length_ratio * length_ratio)}
        by_loss = _advance(memory, updates.client_ids, _LOSS, _shares(losses), rates[_LOSS])
        by_consensus = _advance(memory, updates.client_ids, _CONSENSUS, products, rates[_CONSENSUS])
        ratio = _mixture(by_loss, by_consensus)
        weights = ratio * by_loss + (1.0 - ratio) * by_consensus
        drop_rates = self.drop_rates(losses)
        step, amplifications = combine(updates.rows, weights), []
        if _FIRST_LOSS in state and self.drop_rate > 0.0:
            for part in updates.arrays:
                views = [row[part] for row in updates.rows]
                step[part], amplification = _adjust(views, weights, drop_rates, self.drop_rate)
                amplifications.append(amplification)
        diagnostics = {
            "status": "solved",
            "weights": dict(zip(updates.client_ids, weights.tolist(), strict=True)),
            "drop-rates": dict(zip(updates.client_ids, drop_rates.tolist(), strict=True)),
            "loss-share": ratio,
            "loss-momentum": rates[_LOSS],
            "consensus-momentum": rates[_CONSENSUS],
            "amplifications": amplifications,
        }
        return Aggregate(step, diagnostics), memory

    def drop_rates(self, losses: Floats) -> Floats:
        """``r_i = min(m r (1 / l_i) / sum_j (1 / l_j), 1)``, shape (m,): clients with small losses lose more."""
        smallest = float(losses.min())
        inverse = smallest / losses if smallest > 0.0 else (losses == 0.0).astype(np.float64)
        return np.asarray(np.minimum(losses.size * self.drop_rate * inverse / inverse.sum(), 1.0))

    def _momentum(self, ratio: float) -> float:
        return min(1.0, self.adaptation * min(ratio, 1e300))


def _consensus(rows: Sequence[Row]) -> tuple[Floats, float]:
    """Shares of ``<Delta_i, sum_j Delta_j>``, and the root of their mean; equal shares if the updates cancel out."""
    norms, block = cosines(rows, (), np.zeros(0))
    k, longest = norms.size, float(norms.max())
    if longest == 0.0:
        return np.full(k, 1.0 / k), 0.0
    relative = norms / longest
    products = relative * (block @ relative)
    total = float(products.sum())
    if total <= (VANISHED * relative.sum()) ** 2:
        return np.full(k, 1.0 / k), 0.0
    return products / total, longest * float(np.sqrt(total / k))


def _ratio(memory: State, key: str, value: float) -> float:
    """A value over that of the first round in which it was not zero, which is put into memory."""
    first = float(memory.get(key, 0.0)) or value
    memory[key] = first
    return value / first if first > 0.0 else 1.0


def _advance(memory: State, clients: Sequence[str], name: str, target: Floats, rate: float) -> Floats:
    """Move increments towards the target and weights by the increments; weights sum to one again."""
    weight, increment = f"fedpw-{name}-weight/", f"fedpw-{name}-increment/"
    known = [memory[weight + c] for c in clients if weight + c in memory]
    start = float(np.mean(known)) if known else 0.0
    increments = (1.0 - rate) * np.array([memory.get(increment + c, 0.0) for c in clients]) + rate * target
    weights = np.array([memory.get(weight + c, start) for c in clients]) + increments
    total = float(weights.sum())
    if total > VANISHED * float(np.abs(weights).sum()):
        weights = weights / total
    else:
        weights = np.full(len(clients), 1.0 / len(clients))
    memory.update({increment + c: value for c, value in zip(clients, increments.tolist(), strict=True)})
    memory.update({weight + c: value for c, value in zip(clients, weights.tolist(), strict=True)})
    return weights


def _mixture(first: Floats, second: Floats) -> float:
    """The first weights' part of the spread of both; a half if there is none."""
    if first.size == 1:
        return 0.5
    spreads = first.std(ddof=1), second.std(ddof=1)
    return float(spreads[0] / sum(spreads)) if sum(spreads) > 0.0 else 0.5


def _adjust(rows: Sequence[Row], weights: Floats, drop_rates: Floats, agreed_rate: float) -> tuple[Floats, float]:
    """One array of the step after dropping and amplification, and the factor of the latter."""
    trimmed, sizes = zip(
        *(_drop(row, _part(row.size, r)) for row, r in zip(rows, drop_rates, strict=True)), strict=True
    )
    step = combine(trimmed, weights)
    agreed_size = _part(step.size, agreed_rate)
    if len(rows) == 1 or agreed_size == 0 or not all(sizes_of.size for sizes_of in sizes):
        return step, 1.0
    dropped = float(np.mean([sizes_of.mean() for sizes_of in sizes]))
    agreed = _smallest(_spread(trimmed), agreed_size)
    kept = float(np.abs(step[agreed[::_SAMPLED]]).mean())
    if not dropped < kept:
        return step, 1.0
    step[agreed] *= 1.0 + dropped / kept
    return step, 1.0 + dropped / kept


def _part(size: int, rate: float) -> int:
    return min(size, int(size * rate + _WHOLE))


def _drop(row: Row, count: int) -> tuple[Row, Floats]:
    """A row without its `count` smallest entries, and the sizes of every tenth of these."""
    sizes = np.abs(row)
    if count == 0:
        return row, np.zeros(0)
    positions = _first_smallest(sizes, count)
    trimmed = row.copy()
    trimmed[positions] = 0.0
    return trimmed, np.sort(sizes[positions])[::_SAMPLED].astype(np.float64)


def _spread(rows: Sequence[Row]) -> Floats:
    """Standard deviation over clients of unit rows' unit columns; infinite where all are zero."""
    norms = [norm(row) or 1.0 for row in rows]
    spread = np.empty(rows[0].size)
    for low in range(0, spread.size, _BLOCK):
        block = np.stack([row[low : low + _BLOCK].astype(np.float64) / n for row, n in zip(rows, norms, strict=True)])
        lengths = np.sqrt((block * block).sum(axis=0))
        empty = lengths == 0.0
        block /= np.where(empty, 1.0, lengths)
        # Rounding keeps ties tied whatever the order of the clients.
        spread[low : low + _BLOCK] = np.where(empty, np.inf, np.round(block.std(axis=0, ddof=1), 12))
    return spread


def _smallest(values: Floats, count: int) -> NDArray[np.intp]:
    """Positions of the `count` smallest values in ascending order; ties by position."""
    positions = _first_smallest(values, count)
    return positions[np.argsort(values[positions], kind="stable")]


def _first_smallest(values: np.ndarray, count: int) -> NDArray[np.intp]:
    """The same in ascending order of position; which of equal values a partition keeps depends on the machine."""
    limit = np.partition(values, count - 1)[count - 1]
    below = np.flatnonzero(values < limit)
    return np.sort(np.concatenate([below, np.flatnonzero(values == limit)[: count - below.size]]))


def _shares(values: Floats) -> Floats:
    largest = float(values.max())
    if largest == 0.0:
        return np.full(values.size, 1.0 / values.size)
    shares: Floats = values / largest / (values / largest).sum()
    return shares
