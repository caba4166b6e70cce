"""The history window: the latest update of each client seen in the last H rounds, with its Gram matrix."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .updates import Floats, Row, State

_ROW = "history-row/"


def _empty() -> Floats:
    return np.zeros(0)


@dataclass(frozen=True)
class History:
    """One entry per client; no entry is a zero row.

    Parameters
    ----------
    client_ids : tuple of str
        The m clients.
    rounds : ndarray of shape (m,), int64
        The round in which each entry was received.
    learning_rates : ndarray of shape (m,), float64
        The local learning rate of that round.
    rows : tuple of ndarray, each of shape (n,)
        Displacements, as received.
    norms : ndarray of shape (m,), float64
        Their norms.
    cosines : ndarray of shape (m, m), float64
        Their Gram matrix after normalisation.
    """

    client_ids: tuple[str, ...] = ()
    rounds: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    learning_rates: Floats = field(default_factory=_empty)
    rows: tuple[Row, ...] = ()
    norms: Floats = field(default_factory=_empty)
    cosines: Floats = field(default_factory=lambda: np.zeros((0, 0)))

    def keep(self, indices: list[int]) -> History:
        """The entries at these positions, in this order."""
        return History(
            tuple(self.client_ids[i] for i in indices),
            self.rounds[indices],
            self.learning_rates[indices],
            tuple(self.rows[i] for i in indices),
            self.norms[indices],
            self.cosines[np.ix_(indices, indices)],
        )

    def usable(self, server_round: int, window: int, participants: Collection[str]) -> History:
        """Entries that constrain a round: at most `window` rounds old, of clients that do not take part in it.

        An entry of round s is used in round t if and only if t - s <= window (``paper/method.md``, step 3).
        """
        present = set(participants)
        ages = server_round - self.rounds
        return self.keep([i for i, c in enumerate(self.client_ids) if 0 < ages[i] <= window and c not in present])

    def to_state(self) -> State:
        """As a plain dict of arrays and lists."""
        state: State = {
            "history-clients": list(self.client_ids),
            "history-rounds": self.rounds,
            "history-learning-rates": self.learning_rates,
            "history-norms": self.norms,
            "history-cosines": self.cosines,
        }
        state.update({_ROW + client_id: row for client_id, row in zip(self.client_ids, self.rows, strict=True)})
        return state

    @staticmethod
    def from_state(state: State) -> History:
        """From what `to_state` returned; an empty state is an empty history."""
        if "history-clients" not in state:
            return History()
        client_ids = tuple(state["history-clients"])
        return History(
            client_ids,
            state["history-rounds"],
            state["history-learning-rates"],
            tuple(state[_ROW + client_id] for client_id in client_ids),
            state["history-norms"],
            state["history-cosines"],
        )
