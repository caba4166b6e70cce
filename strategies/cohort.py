"""Which clients take part in a round: uniform without replacement, from the seed and the round alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from .rules import client_order

Purpose = Literal["train", "evaluate"]

_STREAMS: dict[Purpose, int] = {"train": 0xC0407, "evaluate": 0xE7A1}
"""Keep cohorts apart from each other and from every other use of the same seed."""


def draw(
    client_ids: Sequence[str], size: int, seed: int, server_round: int, purpose: Purpose = "train"
) -> tuple[str, ...]:
    """Draw a round's cohort.

    Parameters
    ----------
    client_ids : sequence of str
        All clients that can take part, in any order.
    size : int
        How many to draw; at most all.
    seed : int
        The experiment's seed, >= 0. The same seed gives every method the same cohorts.
    server_round : int
        The round, counted from 1.
    purpose : {"train", "evaluate"}
        Each has draws of its own: who evaluates shall not be who just trained.

    Returns
    -------
    tuple of str
        Distinct clients in stable order.
    """
    population = sorted(client_ids, key=client_order)
    generator = np.random.default_rng(np.random.SeedSequence([_STREAMS[purpose], seed, server_round]))
    chosen = generator.choice(len(population), size=min(size, len(population)), replace=False)
    return tuple(population[i] for i in sorted(chosen.tolist()))


def size(fraction: float, minimum: int, available: int) -> int:
    """Cohort size: the given fraction of the available clients, at least `minimum`, at most all of them."""
    # 0.29 * 100 is 28.999... in floating point; the nudge keeps 29 clients.
    return min(available, max(int(fraction * available + 1e-9), minimum))
