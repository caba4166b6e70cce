"""The rows that constrain a round: those of its participants and of the clients in the history window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .gram import cosines
from .history import History
from .updates import Floats, Row, Updates

VANISHED = 1e-6
"""Below this fraction of the lengths it is made of, a sum of rows is too short to have a direction: its square comes
from cosines, which hold 1e-12 of it."""


@dataclass(frozen=True)
class Rows:
    """Participants' rows, then those of absent clients, in displacement units, with their cosines.

    Parameters
    ----------
    client_ids : tuple of str
        The m clients, the round's participants first.
    rows : tuple of ndarray, each of shape (n,)
        Displacements.
    rounds : ndarray of shape (m,), int64
        When each was received.
    learning_rates : ndarray of shape (m,), float64
        The local learning rates of those rounds.
    norms : ndarray of shape (m,), float64
        Lengths of the rows.
    cosines : ndarray of shape (m, m), float64
        Their Gram matrix after normalisation; zero rows have cosine 0 with every row.
    current : int
        How many of them are participants.
    """

    client_ids: tuple[str, ...]
    rows: tuple[Row, ...]
    rounds: NDArray[np.int64]
    learning_rates: Floats
    norms: Floats
    cosines: Floats
    current: int

    @property
    def pseudo_gradient_norms(self) -> Floats:
        """``|g_i| = |Delta_i| / eta_i``, shape (m,)."""
        return np.asarray(self.norms / self.learning_rates)

    def primary(self, updates: Updates) -> tuple[float, Floats]:
        """Norm of the mean displacement, and its cosines with all rows; norm 0 if the mean cancels out."""
        lengths = updates.weights * self.norms[: self.current]
        reach = float(lengths.sum())
        if reach == 0.0:
            return 0.0, np.zeros(self.norms.size)
        shares = lengths / reach
        aligned = self.cosines[:, : self.current] @ shares
        fraction = float(np.sqrt(max(0.0, float(shares @ aligned[: self.current]))))
        if fraction <= VANISHED:
            return 0.0, np.zeros(self.norms.size)
        return fraction * reach, aligned / fraction

    def remember(self, updates: Updates, window: int) -> History:
        """The history for the next round: zero rows demand nothing, and rows that would be too old go."""
        everything = History(self.client_ids, self.rounds, self.learning_rates, self.rows, self.norms, self.cosines)
        ages = updates.round + 1 - self.rounds
        return everything.keep([i for i in range(len(self.client_ids)) if self.norms[i] > 0.0 and ages[i] <= window])


def gather(updates: Updates, history: History) -> Rows:
    """Put a round's updates before a history; only products with new rows are computed."""
    norms, block = cosines(updates.rows, history.rows, history.norms)
    k, m = len(updates.client_ids), len(history.client_ids)
    matrix = np.empty((k + m, k + m))
    matrix[:k] = block
    matrix[k:, :k] = block[:, k:].T
    matrix[k:, k:] = history.cosines
    return Rows(
        client_ids=(*updates.client_ids, *history.client_ids),
        rows=(*updates.rows, *history.rows),
        rounds=np.concatenate([np.full(k, updates.round, dtype=np.int64), history.rounds]),
        learning_rates=np.concatenate([np.full(k, updates.local_learning_rate), history.learning_rates]),
        norms=np.concatenate([norms, history.norms]),
        cosines=matrix,
        current=k,
    )
