"""FedHEAL (Chen et al. 2024): parameters whose updates keep their sign count, and far-moving clients weigh more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .gram import norm
from .rule import Rule
from .updates import Aggregate, Floats, Row, State, Updates
from .validation import check_choice, check_range

_SIGNS = "fedheal-signs/"
_ROUNDS = "fedheal-rounds/"
_WEIGHT = "fedheal-weight/"
_INCREMENT = "fedheal-increment/"
_BLOCK = 1 << 17

Counts = NDArray[np.signedinteger[Any]]
Mask = NDArray[np.bool_]
MaskOf = Callable[[int, slice], Mask]


@dataclass(frozen=True)
class FedHEAL(Rule):
    """The mean of the updates, coordinate by coordinate over the clients whose updates have kept their sign there.

    Client i's ``mask_i`` keeps the coordinates whose sign agrees with more than the share tau of its earlier rounds
    (all of them in its first round). With ``dist_i = sum_arrays |mask_i Delta_i|``,
    ``inc_i <- (1 - beta) inc_i + beta dist_i / sum_j dist_j`` and ``p_i <- p_i + inc_i``; coordinates move by
    ``sum_i p_i mask_i Delta_i / sum_i p_i mask_i`` and stay where no client is left.

    Needs: nothing beyond the updates, which must be individual.

    Guarantees: permutation-invariant, scale-equivariant, weights-sum-to-one.

    Cost: three passes over the updates; memory for 2 bytes per client and parameter.

    Use it when clients come from different domains and take part often enough to have a record.

    Parameters
    ----------
    sign_agreement : float
        tau, in [-1, 1]; the authors use 0.3. Below 0 nothing is masked; 1 masks all but each client's first round.
    distance_momentum : float
        beta, in [0, 1]; the authors use 0.4. 0 keeps a fixed cohort's weights
        equal.
    newcomer_weight : {"light", "mean"}
        Where ``p_i`` of a client starts that first takes part in a later round: at ``1/m``, as in the first round, or
        at the mean of all known clients, whose weights have grown since.

    Raises
    ------
    ValueError
        If a parameter lies outside its range; the message names it.

    Notes
    -----
    Departs from the authors' code, which needs all clients in all rounds: records belong to clients, rounds are those
    in which the client took part, and distances are compared among the participants. Statistics and counters of
    normalisation layers are not masked.

    References
    ----------
    Chen, Huang, Ye, *Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity*, arXiv
    2405.16585.
    """

    guarantees: ClassVar[tuple[str, ...]] = ("permutation-invariant", "scale-equivariant", "weights-sum-to-one")

    sign_agreement: float = 0.3
    distance_momentum: float = 0.4
    newcomer_weight: str = "light"

    def __post_init__(self) -> None:
        check_range("sign_agreement", self.sign_agreement, -1.0, 1.0)
        check_range("distance_momentum", self.distance_momentum, 0.0, 1.0)
        check_choice("newcomer_weight", self.newcomer_weight, ("light", "mean"))

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round.

        Parameters
        ----------
        updates : Updates
            The round's updates.
        state : dict
            By client: rounds, counts of non-negative signs per coordinate, weight and increment.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the new state.
        """
        clients = updates.client_ids
        rounds = [int(state.get(_ROUNDS + c, 0)) for c in clients]
        signs: list[Counts | None] = [state.get(_SIGNS + c) for c in clients]
        least = [_least_agreement(self.sign_agreement, k) for k in rounds]

        def mask_of(client: int, part: slice) -> Mask:
            row, counts = updates.rows[client][part], signs[client]
            if counts is None:
                return np.ones(row.size, dtype=bool)
            agreement = np.where(row >= 0.0, counts[part], rounds[client] - counts[part])
            return np.asarray(agreement >= least[client])

        increments, unnormalized = self._weights(updates, state, _distances(updates, mask_of))
        weights = unnormalized / unnormalized.sum()
        step, kept = _combine(updates.rows, weights, mask_of)
        diagnostics = {
            "status": "solved",
            "weights": dict(zip(clients, weights.tolist(), strict=True)),
            "kept-shares": dict(zip(clients, kept, strict=True)),
        }
        memory = dict(state)
        for i, client in enumerate(clients):
            memory[_ROUNDS + client] = rounds[i] + 1
            memory[_SIGNS + client] = _count(updates.rows[i], signs[i], rounds[i])
            memory[_INCREMENT + client] = float(increments[i])
            memory[_WEIGHT + client] = float(unnormalized[i])
        return Aggregate(step, diagnostics), memory

    def _weights(self, updates: Updates, state: State, distances: Floats) -> tuple[Floats, Floats]:
        """The new increments and un-normalised weights of the participants."""
        k = distances.size
        total = float(distances.sum())
        shares = distances / total if total > 0.0 else np.full(k, 1.0 / k)
        known = [value for key, value in state.items() if key.startswith(_WEIGHT)]
        start = float(np.mean(known)) if known and self.newcomer_weight == "mean" else 1.0 / k
        old = np.array([state.get(_INCREMENT + c, 0.0) for c in updates.client_ids])
        increments = (1.0 - self.distance_momentum) * old + self.distance_momentum * shares
        return increments, increments + np.array([state.get(_WEIGHT + c, start) for c in updates.client_ids])


def _least_agreement(share: float, rounds: int) -> int:
    """The smallest count out of `rounds` whose share is above the threshold; `rounds + 1` if none is."""
    enough = np.flatnonzero(np.arange(rounds + 1) / max(rounds, 1) > share)
    return int(enough[0]) if enough.size else rounds + 1


def _distances(updates: Updates, mask_of: MaskOf) -> Floats:
    """Lengths of the masked updates, array by array, summed: not the length of the whole."""
    return np.array(
        [
            sum(norm(np.where(mask_of(i, part), row[part], row.dtype.type(0))) for part in updates.arrays)
            for i, row in enumerate(updates.rows)
        ]
    )


def _combine(rows: Sequence[Row], weights: Floats, mask_of: MaskOf) -> tuple[Floats, list[float]]:
    """The step, and the share of coordinates that each client's mask keeps."""
    size = rows[0].size
    step, kept = np.zeros(size), np.zeros(len(rows))
    for low in range(0, size, _BLOCK):
        part = slice(low, min(low + _BLOCK, size))
        total = np.zeros(part.stop - low)
        for i, row in enumerate(rows):
            coefficients = weights[i] * mask_of(i, part)
            kept[i] += np.count_nonzero(coefficients)
            total += coefficients
            step[part] += coefficients * row[part]
        np.divide(step[part], total, out=step[part], where=total > 0.0)
    return step, (kept / max(size, 1)).tolist()


def _count(row: Row, counts: Counts | None, rounds: int) -> Counts:
    """Counts of non-negative signs with this round's: 16 bits as long as they suffice."""
    dtype = np.int16 if rounds < np.iinfo(np.int16).max else np.int32
    total: Counts = np.asarray(row >= 0.0, dtype=dtype)
    if counts is not None:
        total += counts
    return total
