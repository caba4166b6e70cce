"""What methods may promise: one check per guarantee, and the random rounds that every promise is tried on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strategies.rules import Rule, Updates
from strategies.rules.updates import (
    ACCURACY_AFTER,
    ACCURACY_BEFORE,
    LOSS_BEFORE,
    METRIC_NEEDS,
    NEWTON_DIRECTION,
    TRAIN_LOSS,
    TRIAL_LOSSES,
)
from tests.support import updates

RELATIVE = 1e-9
"""How far two steps that should be equal may differ, relative to their lengths."""
NO_STEP = 1e-12
"""A step shorter than this share of the longest update counts as none."""
ONLY_INDEPENDENT = frozenset({"adafed", "dqnfed", "config", "craft", "pcd"})
"""Methods that promise non-conflict for linearly independent updates only."""
CUT = 1e-13
"""Smaller eigenvalues, relative to the largest, are no directions that a method may use."""
INDEPENDENT = 1e-6
"""Updates count as independent where no eigenvalue of their cosines is below this share of the largest."""


# ---- random rounds ----


def _gaussian(generator: np.random.Generator) -> np.ndarray:
    return generator.standard_normal((generator.integers(2, 8), generator.integers(8, 40)))


def _correlated(generator: np.random.Generator) -> np.ndarray:
    rows = _gaussian(generator)
    return rows + generator.uniform(0.5, 4.0) * generator.standard_normal(rows.shape[1])


def _near_duplicates(generator: np.random.Generator) -> np.ndarray:
    rows = _gaussian(generator)
    rows[-1] = rows[0] + 1e-3 * generator.standard_normal(rows.shape[1])
    return rows


def _wide_norms(generator: np.random.Generator) -> np.ndarray:
    rows = _gaussian(generator)
    return np.asarray(rows * 10.0 ** generator.uniform(-4.0, 4.0, (len(rows), 1)))


def _few_dimensions(generator: np.random.Generator) -> np.ndarray:
    return generator.standard_normal((generator.integers(3, 8), generator.integers(2, 4)))


def _with_zero_row(generator: np.random.Generator) -> np.ndarray:
    rows = _gaussian(generator)
    rows[generator.integers(len(rows))] = 0.0
    return rows


def _opposed_pair(generator: np.random.Generator) -> np.ndarray:
    rows = _gaussian(generator)
    rows[-1] = -2.0 * rows[0]
    return rows


def _single_client(generator: np.random.Generator) -> np.ndarray:
    return generator.standard_normal((1, generator.integers(2, 40)))


FAMILIES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "gaussian": _gaussian,
    "correlated": _correlated,
    "near-duplicates": _near_duplicates,
    "wide range of norms": _wide_norms,
    "few dimensions": _few_dimensions,
    "zero row": _with_zero_row,
    "opposed pair": _opposed_pair,
    "single client": _single_client,
}


@dataclass(frozen=True)
class Case:
    """One round in numbers that a check may change: everything a method could need."""

    rows: np.ndarray
    num_examples: np.ndarray
    metrics: dict[str, np.ndarray]
    curvature: np.ndarray
    rate: float = 1.0
    cuts: tuple[int, ...] = ()
    scale: float = 1.0

    def take(self, clients: Any) -> Case:
        """The round of these clients, in this order."""
        metrics = {name: values[clients] for name, values in self.metrics.items()}
        return replace(
            self,
            rows=self.rows[clients],
            num_examples=self.num_examples[clients],
            metrics=metrics,
            curvature=self.curvature[clients],
        )

    def with_losses(self, change: Callable[[np.ndarray], np.ndarray]) -> Case:
        """The round with other losses."""
        changed = {name: change(self.metrics[name]) for name in (LOSS_BEFORE, TRAIN_LOSS)}
        return replace(self, metrics={**self.metrics, **changed})

    @property
    def slices(self) -> tuple[slice, ...]:
        edges = [0, *self.cuts, self.rows.shape[1]]
        return tuple(slice(low, high) for low, high in itertools.pairwise(edges))

    def trial_losses(self, step: np.ndarray) -> np.ndarray:
        """Quadratics that start at the reported losses and have their minimum beyond the client's own update."""
        targets = 1.5 * self.rows
        square = (targets**2).sum(1)
        distance = ((step / self.scale - targets) ** 2).sum(1)
        safe = np.where(square > 0.0, square, 1.0)
        relative = np.where(square > 0.0, distance / safe, 1.0 + distance)
        return np.asarray(self.metrics[LOSS_BEFORE] * relative)

    def build(self, rule: Rule, server_round: int = 1, first: int = 0) -> Updates:
        """The updates, with what the rule declares to need and nothing else."""
        needs = rule.required()
        rows = self.rows * self.scale
        batch = updates(rows, self.num_examples, server_round, self.rate, first)
        return replace(
            batch,
            metrics={name: values for name, values in self.metrics.items() if name in needs},
            newton_directions=tuple(self.curvature * rows) if NEWTON_DIRECTION in needs else (),
            trial_losses=self.trial_losses if TRIAL_LOSSES in needs else None,
            population=batch.client_ids,
            arrays=self.slices,
            layers=self.slices,
        )


def draw(family: str, seed: int) -> Case:
    """A random round of a family."""
    generator = np.random.default_rng([seed, list(FAMILIES).index(family)])
    return around(FAMILIES[family](generator), generator)


def around(rows: np.ndarray, generator: np.random.Generator) -> Case:
    """Random values of everything else around given rows."""
    k, n = rows.shape
    metrics = {name: generator.uniform(0.1, 3.0, k) for name in (LOSS_BEFORE, TRAIN_LOSS)}
    metrics |= {name: generator.uniform(0.05, 1.0, k) for name in (ACCURACY_BEFORE, ACCURACY_AFTER)}
    assert set(metrics) == set(METRIC_NEEDS)
    cuts = tuple(sorted(generator.choice(np.arange(1, n), size=min(2, n - 1), replace=False).tolist()))
    return Case(
        rows,
        generator.integers(1, 100, k).astype(float),
        metrics,
        generator.uniform(0.1, 2.0, (k, n)),
        float(generator.choice([1.0, 0.1])),
        cuts,
    )


# ---- checks ----


def step_of(rule: Rule, case: Case) -> np.ndarray:
    """The step of a first round."""
    return np.asarray(rule.aggregate(case.build(rule), {})[0].step)


def afterwards(case: Case) -> Case:
    """A second round: half the losses and other updates of the same clients."""
    return replace(case.with_losses(lambda losses: losses / 2), rows=case.rows + np.roll(case.rows, 1, axis=1))


def two_rounds(rule: Rule, case: Case) -> list[np.ndarray]:
    """The steps of this round and of the one after it."""
    first, state = rule.aggregate(case.build(rule), {})
    second, _ = rule.aggregate(afterwards(case).build(rule, server_round=2), state)
    return [first.step, second.step]


def tolerance(name: str, case: Case) -> float:
    """How far equal steps may differ: more where a least-squares method has to tell nearly dependent updates apart."""
    if name not in ONLY_INDEPENDENT:
        return RELATIVE
    smallest = 1.0
    for rows in (case.rows, afterwards(case).rows):
        for columns in (slice(None), *case.slices):
            part = rows[:, columns][np.linalg.norm(rows[:, columns], axis=1) > 0.0]
            units = part / np.linalg.norm(part, axis=1, keepdims=True)
            spectrum = np.linalg.svd(units, compute_uv=False) ** 2
            smallest = min([smallest, *(spectrum[spectrum > CUT * spectrum.max(initial=0.0)] / len(rows)).tolist()])
    return max(RELATIVE, 100.0 * float(np.finfo(float).eps) / smallest)


def size(case: Case) -> float:
    """The length of the longest update."""
    return float(np.linalg.norm(case.rows * case.scale, axis=1).max())


def mean_of(case: Case, uniform: bool = False) -> np.ndarray:
    """FedAvg's step, or that of equal weights."""
    weights = np.ones(len(case.rows)) if uniform else case.num_examples
    return np.asarray(weights / weights.sum() @ (case.rows * case.scale))


def same(found: np.ndarray, expected: np.ndarray, reach: float, relative: float = RELATIVE) -> None:
    """Fail unless two steps are equal up to rounding; `reach` is the length of the longest update."""
    length = max(float(np.linalg.norm(found)), float(np.linalg.norm(expected)))
    assert np.linalg.norm(found - expected) <= relative * length + NO_STEP * reach


def _permutation_invariant(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    order = generator.permutation(len(case.rows))
    for plain, permuted in zip(two_rounds(rule, case), two_rounds(rule, case.take(order)), strict=True):
        same(permuted, plain, size(case), tolerance(name, case))


def _scale_equivariant(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    factor = float(10.0 ** generator.uniform(-8.0, 8.0))
    scaled = two_rounds(rule, replace(case, scale=factor))
    for plain, step in zip(two_rounds(rule, case), scaled, strict=True):
        same(step / factor, plain, size(case), tolerance(name, case))


def _scale_invariant(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    factor = float(10.0 ** generator.uniform(-8.0, 8.0))
    for plain, step in zip(two_rounds(rule, case), two_rounds(rule, replace(case, scale=factor)), strict=True):
        same(step, plain, 1.0)


def _row_scale_invariant(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    factors = 10.0 ** generator.uniform(-4.0, 4.0, (len(case.rows), 1))
    same(step_of(rule, replace(case, rows=case.rows * factors)), step_of(rule, case), 1.0)


def _alike(case: Case) -> Case:
    """All clients send the longest update and the first one's metrics; their numbers of examples still differ."""
    k = len(case.rows)
    longest = int(np.linalg.norm(case.rows, axis=1).argmax())
    alike = case.take(np.full(k, longest))
    return replace(alike, num_examples=case.num_examples)


def _fedavg_when_identical(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    alike = _alike(case)
    same(step_of(rule, alike), alike.rows[0], size(alike))


def _fedavg_direction_when_identical(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    alike = _alike(case)
    step = step_of(rule, alike)
    same(step / np.linalg.norm(step), alike.rows[0] / np.linalg.norm(alike.rows[0]), 1.0)


def _single_client_is_fedavg(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    alone = case.take([int(np.linalg.norm(case.rows, axis=1).argmax())])
    same(step_of(rule, alone), alone.rows[0], size(alone))


def _norm_is(step: np.ndarray, length: float, reach: float) -> None:
    found = float(np.linalg.norm(step))
    assert found == 0.0 or abs(found - length) <= RELATIVE * length + NO_STEP * reach


def _norm_preserving(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    _norm_is(step_of(rule, case), float(np.linalg.norm(mean_of(case))), size(case))


def _uniform_norm_preserving(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    _norm_is(step_of(rule, case), float(np.linalg.norm(mean_of(case, uniform=True))), size(case))


def _no_conflict(name: str, rows: np.ndarray, step: np.ndarray, reach: float) -> None:
    lengths = np.linalg.norm(rows, axis=1)
    units = rows[lengths > 0.0] / lengths[lengths > 0.0, None]
    length = float(np.linalg.norm(step))
    if len(units) == 0 or length <= NO_STEP * reach:
        return
    if name in ONLY_INDEPENDENT:
        spectrum = np.linalg.eigvalsh(units @ units.T)
        if spectrum[0] < INDEPENDENT * spectrum[-1]:
            return
    assert (units @ step).min() >= -RELATIVE * length


def _non_conflicting(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    _no_conflict(name, case.rows, step_of(rule, case), size(case))


def _non_conflicting_per_layer(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    step = step_of(rule, case)
    for layer in case.slices:
        _no_conflict(name, case.rows[:, layer], step[layer], size(case))


def _convex_combination(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    aggregate, reach = rule.aggregate(case.build(rule), {})[0], size(case)
    if not aggregate.step.any():  # 0 in the hull: no combination is named.
        return
    weights = np.array(list(aggregate.diagnostics["weights"].values()))
    assert weights.min() >= 0.0
    assert abs(weights.sum() - 1.0) <= RELATIVE
    same(weights @ case.rows, np.asarray(aggregate.step), reach)


def _weights_sum_to_one(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    weights = rule.aggregate(case.build(rule), {})[0].diagnostics["weights"]
    assert abs(sum(weights.values()) - 1.0) <= RELATIVE


def _loss_shift_invariant(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    shift = generator.uniform(0.1, 5.0)
    same(step_of(rule, case.with_losses(lambda losses: losses + shift)), step_of(rule, case), size(case))


def _loss_scale_invariant(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    factor = 10.0 ** generator.uniform(-4.0, 4.0)
    same(step_of(rule, case.with_losses(lambda losses: losses * factor)), step_of(rule, case), size(case))


def _no_longer_than_mean(name: str, rule: Rule, case: Case, generator: np.random.Generator) -> None:
    mean = float(np.linalg.norm(mean_of(case, uniform=True)))
    assert np.linalg.norm(step_of(rule, case)) <= mean * (1.0 + RELATIVE) + NO_STEP * size(case)


Check = Callable[[str, Rule, Case, np.random.Generator], None]

CHECKS: dict[str, Check] = {
    "permutation-invariant": _permutation_invariant,
    "scale-equivariant": _scale_equivariant,
    "scale-invariant": _scale_invariant,
    "row-scale-invariant": _row_scale_invariant,
    "fedavg-when-identical": _fedavg_when_identical,
    "fedavg-direction-when-identical": _fedavg_direction_when_identical,
    "single-client-is-fedavg": _single_client_is_fedavg,
    "norm-preserving": _norm_preserving,
    "uniform-norm-preserving": _uniform_norm_preserving,
    "non-conflicting": _non_conflicting,
    "non-conflicting-per-layer": _non_conflicting_per_layer,
    "convex-combination": _convex_combination,
    "weights-sum-to-one": _weights_sum_to_one,
    "loss-shift-invariant": _loss_shift_invariant,
    "loss-scale-invariant": _loss_scale_invariant,
    "no-longer-than-mean": _no_longer_than_mean,
}
"""What each guarantee of a rule means."""
