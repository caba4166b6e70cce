"""FedMDFG (Pan et al. 2023): a common descent direction that also makes losses more equal, with a line search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .fedlf import fairness_gradient
from .gram import combine, cosines, norm
from .minnorm import minimum_norm
from .rows import VANISHED
from .rule import Rule
from .updates import LOSS_BEFORE, TRIAL_LOSSES, Aggregate, Diagnostics, Floats, Row, State, Updates
from .validation import check_learning_rate, check_range, check_whole

_ARMIJO = 1e-4
_LARGEST_GROWTH = 2.0**20
"""Limits the search to twenty further trials, however short the vector in the hull was."""
_ROW = "fedmdfg-row/"


@dataclass(frozen=True)
class FedMDFG(Rule):
    """The shortest vector in the hull of equally long updates and a fairness gradient, as far as losses really fall.

    All updates get their mean length. If the losses are more than `fairness_angle` away from equal, or some but not all
    clients got worse, the gradient of ``-cos(1, F)`` joins them; so do the updates of clients that took part in the
    last round only. ``d`` is the shortest vector in the hull, with the length of the mean. The step is the first of
    ``s = 2^S eta, 2^(S-1) eta, ...`` with ``F_i(theta) - F_i(theta - s d) >= 1e-4 s <g_i, d>`` for every client and,
    with the fairness gradient, a larger ``cos(1, F)``.

    Needs: loss-before, trial-losses.

    Guarantees: permutation-invariant, fedavg-direction-when-identical.

    Cost: one Gram matrix of this and the last round's updates, one combination; up to ``2 S + 1 + log2(growth)``
    further rounds of loss evaluations, where growth is how much the direction had to be stretched.

    Use it when clients can afford extra evaluations and the learning rate is hard to choose.

    Parameters
    ----------
    fairness_angle : float
        Degrees in [0, 90]; published grid 5.625 and 11.25.
    search_depth : int
        S >= 0; published grid 1, 3, 5.
    server_learning_rate : float
        ``eta >= 0``, around which steps are tried; 0 means the local learning rate of the round.

    Notes
    -----
    Follows the paper's sign of the decrease condition (the code accepts a small increase) and the l2 norm in the
    cosine. Where no trial passes: the largest that lowers the sum of losses (none above ``eta`` when absent clients
    were used), else the one with the smallest sum. Zero updates, not short ones, are left out, so results do not depend
    on the scale; growth counts up to 2^20. A client that does not answer a trial has no say in it. Updates
    after local epochs stand for the full gradients of the authors' code. Without trial losses the step is ``eta``.

    References
    ----------
    Pan et al., *FedMDFG: Federated Learning with Multi-Gradient Descent and Fair Guidance*, AAAI 2023; code:
    github.com/zibinpan/FedMDFG.
    """

    needs: ClassVar[tuple[str, ...]] = (LOSS_BEFORE, TRIAL_LOSSES)
    guarantees: ClassVar[tuple[str, ...]] = ("permutation-invariant", "fedavg-direction-when-identical")

    fairness_angle: float = 11.25
    search_depth: int = 5
    server_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        check_range("fairness_angle", self.fairness_angle, 0.0, 90.0)
        check_whole("search_depth", self.search_depth, 0)
        check_learning_rate(self.server_learning_rate)

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """Aggregate one round; the state holds the last participants' updates and every client's usual loss.

        Parameters
        ----------
        updates : Updates
            The round's updates, with `LOSS_BEFORE` and, for the line search, `trial_losses`.
        state : dict
            What the previous round returned; empty at first.

        Returns
        -------
        tuple of (Aggregate, dict)
            The step, and the state for the next round.
        """
        losses = updates.metrics[LOSS_BEFORE]
        memory, worse = _expectations(state, updates.client_ids, losses)
        hull = _Hull.gather(updates, state)
        memory |= hull.remember(updates)
        diagnostics: Diagnostics = {"fairness-active": False, "constraints-cached": len(hull.rows) - hull.current}
        if hull.mean == 0.0:
            return Aggregate(np.zeros(updates.rows[0].size), {**diagnostics, "status": "stationary"}), memory
        fairness = self._fairness(losses, 0 < worse < len(losses))
        direction, growth, progress = hull.direction(updates, fairness)
        diagnostics["fairness-active"] = fairness is not None
        if not direction.any():
            return Aggregate(direction, {**diagnostics, "status": "stationary"}), memory
        search = _Search(updates, direction, progress, hull.members, fairness is not None)
        length = self._search(search, updates, growth, len(hull.rows) > hull.current, diagnostics)
        diagnostics |= {"accepted-step": length, "direction-growth": growth}
        return Aggregate(direction * (length / updates.local_learning_rate), diagnostics), memory

    def _fairness(self, losses: Floats, force: bool) -> Floats | None:
        gradient = fairness_gradient(losses)
        if gradient is None:
            return None
        unit = losses / losses.max()
        cosine = float(unit.sum() / (np.linalg.norm(unit) * math.sqrt(unit.size)))
        angle = math.degrees(math.acos(min(1.0, cosine)))
        return gradient if force or angle > self.fairness_angle else None

    def _search(
        self, search: _Search, updates: Updates, growth: float, absent: bool, diagnostics: Diagnostics
    ) -> float:
        eta = self.server_learning_rate or updates.local_learning_rate
        if updates.trial_losses is None:
            diagnostics |= {"status": "no-line-search", "trial-evaluations": 0}
            return eta
        longest = eta if absent else 2.0**self.search_depth * eta
        shortest = 2.0**-self.search_depth * eta / min(growth, _LARGEST_GROWTH)
        tried: list[tuple[float, float]] = []
        length = longest
        while length >= shortest * (1.0 - 1e-12):
            accepted, change = search.trial(length)
            tried.append((length, change))
            if accepted:
                diagnostics |= {"status": "solved", "trial-evaluations": len(tried)}
                return length
            length /= 2.0
        diagnostics |= {"status": "line-search-failed", "trial-evaluations": len(tried)}
        answered = [(s, change) for s, change in tried if math.isfinite(change)]
        if not answered:
            return min(eta, longest)
        lower = [s for s, change in answered if change < 0.0 and not (absent and s > eta)]
        return lower[0] if lower else min(answered, key=lambda pair: (pair[1], pair[0]))[0]


@dataclass(frozen=True)
class _Search:
    updates: Updates
    direction: Floats
    progress: Floats
    """``<g_i, d>`` in pseudo-gradients."""
    members: np.ndarray
    """Participants with an update: only they can demand that their loss falls."""
    fairness: bool

    def trial(self, length: float) -> tuple[bool, float]:
        """Whether a step passes, and by how much it changes the sum of losses; NaN if nobody answers."""
        losses = self.updates.metrics[LOSS_BEFORE]
        assert self.updates.trial_losses is not None
        found = self.updates.trial_losses(self.direction * (length / self.updates.local_learning_rate))
        live = np.isfinite(found)
        if not live.any():
            return False, math.nan
        before, after = losses[live], found[live]
        demands = np.isin(np.flatnonzero(live), self.members)
        passes = bool((before - after >= _ARMIJO * length * self.progress[live])[demands].all())
        if passes and self.fairness:
            passes = _evenness(after) > _evenness(before)
        return passes, float(after.sum() - before.sum())


@dataclass(frozen=True)
class _Hull:
    """Participants with an update, then clients of the last round only; all in displacement units."""

    client_ids: tuple[str, ...]
    rows: tuple[Row, ...]
    norms: Floats
    lengths: Floats
    """What the rows are stretched to: the participants' mean length, and what the absent ones had last round."""
    cosines: Floats
    current: int
    members: np.ndarray
    """Positions of the participants with an update among all participants."""
    mean: float

    @staticmethod
    def gather(updates: Updates, state: State) -> _Hull:
        last = state.get("fedmdfg-round") == updates.round - 1
        known = list(state.get("fedmdfg-clients", [])) if last else []
        absent = [i for i, c in enumerate(known) if c not in updates.client_ids]
        old_rows = tuple(state[_ROW + known[i]] for i in absent)
        old_norms = np.array([norm(row) for row in old_rows])
        every = [*updates.rows, *old_rows]
        norms, block = cosines(every, (), np.zeros(0))
        k = len(updates.rows)
        moving = np.flatnonzero(norms[:k] > 0.0)
        kept = np.concatenate([moving, np.arange(k, len(every))]).astype(np.int64)
        mean = float(norms[moving].mean()) if moving.size else 0.0
        old_length = float(state.get("fedmdfg-length", 0.0)) * updates.local_learning_rate
        return _Hull(
            (*(updates.client_ids[i] for i in moving), *(known[i] for i in absent)),
            tuple(every[i] for i in kept),
            norms[kept],
            np.concatenate([np.full(moving.size, mean), np.full(old_norms.size, old_length)]),
            block[np.ix_(kept, kept)],
            int(moving.size),
            moving,
            mean,
        )

    def remember(self, updates: Updates) -> State:
        """The participants' rows, and the length they were given, in pseudo-gradient units."""
        names = self.client_ids[: self.current]
        return {
            "fedmdfg-clients": list(names),
            "fedmdfg-round": updates.round,
            "fedmdfg-length": self.mean / updates.local_learning_rate,
            **{_ROW + name: row for name, row in zip(names, self.rows, strict=False)},
        }

    def direction(self, updates: Updates, fairness: Floats | None) -> tuple[Floats, float, Floats]:
        """The direction in displacement units, how much it was stretched, and ``<g_i, d>`` of all participants."""
        scale = float(self.lengths.max())
        lengths = self.lengths / scale
        # Every row of the hull, made a unit vector, as a combination of unit rows.
        rows, norms = np.eye(lengths.size), lengths
        if fairness is not None:
            row = np.zeros(lengths.size)
            row[: self.current] = fairness[self.members] * lengths[: self.current]
            size = float(np.sqrt(max(0.0, float(row @ self.cosines @ row))))
            if size > VANISHED * float(np.abs(row).sum()):
                rows, norms = np.vstack([rows, row / size]), np.append(lengths, size)
        matrix = np.clip(rows @ self.cosines @ rows.T, -1.0, 1.0)
        np.fill_diagonal(matrix, 1.0)
        answer = minimum_norm(matrix, norms)
        progress = np.zeros(len(updates.rows))
        if answer.status != "solved":
            return np.zeros(updates.rows[0].size), 1.0, progress
        coefficients = (answer.weights * norms) @ rows
        direction = combine(self.rows, coefficients * scale / self.norms)
        plain = np.zeros(len(self.rows))
        plain[: self.current] = lengths[: self.current] / self.current
        target = float(np.sqrt(max(0.0, float(plain @ self.cosines @ plain)))) * scale
        growth = target / norm(direction)
        direction *= growth
        units = (self.cosines @ coefficients)[: self.current] * scale * growth
        with np.errstate(over="ignore"):  # Beyond the range of float64 no loss can fall enough, which is the answer.
            progress[self.members] = units * self.norms[: self.current] / updates.local_learning_rate**2
        return direction, growth, progress


def _expectations(state: State, client_ids: tuple[str, ...], losses: Floats) -> tuple[State, int]:
    """Every client's usual loss after this round, and how many participants exceeded theirs."""
    clients: list[str] = list(state.get("fedmdfg-expecting", []))
    usual = dict(zip(clients, np.asarray(state.get("fedmdfg-expected", np.zeros(0))).tolist(), strict=True))
    counts = dict(zip(clients, np.asarray(state.get("fedmdfg-counts", np.zeros(0))).tolist(), strict=True))
    worse = 0
    for client, loss in zip(client_ids, losses.tolist(), strict=True):
        count = int(counts.get(client, 0))
        if count == 0:
            usual[client] = loss
        elif loss <= usual[client]:
            usual[client] = (count * usual[client] + loss) / (count + 1)
        else:
            worse += 1
        counts[client] = count + 1
    memory: State = {
        "fedmdfg-expecting": list(usual),
        "fedmdfg-expected": np.array(list(usual.values())),
        "fedmdfg-counts": np.array([counts[c] for c in usual], dtype=np.int64),
    }
    return memory, worse


def _evenness(losses: Floats) -> float:
    length = float(np.linalg.norm(losses))
    return float(losses.sum() / length) if length > 0.0 else math.inf
