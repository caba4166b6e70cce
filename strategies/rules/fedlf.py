"""FedLF (Pan et al. 2024): layer by layer, a direction that harms no client, present or absent, nor fairness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .gram import combine, cosines, norm
from .minnorm import minimum_norm
from .rows import VANISHED
from .rule import Rule
from .updates import LOSS_BEFORE, Aggregate, Floats, Row, State, Updates, client_order
from .validation import check_flag, check_learning_rate, check_whole, server_rate

_ROW = "fedlf-row/"


@dataclass(frozen=True)
class FedLF(Rule):
    """Layer by layer, the shortest vector in the hull of equally long updates, absent clients and a fairness gradient.

    In each layer all rows get the participants' mean length; ``d_l`` is the shortest vector in the hull of the
    participants' rows, the rows of temporarily absent clients and the gradient of ``-cos(1, F)``. A layer whose hull
    contains 0 is merged with the next one. ``d`` gets the length of the plain mean; ``theta <- theta - eta_g d``.

    Needs: loss-before.

    Guarantees: permutation-invariant, scale-equivariant, fedavg-when-identical, single-client-is-fedavg,
    uniform-norm-preserving.

    Cost: products of the k new rows with all m rows in the window, a program of m + 1 variables per layer, one
    combination; memory for the window.

    Use it when conflicts differ between layers and fairness of the losses shall be pursued actively.

    Parameters
    ----------
    history_window : int
        H >= 0, in rounds: the oldest update of an absent client that is used. The paper's own limit, the number of
        clients seen so far over the cohort's size, applies too.
    layerwise : bool
        False treats the model as one layer.
    server_learning_rate : float
        ``eta_g >= 0``; 0 means the local learning rate of the round.

    Notes
    -----
    Departs from the paper in that absent clients' updates are also limited to `history_window` rounds. Follows the
    paper where the authors' code returns solver noise for a stalled layer: such layers are merged. Follows the code
    where it makes all rows of a layer equally long. Equal losses have no fairness gradient; a client whose part of
    a layer is zero has no say in that layer.

    References
    ----------
    Pan et al., *FedLF: Layer-Wise Fair Federated Learning*, AAAI 2024; code: github.com/zibinpan/FedLF.
    """

    needs: ClassVar[tuple[str, ...]] = (LOSS_BEFORE,)
    guarantees: ClassVar[tuple[str, ...]] = (
        "permutation-invariant",
        "scale-equivariant",
        "fedavg-when-identical",
        "single-client-is-fedavg",
        "uniform-norm-preserving",
    )

    history_window: int = 10
    layerwise: bool = True
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_whole("history_window", self.history_window, 0)
        check_flag("layerwise", self.layerwise)
        check_learning_rate(self.server_learning_rate)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round; the state holds the window's updates and their products per layer.

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
        spans = updates.layers if self.layerwise else (slice(0, updates.rows[0].size),)
        window = _Window.gather(updates, state, spans, self.history_window)
        k = len(updates.rows)
        used = window.usable(updates.round, k, self.history_window)
        scale = float(window.norms.max()) or 1.0
        lengths = window.norms[:, used] / scale
        grams = window.cosines[:, used][:, :, used] * lengths[:, :, None] * lengths[:, None, :]
        fairness = fairness_gradient(updates.metrics[LOSS_BEFORE])
        groups, coefficients, status = _directions(grams, k, fairness)
        rows = [window.rows[i] for i in used]
        step = np.zeros(rows[0].size)
        for group, factors in zip(groups, coefficients, strict=True):
            for layer in group:
                step[spans[layer]] = combine([row[spans[layer]] for row in rows], factors)
        step = _resized(step, combine(updates.rows, np.full(k, 1.0 / k)), float(window.norms[:, :k].max()))
        step *= server_rate(self.server_learning_rate, updates.local_learning_rate)
        diagnostics = {
            "status": status if step.any() else "stationary",
            "layers": len(spans),
            "layers-after-merging": len(groups),
            "constraints-cached": len(used) - k,
            "fairness-active": fairness is not None,
        }
        return Aggregate(step, diagnostics), window.state(updates.round, self.history_window)


@dataclass(frozen=True)
class _Window:
    """Participants, then absent clients still in the window; norms (L, m) and cosines (L, m, m) per layer."""

    client_ids: tuple[str, ...]
    rounds: np.ndarray
    rows: tuple[Row, ...]
    norms: Floats
    cosines: Floats
    seen: list[str]

    @staticmethod
    def gather(updates: Updates, state: State, spans: tuple[slice, ...], window: int) -> _Window:
        known = list(state.get("fedlf-clients", []))
        ages = updates.round - np.asarray(state.get("fedlf-rounds", np.zeros(0, dtype=np.int64)))
        absent = [i for i, c in enumerate(known) if c not in updates.client_ids and 0 < ages[i] <= window]
        old_rows = tuple(state[_ROW + known[i]] for i in absent)
        k, m = len(updates.rows), len(updates.rows) + len(absent)
        norms, matrices = np.zeros((len(spans), m)), np.zeros((len(spans), m, m))
        for layer, span in enumerate(spans):
            old_norms = state["fedlf-norms"][layer, absent] if absent else np.zeros(0)
            new_norms, block = cosines(
                [row[span] for row in updates.rows], [row[span] for row in old_rows], np.asarray(old_norms)
            )
            norms[layer] = np.concatenate([new_norms, old_norms])
            matrices[layer, :k] = block
            matrices[layer, k:, :k] = block[:, k:].T
            if absent:
                matrices[layer, k:, k:] = state["fedlf-cosines"][layer][np.ix_(absent, absent)]
        return _Window(
            (*updates.client_ids, *(known[i] for i in absent)),
            updates.round - np.concatenate([np.zeros(k, dtype=np.int64), ages[absent].astype(np.int64)]),
            (*updates.rows, *old_rows),
            norms,
            matrices,
            sorted({*state.get("fedlf-seen", []), *updates.client_ids}, key=client_order),
        )

    def usable(self, server_round: int, k: int, window: int) -> list[int]:
        """Participants, and those absent for at most (clients seen) / (cohort size) rounds."""
        limit = min(window, len(self.seen) // k) if len(self.seen) > k else 0
        ages = server_round - self.rounds
        return [i for i in range(len(self.rows)) if i < k or 0 < ages[i] <= limit]

    def state(self, server_round: int, window: int) -> State:
        """What the next round may use."""
        kept = [i for i in range(len(self.rows)) if server_round + 1 - self.rounds[i] <= window]
        return {
            "fedlf-clients": [self.client_ids[i] for i in kept],
            "fedlf-rounds": self.rounds[kept],
            "fedlf-norms": self.norms[:, kept],
            "fedlf-cosines": self.cosines[:, kept][:, :, kept],
            "fedlf-seen": self.seen,
            **{_ROW + self.client_ids[i]: self.rows[i] for i in kept},
        }


def fairness_gradient(losses: Floats) -> Floats | None:
    """Coefficients h, over the clients, of the gradient of ``-cos(1, F)``, up to scale; None if losses are equal.

    ``h = ((F.q) F / |F| - q |F|) / |F|^2`` with ``q = 1 / sqrt(k)``; returned with length 1.
    """
    largest = float(losses.max())
    if largest == 0.0:
        return None
    unit = losses / largest
    unit = unit / np.linalg.norm(unit)
    equal = np.full(unit.size, 1.0 / np.sqrt(unit.size))
    gradient = (unit @ equal) * unit - equal
    length = float(np.linalg.norm(gradient))
    return None if length <= 1e-12 else np.asarray(gradient / length)


def _directions(grams: Floats, k: int, fairness: Floats | None) -> tuple[list[list[int]], list[Floats], str]:
    """Groups of layers with the coefficients of their direction in the raw rows; stalled groups merge with the next."""
    groups = [[layer] for layer in range(len(grams)) if grams[layer].any()]
    found = [_direction(grams[group].sum(axis=0), k, fairness) for group in groups]
    while len(groups) > 1 and any(answer is None for answer in found):
        at = next(i for i, answer in enumerate(found) if answer is None)
        low = min(at, len(groups) - 2)
        merged = groups[low] + groups[low + 1]
        groups[low : low + 2] = [merged]
        found[low : low + 2] = [_direction(grams[merged].sum(axis=0), k, fairness)]
    answers = [(g, f) for g, f in zip(groups, found, strict=True) if f is not None]
    status = "solved" if answers else "stationary"
    return [g for g, _ in answers], [f for _, f in answers], status


def _direction(gram: Floats, k: int, fairness: Floats | None) -> Floats | None:
    """Coefficients of the shortest vector in the hull of equally long rows; None where it is 0.

    The fairness row combines the rows after they were made equally long, as in the authors' code.
    """
    norms = np.sqrt(np.diag(gram))
    used = np.flatnonzero(norms > 0.0)
    if not norms[:k].any():  # Rows get the participants' mean length, which is 0 here.
        return None
    # Unit rows as combinations of the raw ones, the fairness row last.
    units = np.zeros((used.size, norms.size))
    units[np.arange(used.size), used] = 1.0 / norms[used]
    if fairness is not None:
        row = np.zeros(norms.size)
        row[:k] = np.where(norms[:k] > 0.0, fairness / np.where(norms[:k] > 0.0, norms[:k], 1.0), 0.0)
        length = float(np.sqrt(max(0.0, float(row @ gram @ row))))
        if length > VANISHED * float(np.abs(row) @ norms):
            units = np.vstack([units, row / length])
    matrix = units @ gram @ units.T
    np.fill_diagonal(matrix, 1.0)
    answer = minimum_norm(np.clip(matrix, -1.0, 1.0), np.ones(len(units)))
    if answer.status != "solved":
        return None
    return np.asarray(float(norms[:k].mean()) * (answer.weights @ units))


def _resized(step: Floats, mean: Floats, scale: float) -> Floats:
    length = norm(step)
    if length <= VANISHED**2 * scale:
        return np.zeros_like(step)
    return np.asarray(step * (norm(mean) / length))
