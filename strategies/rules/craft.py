"""CRAFT (Wang, Liu, Thuerey 2026): the last direction, changed just enough to align with each client by its share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gram import cosines, norm
from .leastsquares import combine_units, meet
from .rule import Rule
from .updates import Aggregate, Floats, State, Updates
from .validation import check_range, is_real

_NOTHING = 1e-9
"""A direction shorter than this is made of rounding errors: its parts are unit vectors and shares."""


@dataclass(frozen=True)
class CRAFT(Rule):
    """Layer by layer, the direction closest to the last one whose alignment with each client is that client's share.

    ``d_q = r_q + U_q^+ (rho - U_q r_q)`` with unit updates ``U_q``, data shares ``rho`` and the last direction
    ``r_q``, made a unit vector (zero at first); ``theta <- theta - craft_step d``. Where exactly one client moved a
    layer, ``d_q`` is that client's displacement.

    Needs: nothing beyond the updates, which must be individual (no secure aggregation).

    Guarantees: permutation-invariant, non-conflicting-per-layer.

    Cost: k^2 n / 2 + 2 k n multiplications, and one float64 vector of n numbers between rounds.

    Use it when updates differ wildly in length and a steady direction matters more than the length of the step.

    Parameters
    ----------
    craft_step : float
        Server step, > 0; after the first round every layer moves about this far, whatever the clients' updates are.
    layerwise : bool
        False treats the whole model as one layer.
    alignment_cutoff : float
        Singular values of ``U_q`` below this share of the largest are dropped, in [0, 1]. 0 means the authors'
        ``max(k, n_q) eps(float32)``, which merges near-collinear clients in large layers and leaves one direction
        in layers above 8 million parameters; 1e-6 is strict.

    Notes
    -----
    Departs from the authors' code: solved through the cosines in float64 instead of a float32 pseudo-inverse, the
    largest singular value is always kept, and a direction that cancels out becomes exactly zero. The reference is kept
    in float64. The paper's text could not be read; this follows the public code. Never reduces to FedAvg. Non-conflict
    holds where a layer's updates are linearly independent beyond the cut-off; others get the least-squares answer.
    The step does not change with the length of the updates, except where one client alone moved a layer.

    References
    ----------
    Wang, Liu, Thuerey, *CRAFT*, arXiv 2605.21317.
    """

    guarantees: ClassVar[tuple[str, ...]] = ("permutation-invariant", "non-conflicting-per-layer")

    craft_step: float = 0.1
    layerwise: bool = True
    alignment_cutoff: float = 0.0

    def __post_init__(self) -> None:
        if not (is_real(self.craft_step) and math.isfinite(self.craft_step) and self.craft_step > 0.0):
            raise ValueError(f"craft_step must be a finite number > 0, got {self.craft_step!r}")
        if not isinstance(self.layerwise, bool):
            raise ValueError(f"layerwise must be true or false, got {self.layerwise!r}")
        check_range("alignment_cutoff", self.alignment_cutoff, 0.0, 1.0)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round.

        Parameters
        ----------
        updates : Updates
            The round's updates.
        state : dict
            What the previous round returned; empty at first.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the state with the direction as ``reference``.
        """
        n = updates.rows[0].size
        reference = state.get("reference", np.zeros(n))
        direction = np.empty(n)
        ranks, used, moved = [], [], 0
        for layer in updates.layers if self.layerwise else (slice(0, n),):
            direction[layer], rank, usable = self._layer(updates, layer, reference[layer])
            ranks.append(rank)
            used.append(usable)
            moved += int(usable > 0)
        diagnostics = {
            "status": "solved" if direction.any() else "stationary",
            "layers-moved": moved,
            "layers-of-one-client": used.count(1),
            "layers-compromised": sum(rank < usable for rank, usable in zip(ranks, used, strict=True)),
        }
        return Aggregate(self.craft_step * direction, diagnostics), {"reference": direction}

    def _layer(self, updates: Updates, layer: slice, last: Floats) -> tuple[Floats, int, int]:
        """A layer's direction, the rank of its unit rows, and how many clients moved it."""
        rows = [row[layer] for row in updates.rows]
        last_norm = norm(last)
        known = last_norm > 0.0
        norms, block = cosines(rows, (last,) if known else (), np.array([last_norm] if known else []))
        used = norms > 0.0
        usable = int(used.sum())
        if usable == 0:
            return np.zeros(last.size), 0, 0
        if usable == 1:
            return np.asarray(rows[int(used.argmax())], dtype=np.float64), 1, 1
        shares = updates.num_examples[used] / updates.num_examples[used].sum()
        alignments = block[used, -1] if known else np.zeros(usable)
        # The cut-off is on singular values of the unit rows, whose squares are the eigenvalues of their cosines.
        demand = meet(block[np.ix_(used, used)], shares - alignments, self._cutoff(usable, last.size) ** 2)
        coefficients = np.zeros(norms.size)
        coefficients[used] = demand.coefficients
        direction = combine_units(rows, norms, coefficients)
        if known:
            direction += last / last_norm
        if norm(direction) <= _NOTHING:
            direction[:] = 0.0
        return direction, demand.rank, usable

    def _cutoff(self, usable: int, size: int) -> float:
        return self.alignment_cutoff or max(usable, size) * float(np.finfo(np.float32).eps)
