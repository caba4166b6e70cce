"""Capped multipliers: box-constrained programs are always solved, certified, and equal to an independent reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import qpsolvers

import strategies.rules.projection as projection
from strategies.rules import FedAvg, FedPCD, Updates
from strategies.rules.projection import TOLERANCE, Program, available_solvers, certify, solve
from tests.strategies.test_projection import program_of, random_rows, unit
from tests.support import updates


def camps(generator: np.random.Generator) -> np.ndarray:
    """Two camps of nearly opposite rows, which without a cap seldom have a solution."""
    m, n = int(generator.integers(2, 40)), int(generator.integers(2, 200))
    signs = generator.choice([-1.0, 1.0], size=(m, 1))
    rows: np.ndarray = signs * generator.standard_normal(n)
    return rows + 10.0 ** generator.uniform(-9, -1) * generator.standard_normal((m, n))


def capped(generator: np.random.Generator) -> tuple[Program, np.ndarray, np.ndarray]:
    """A random program with caps, its rows and its primary."""
    rows = camps(generator) if generator.random() < 0.3 else random_rows(generator)
    if not rows.any():
        rows[0] = 1.0
    primary = generator.dirichlet(np.ones(len(rows))) @ rows
    program = program_of(rows, primary, float(generator.choice([0.0, 0.005, 0.02, 0.1, 0.5, 1.0])))
    if generator.random() < 0.2:
        program = replace(program, alignments=np.zeros_like(program.alignments), primary=False)
        primary = np.zeros_like(primary)
    m, cap = program.thresholds.size, 10.0 ** generator.uniform(-4, 2)
    caps = np.full(m, cap) if generator.random() < 0.6 else cap * 10.0 ** generator.uniform(-2, 1, m)
    return replace(program, caps=caps), rows, primary


def with_slack(program: Program) -> np.ndarray:
    """``K mu``, what the correction does to every row, from the penalised primal in coordinates of the rows' span.

    ``min 1/2 |y|^2 + sum x_i`` subject to ``<s_i, y> + x_i / C_i >= c_i``, ``x >= 0``, by quadprog: it shares nothing
    with our dual, and has neither multipliers nor a box.
    """
    factor = projection._factor(program.cosines)
    m, rank = factor.shape
    found = qpsolvers.solve_qp(
        np.diag(np.concatenate([np.ones(rank), np.full(m, 1e-10)])),
        np.concatenate([np.zeros(rank), np.ones(m)]),
        G=np.block([[-factor, -np.diag(1.0 / program.upper)], [np.zeros((m, rank)), -np.eye(m)]]),
        h=np.concatenate([-program.violations, np.zeros(m)]),
        solver="quadprog",
    )
    assert found is not None
    return np.asarray(factor @ found[:rank])


def gap_in_parameter_space(program: Program, rows: np.ndarray, primary: np.ndarray, multipliers: np.ndarray) -> float:
    """Penalised primal minus dual, from the rows themselves: no direction is better by more than this."""
    units, correction = unit(rows), multipliers @ unit(rows)
    towards = primary / np.linalg.norm(primary) if program.primary else np.zeros(rows.shape[1])
    missed = np.maximum(0.0, program.thresholds - units @ (towards + correction))
    primal = 0.5 * correction @ correction + program.upper @ missed
    dual = (program.thresholds - units @ towards) @ multipliers - 0.5 * correction @ correction
    return float(primal - dual)


@pytest.mark.slow
def test_hundreds_of_random_capped_programs_are_certified_and_proved_optimal_in_parameter_space() -> None:
    generator = np.random.default_rng(20270108)
    statuses: Counter[str] = Counter()
    short = 0
    for _ in range(500):
        program, rows, primary = capped(generator)
        solution = solve(program)
        statuses[solution.status] += 1
        assert solution.short is not None
        short += bool(solution.short.any())
        assert certify(program, solution.multipliers).worst <= TOLERANCE
        assert (solution.multipliers >= 0.0).all()
        assert (solution.multipliers <= program.upper).all()
        scale = max(1.0, solution.direction_norm, float(solution.multipliers.sum()))
        assert gap_in_parameter_space(program, rows, primary, solution.multipliers) <= 1e-8 * scale**2
        assert np.abs(with_slack(program) - program.cosines @ solution.multipliers).max() <= 1e-7 * scale
    assert set(statuses) == {"inactive", "solved"}
    assert statuses["solved"] > 350
    assert short > 150


def test_the_fallback_alone_finds_the_same_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(5)
    programs = [capped(generator) for _ in range(60)]
    expected = [solve(program) for program, _, _ in programs]
    monkeypatch.setattr(projection, "_proxqp", lambda _: None)
    for (program, _, _), usual in zip(programs, expected, strict=True):
        alone = solve(program)
        assert alone.found_by in ("bvls", "none")
        scale = max(1.0, usual.direction_norm, float(usual.multipliers.sum()))
        np.testing.assert_allclose(
            program.cosines @ alone.multipliers, program.cosines @ usual.multipliers, atol=1e-7 * scale
        )


def conflict(seed: int = 3, m: int = 8, n: int = 30, tau: float = 0.2) -> Program:
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((m, n))
    return program_of(rows, -rows[0] - 0.5 * rows[1] + 0.2 * rows[2], tau)


def test_a_cap_that_nobody_reaches_changes_nothing() -> None:
    for seed in range(30):
        program = conflict(seed)
        free = solve(program)
        for cap in (1.001 * free.multipliers.max(), 1e3, 1e9):
            held = solve(replace(program, caps=np.full(8, cap)))
            assert held.status == "solved"
            assert held.short is not None
            assert not held.short.any()
            np.testing.assert_allclose(held.multipliers, free.multipliers, rtol=1e-9, atol=1e-12)


def test_a_cap_of_zero_leaves_the_primary() -> None:
    solution = solve(replace(conflict(), caps=np.zeros(8)))
    assert solution.status == "solved"
    assert not solution.multipliers.any()
    assert solution.direction_norm == 1.0


def test_the_tighter_the_cap_the_less_the_primary_is_bent() -> None:
    program, previous = conflict(), np.inf
    for cap in (10.0, 1.0, 0.5, 0.2, 0.05, 0.01):
        multipliers = solve(replace(program, caps=np.full(8, cap))).multipliers
        bent = float(np.sqrt(multipliers @ program.cosines @ multipliers))
        assert bent <= previous + 1e-12
        previous = bent


def test_one_capped_row_follows_the_closed_form() -> None:
    # mu = min(C, max(0, b - a)) for a single unit row.
    for alignment, cap, expected in ((-0.6, 10.0, 0.8), (-0.6, 0.3, 0.3), (0.5, 0.3, 0.0)):
        program = Program(np.eye(1), np.array([alignment]), np.array([0.2]), caps=np.array([cap]))
        solution = solve(program)
        assert solution.multipliers[0] == pytest.approx(expected, abs=1e-15)
        assert solution.short is not None
        assert solution.short[0] == (expected == cap)


@pytest.mark.parametrize("primary", [True, False])
def test_exactly_opposite_rows_have_a_solution_under_a_cap(primary: bool) -> None:
    rows = np.array([[1.0, 0.0], [-1.0, 0.0]])
    program = replace(program_of(rows, np.array([0.6, 0.8]), 0.1), caps=np.full(2, 0.3), primary=primary)
    if not primary:
        program = replace(program, alignments=np.zeros(2))
    solution = solve(program)
    assert solution.status == "solved"
    assert solution.short is not None
    assert solution.short.any()
    # The first is served by the primary alone, so that only the second pulls.
    assert solution.multipliers.tolist() == pytest.approx([0.0, 0.3] if primary else [0.3, 0.3])


@pytest.mark.parametrize("solver", available_solvers())
def test_every_installed_solver_leads_to_the_same_capped_answer(solver: str) -> None:
    program = replace(conflict(), caps=np.full(8, 0.3))
    expected, found = solve(program), solve(program, solver)
    assert found.status == "solved"
    np.testing.assert_allclose(found.multipliers, expected.multipliers, atol=1e-9)


def test_the_certificate_refuses_multipliers_beyond_the_cap_and_rows_missed_without_need() -> None:
    program = replace(conflict(), caps=np.full(8, 0.3))
    right = solve(program).multipliers
    assert certify(program, right).worst < 1e-13
    free = solve(replace(program, caps=None)).multipliers
    assert certify(program, free).dual > 0.1
    assert certify(program, 0.5 * right).worst > 1e-3
    assert certify(replace(program, caps=np.full(8, 0.31)), right).worst > 1e-3
    assert certify(program, right - 1e-7).worst > TOLERANCE


@pytest.mark.parametrize("caps", [np.full(8, np.inf), np.full(8, np.nan), np.full(8, -1.0), np.ones(7)])
def test_caps_that_are_none_are_refused(caps: np.ndarray) -> None:
    with pytest.raises(ValueError, match="caps must be 8 finite numbers"):
        solve(replace(conflict(), caps=caps))


# ---- the rule ----

OPPOSED = np.array([[1.0, 0.2, 0.0, 0.0], [-1.0, -0.2, 0.0, 0.0], [0.3, 0.1, 1.0, 0.0], [0.5, 0.0, -0.8, 1.0]])


def a_run(seed: int, sizes: bool) -> list[Updates]:
    """Five rounds of clients that come and go, some of them opposed to each other."""
    generator = np.random.default_rng(seed)
    tendencies = generator.standard_normal((10, 12)) + generator.standard_normal(12)
    tendencies[1] = -2.0 * tendencies[0]
    batches = []
    for server_round in range(1, 6):
        chosen = sorted(generator.choice(10, 4, replace=False).tolist())
        rows = tendencies[chosen] + 0.3 * generator.standard_normal((4, 12)) * (generator.random() < 0.7)
        rows = rows * 10.0 ** generator.uniform(-1, 1, (4, 1)) if sizes else rows
        counts = generator.integers(1, 99, 4).astype(float)
        batches.append(Updates(server_round, tuple(map(str, chosen)), tuple(rows), counts, 0.1 * 0.9**server_round))
    return batches


@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("normalization", ["l2", "ema", "none"])
def test_no_multiplier_exceeds_the_cap_in_any_round_and_every_round_has_a_solution(
    normalization: str, primary: bool
) -> None:
    held: set[str] = set()
    for seed in range(10):
        rule = FedPCD(tau=0.2, normalization=normalization, primary=primary, multiplier_cap=0.25)
        state: dict[str, Any] = {}
        for batch in a_run(seed, sizes=normalization != "none"):
            aggregate, state = rule.aggregate(batch, state)
            found = aggregate.diagnostics
            assert found["status"] in ("inactive", "solved")
            assert found["kkt-residual"] <= TOLERANCE
            assert max(found["multipliers"].values(), default=0.0) <= 0.25 * (1 + 1e-12)
            assert found["tau-met"] == (not found["capped-clients"])
            for client in found["capped-clients"]:
                assert found["multipliers"][client] == pytest.approx(0.25, rel=1e-9)
            held |= set(found["capped-clients"])
            mean = batch.weights @ np.stack(batch.rows)
            assert np.linalg.norm(aggregate.step) == pytest.approx(np.linalg.norm(mean), rel=1e-9)
    assert held


@pytest.mark.parametrize("normalization", ["l2", "ema", "none"])
def test_the_capped_step_is_the_penalised_programs(normalization: str) -> None:
    rows = np.random.default_rng(8).standard_normal((5, 20)) * np.array([[1.0], [3.0], [0.5], [2.0], [1.0]])
    rows[0] -= 2.0 * rows[1:].mean(0) * 3
    rule = FedPCD(tau=0.3, normalization=normalization, multiplier_cap=0.2)
    aggregate, _ = rule.aggregate(updates(rows), {})
    norms = np.linalg.norm(rows, axis=1)
    scaled = rows if normalization == "none" else rows / norms[:, None]
    mean = rows.mean(0)
    primary = mean if normalization == "none" else mean / np.linalg.norm(mean)
    # In R^n, in the paper's own units: min 1/2 |d - g_0|^2 + C sum max(0, tau |g_i|^2 - <g_i, d>).
    k, n = rows.shape
    found = qpsolvers.solve_qp(
        np.diag(np.concatenate([np.ones(n), np.full(k, 1e-10)])),
        np.concatenate([-primary, np.full(k, 0.2)]),
        G=np.block([[-scaled, -np.eye(k)], [np.zeros((k, n)), -np.eye(k)]]),
        h=np.concatenate([-0.3 * (scaled**2).sum(1), np.zeros(k)]),
        solver="quadprog",
    )
    assert found is not None
    assert aggregate.diagnostics["capped-clients"]
    expected = found[:n] / np.linalg.norm(found[:n]) * np.linalg.norm(mean)
    np.testing.assert_allclose(aggregate.step, expected, atol=1e-7)


def test_opposed_clients_are_named_as_capped_and_the_round_is_not_infeasible() -> None:
    aggregate, _ = FedPCD(tau=0.2, multiplier_cap=0.3).aggregate(updates(OPPOSED, [1, 3, 1, 1]), {})
    assert aggregate.diagnostics["status"] == "solved"
    assert aggregate.diagnostics["tau-met"] is False
    assert set(aggregate.diagnostics["capped-clients"]) <= {"0", "1"}
    assert aggregate.diagnostics["capped-clients"]
    assert aggregate.diagnostics["relaxed-clients"] == []


def test_a_cap_leaves_rounds_that_need_none_bit_for_bit() -> None:
    for seed in range(20):
        rows = np.random.default_rng(seed).standard_normal((5, 15)) + 0.5
        free, _ = FedPCD(tau=0.05).aggregate(updates(rows), {})
        held, _ = FedPCD(tau=0.05, multiplier_cap=50.0).aggregate(updates(rows), {})
        assert held.step.tobytes() == free.step.tobytes()
        assert held.diagnostics["capped-clients"] == []


def test_a_cap_close_to_zero_is_fedavg() -> None:
    rows = np.random.default_rng(0).standard_normal((6, 15))
    held, _ = FedPCD(tau=0.3, multiplier_cap=1e-9).aggregate(updates(rows), {})
    plain, _ = FedAvg().aggregate(updates(rows), {})
    np.testing.assert_allclose(held.step, plain.step, atol=1e-8)


def test_renaming_and_scaling_change_nothing_under_a_cap() -> None:
    generator = np.random.default_rng(4)
    for _ in range(30):
        rows, weights = generator.standard_normal((6, 12)), generator.integers(1, 50, 6).astype(float)
        rows[1] = -rows[0] * generator.choice([1.0, 2.0])
        rule, order = FedPCD(tau=0.1, multiplier_cap=0.4), generator.permutation(6)
        plain, _ = rule.aggregate(updates(rows, weights), {})
        renamed, _ = rule.aggregate(updates(rows[order], weights[order]), {})
        scaled, _ = rule.aggregate(updates(rows * 1e-20, weights), {})
        np.testing.assert_allclose(renamed.step, plain.step, atol=1e-9)
        np.testing.assert_allclose(scaled.step / 1e-20, plain.step, atol=1e-9)
        back = {str(i): str(order[i]) for i in range(6)}
        assert {back[c] for c in renamed.diagnostics["capped-clients"]} == set(plain.diagnostics["capped-clients"])


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), 1e10, "0.1", True])
def test_a_cap_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"multiplier_cap must be a number in \[0, 1e\+09\]"):
        FedPCD(multiplier_cap=value)
