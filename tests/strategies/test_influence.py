"""What one client can do to a round: how long it can make the step, and how far it can turn it.

The bounds are derived in SECURITY.md; here adversaries of any size and direction look for a way around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strategies.model import Model
from strategies.replies import EXAMPLES_SCREEN, Reply, screen, to_updates
from strategies.rules import RULES, FedPCD, Rule, Updates
from strategies.rules.projection import Program, solve
from strategies.rules.updates import LOSS_BEFORE, TRAIN_LOSS
from tests.strategies.properties import FAMILIES, afterwards, draw, two_rounds
from tests.support import updates

Vector = NDArray[np.float64]
NO_LONGER_THAN_THE_LONGEST_UPDATE = {
    "afl",
    "config",
    "ditto",
    "dqnfed",
    "fedavg",
    "fedfv",
    "fedlf",
    "fedpcd",
    "mgda",
    "pcd",
    "propfair",
    "qfedavg",
    "term",
}
"""The others scale their steps by losses or constants, carry momentum, or search for a step size."""
NORM_SCREEN = 10.0


# ---- length ----


def honest_round(
    generator: np.random.Generator, k: int = 9
) -> tuple[dict[str, np.ndarray], list[np.ndarray], list[int]]:
    """A model of 30 parameters, and the displacements and example counts of honest clients."""
    model = {"w": generator.standard_normal(30).astype(np.float32)}
    common = generator.standard_normal(30) * generator.uniform(0, 2)
    rows = [0.05 * (common + generator.standard_normal(30)) * 10.0 ** generator.uniform(-1, 0.5) for _ in range(k)]
    return model, rows, generator.integers(10, 2000, k).tolist()


def attacks(generator: np.random.Generator, rows: list[np.ndarray], limit: float) -> Iterator[tuple[np.ndarray, float]]:
    """Displacements of every size and several directions, each with honest and dishonest numbers of examples."""
    mean = np.mean(rows, axis=0)
    directions = [-mean, mean, -rows[0], generator.standard_normal(30), np.eye(30)[3]]
    sizes = [*(10.0 ** np.arange(-30, 31, 4)), 0.999 * limit, 1.001 * limit]
    for direction in directions:
        for size in sizes:
            for claim in (1e-30, 500.0, 1e5, 2.0**53):
                yield direction / np.linalg.norm(direction) * size, claim


@pytest.mark.parametrize("method", ["fedpcd", "fedavg"])
@pytest.mark.parametrize("seed", range(4))
def test_a_client_of_any_size_lengthens_the_step_no_more_than_the_screens_allow(method: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    arrays, rows, counts = honest_round(generator)
    model, rule = Model(arrays), RULES[method]()
    own = float(np.linalg.norm(arrays["w"].astype(float)))
    median = sorted(np.linalg.norm(row) for row in rows)[(len(rows) - 1) // 2]
    limit = max(NORM_SCREEN * median, own)
    share = EXAMPLES_SCREEN / (EXAMPLES_SCREEN + math.ceil(len(rows) / 2))
    ids = [str(i) for i in range(len(rows) + 1)]
    with np.errstate(over="ignore"):
        replies = [
            Reply(c, {"w": arrays["w"] - r.astype(np.float32)}, n) for c, r, n in zip(ids, rows, counts, strict=False)
        ]
    honest, _ = screen(model, replies, ids[:-1], NORM_SCREEN)
    assert len(honest) == len(rows)
    exact = [reply.row.astype(float) for reply in honest]
    without = step_of(rule, to_updates(model, honest, 1, 1.0))
    reached, refused = 0.0, 0
    for displacement, claim in attacks(generator, rows, limit):
        attack = Reply(ids[-1], {"w": (arrays["w"] - displacement).astype(np.float32)}, claim)
        accepted, rejections = screen(model, [*replies, attack], ids, NORM_SCREEN)
        # Nobody honest loses the round because of it.
        assert {r.client_id for r in rejections} <= {ids[-1]}
        step = step_of(rule, to_updates(model, accepted, 1, 1.0))
        if rejections:
            refused += 1
            assert step.tobytes() == without.tobytes()
            continue
        weights = np.array([*counts, claim]) / (sum(counts) + claim)
        assert weights[-1] <= share
        rest = np.linalg.norm(weights[:-1] @ exact)
        assert np.linalg.norm(step) <= (rest + weights[-1] * limit) * (1 + 1e-6)
        reached = max(reached, float(np.linalg.norm(step)) / limit)
    assert refused > 50
    # The bound is not an idle one: a client just below both limits comes close to it.
    assert reached > 0.8


def step_of(rule: Rule, batch: Updates) -> Vector:
    return np.asarray(rule.aggregate(batch, {})[0].step)


@pytest.mark.parametrize("name", sorted(NO_LONGER_THAN_THE_LONGEST_UPDATE))
@pytest.mark.parametrize("family", FAMILIES)
def test_no_claim_makes_the_step_longer_than_the_longest_accepted_update(name: str, family: str) -> None:
    rule = RULES[name]()
    for seed in range(20):
        generator, case = np.random.default_rng(seed), draw(family, seed)
        rows, longest = case.rows.copy(), float(np.linalg.norm(case.rows, axis=1).max())
        against = [-rows[:-1].sum(0), -rows[0], generator.standard_normal(rows.shape[1])][seed % 3]
        if len(rows) > 1 and against.any():
            against = against + 1e-3 * longest * generator.standard_normal(against.size)
            rows[-1] = against / np.linalg.norm(against) * longest * 10.0 ** generator.uniform(-6, 0)
        metrics = {key: values.copy() for key, values in case.metrics.items()}
        for key in (LOSS_BEFORE, TRAIN_LOSS):
            metrics[key][-1] = 10.0 ** generator.uniform(-6, 6)
        counts = case.num_examples.copy()
        counts[-1] = 10.0 ** generator.uniform(-6, 12)
        hostile = replace(case, rows=rows, metrics=metrics, num_examples=counts)
        for step, sent in zip(two_rounds(rule, hostile), (hostile, afterwards(hostile)), strict=True):
            assert np.linalg.norm(step) <= np.linalg.norm(sent.rows, axis=1).max() * (1 + 1e-9)


# ---- direction ----


def directions(rows: Vector, primary: Vector, tau: float, caps: Vector | None) -> tuple[Vector, Vector]:
    """``d*`` in R^n and the multipliers."""
    units, towards = rows / np.linalg.norm(rows, axis=1, keepdims=True), primary / np.linalg.norm(primary)
    solution = solve(Program(units @ units.T, units @ towards, np.full(len(rows), tau), caps=caps))
    assert solution.status in ("inactive", "solved")
    return towards + solution.multipliers @ units, solution.multipliers


def climb(
    objective: Callable[[Vector], float], start: Vector, generator: np.random.Generator, steps: int = 60
) -> float:
    """Largest value that a random search from `start` finds."""
    best, value, width = start, objective(start), 1.0
    for _ in range(steps):
        trial = best + width * np.linalg.norm(best) * generator.standard_normal(best.size) / np.sqrt(best.size)
        found = objective(trial)
        best, value, width = (trial, found, width * 1.3) if found > value else (best, value, width * 0.85)
    return value


@pytest.mark.parametrize("cap", [0.01, 0.1, 0.5, 2.0])
def test_whatever_a_clients_direction_it_moves_the_programs_answer_by_no_more_than_its_cap(cap: float) -> None:
    generator, reached = np.random.default_rng(int(100 * cap)), 0.0
    for _ in range(12):
        m, n = int(generator.integers(1, 12)), int(generator.integers(3, 30))
        rows, primary = generator.standard_normal((2, m, n))[0], generator.standard_normal(n)
        rows += generator.uniform(0, 1) * primary
        caps, tau = np.full(m + 1, cap), float(generator.choice([0.0, 0.02, 0.2, 1.0]))
        without, _ = directions(rows, primary, tau, caps[:-1])

        def moved(
            row: Vector,
            rows: Vector = rows,
            primary: Vector = primary,
            tau: float = tau,
            caps: Vector = caps,
            without: Vector = without,
        ) -> float:
            found, multipliers = directions(np.vstack([rows, row]), primary, tau, caps)
            distance = float(np.linalg.norm(found - without))
            # By no more than the multiplier it got, which the diagnostics tell, although the others' change as well.
            assert distance <= multipliers[-1] + 1e-9
            assert multipliers[-1] <= cap
            lengths = float(np.linalg.norm(found)), float(np.linalg.norm(without))
            if cap < max(lengths):
                angle = math.acos(np.clip(found @ without / lengths[0] / lengths[1], -1.0, 1.0))
                assert angle <= math.asin(cap / max(lengths)) + 1e-6
            return distance

        for start in (-without, -primary, -rows[0], generator.standard_normal(n), -without + 0.01 * primary):
            reached = max(reached, climb(moved, start, generator) / cap)
    assert reached > (0.99 if cap < 2.0 else 0.5)


def test_without_a_cap_a_clients_influence_is_at_most_the_multiplier_that_is_reported() -> None:
    generator = np.random.default_rng(8)
    for _ in range(100):
        m, n = int(generator.integers(2, 10)), int(generator.integers(12, 40))
        rows, primary = generator.standard_normal((m, n)), generator.standard_normal(n)
        found, multipliers = directions(rows, primary, 0.2, None)
        for i in range(m):
            without, _ = directions(np.delete(rows, i, axis=0), primary, 0.2, None)
            assert np.linalg.norm(found - without) <= multipliers[i] + 1e-9


def test_another_direction_of_the_same_client_moves_the_answer_by_no_more_than_twice_its_cap() -> None:
    generator, cap = np.random.default_rng(9), 0.3
    for _ in range(200):
        m, n = int(generator.integers(2, 10)), int(generator.integers(3, 30))
        rows, primary = generator.standard_normal((m, n)), generator.standard_normal(n)
        other = rows.copy()
        other[-1] = generator.choice([-1.0, 1.0]) * rows[0] + 0.1 * generator.standard_normal(n)
        first, _ = directions(rows, primary, 0.2, np.full(m, cap))
        second, _ = directions(other, primary, 0.2, np.full(m, cap))
        assert np.linalg.norm(first - second) <= 2 * cap + 1e-9


def test_colluding_clients_move_the_answer_by_no_more_than_the_sum_of_their_caps() -> None:
    generator, cap = np.random.default_rng(10), 0.05
    for _ in range(100):
        n, q = 20, int(generator.integers(1, 6))
        rows, primary = generator.standard_normal((5, n)), generator.standard_normal(n)
        together = -primary + 0.3 * generator.standard_normal((q, n))
        without, _ = directions(rows, primary, 0.1, np.full(5, cap))
        found, _ = directions(np.vstack([rows, together]), primary, 0.1, np.full(5 + q, cap))
        assert np.linalg.norm(found - without) <= q * cap + 1e-9
        towards = primary / np.linalg.norm(primary)
        angle = math.acos(np.clip(found @ towards / np.linalg.norm(found), -1.0, 1.0))
        assert angle <= math.asin(min(1.0, (5 + q) * cap)) + 1e-6


def test_the_answer_follows_the_primary_without_stretching_its_changes() -> None:
    generator = np.random.default_rng(11)
    for _ in range(200):
        m, n = int(generator.integers(1, 10)), int(generator.integers(3, 30))
        rows, primary = generator.standard_normal((m, n)), generator.standard_normal(n)
        other = primary + 10.0 ** generator.uniform(-6, 1) * generator.standard_normal(n)
        units = [p / np.linalg.norm(p) for p in (primary, other)]
        found = [directions(rows, p, 0.2, np.full(m, 0.3))[0] for p in (primary, other)]
        assert np.linalg.norm(found[0] - found[1]) <= np.linalg.norm(units[0] - units[1]) + 1e-9


def answer(rule: FedPCD, batch: Updates, state: dict[str, Any]) -> tuple[Vector, dict[str, Any]]:
    """``d*`` as the rule's step and diagnostics tell it."""
    aggregate, _ = rule.aggregate(batch, state)
    return (
        aggregate.step / np.linalg.norm(aggregate.step) * aggregate.diagnostics.get("direction-norm", 1.0),
        aggregate.diagnostics,
    )


@pytest.mark.parametrize("normalization", ["l2", "ema", "none"])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e3, 1e30])
def test_an_absent_client_of_any_size_turns_the_step_by_no_more_than_its_cap(normalization: str, size: float) -> None:
    generator, cap = np.random.default_rng(12), 0.1
    rule = FedPCD(tau=0.1, normalization=normalization, multiplier_cap=cap)
    for _ in range(10):
        rows = generator.standard_normal((5, 20)) + generator.standard_normal(20)
        hostile = -rows.mean(0) + 0.3 * generator.standard_normal(20)
        hostile *= size / np.linalg.norm(hostile)
        _, before = rule.aggregate(updates(hostile[None], server_round=1, first=9), {})
        batch = updates(rows, server_round=2)
        found, diagnostics = answer(rule, batch, before)
        without, _ = answer(rule, batch, {})
        # |g~_i| over |g~_0|: one, unless nothing is normalised.
        length = size / float(np.linalg.norm(rows.mean(0))) if normalization == "none" else 1.0
        assert np.linalg.norm(found - without) <= cap * length * (1 + 1e-9) + 1e-9
        assert np.linalg.norm(found - without) <= diagnostics["multipliers"].get("9", 0.0) * length * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("claim", [1.0, 5.0, 100.0])
def test_a_participant_turns_the_step_by_its_cap_and_by_what_it_does_to_the_average(claim: float) -> None:
    generator, cap = np.random.default_rng(13), 0.1
    rule = FedPCD(tau=0.1, multiplier_cap=cap)
    for _ in range(100):
        rows = generator.standard_normal((6, 20)) + generator.standard_normal(20)
        rows[-1] = -rows[:-1].mean(0) * 10.0 ** generator.uniform(-3, 1) + 0.1 * generator.standard_normal(20)
        weights = np.array([1.0, 2.0, 3.0, 1.0, 2.0, claim])
        found, _ = answer(rule, updates(rows, weights), {})
        without, _ = answer(rule, updates(rows[:-1], weights[:-1]), {})
        means = [w @ r / np.linalg.norm(w @ r) for w, r in ((weights, rows), (weights[:-1], rows[:-1]))]
        assert np.linalg.norm(found - without) <= cap + np.linalg.norm(means[0] - means[1]) + 1e-9
