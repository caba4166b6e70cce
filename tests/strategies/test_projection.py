"""The PCD program: solutions, certificates, infeasibility."""

from __future__ import annotations

import numpy as np
import pytest
import qpsolvers
from hypothesis import given
from hypothesis import strategies as st

from strategies.rules.projection import (
    TOLERANCE,
    Program,
    available_solvers,
    certify,
    irreconcilable,
    relax,
    solve,
)


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length one; zero rows are left out."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    kept = norms[:, 0] > 0
    return rows[kept] / norms[kept]


def program_of(rows: np.ndarray, primary: np.ndarray, tau: float) -> Program:
    units, towards = unit(rows), primary / np.linalg.norm(primary)
    return Program(units @ units.T, units @ towards, np.full(len(units), tau))


def random_rows(generator: np.random.Generator) -> np.ndarray:
    """Rows as clients may send them: conflicts, duplicates, zero, collinear and opposite rows, wild scales."""
    m, n = int(generator.integers(1, 101)), int(np.exp(generator.uniform(np.log(2), np.log(1e4))))
    rows = generator.standard_normal((m, n))
    if generator.random() < 0.5:
        rows += generator.uniform(0, 2) * generator.standard_normal(n)
    if generator.random() < 0.3:
        rows[generator.integers(m, size=m // 3)] = rows[0]
    if generator.random() < 0.3:
        rows[generator.integers(m, size=m // 4)] = 0.0
    if generator.random() < 0.3:
        rows[generator.integers(m, size=m // 4)] = rows[0] * generator.uniform(0.1, 3)
    if generator.random() < 0.2:
        rows[generator.integers(m)] = -rows[0] * generator.uniform(0.1, 3)
    if generator.random() < 0.2:
        # Closer than this, cosines in float64 no longer hold seven digits of the direction, for any solver.
        noise = 10.0 ** generator.uniform(-3, -1) * generator.standard_normal(n)
        rows[generator.integers(m)] = generator.choice([-1.0, 1.0]) * rows[0] + noise
    size = (m, 1) if generator.random() < 0.5 else (1, 1)
    scaled: np.ndarray = rows * 10.0 ** generator.uniform(-12, 12, size=size)
    return scaled


def direction(program: Program, rows: np.ndarray, primary: np.ndarray, multipliers: np.ndarray) -> np.ndarray:
    found: np.ndarray = primary / np.linalg.norm(primary) + multipliers @ unit(rows)
    return found


def by_other_solver(program: Program, solver: str) -> np.ndarray | None:
    """The reduced primal ``min 1/2 |y|^2, S y >= c`` with K = S S', which shares nothing with our dual.

    Returns the correction as a combination of rows, or None where the solver does not solve it.
    """
    values, vectors = np.linalg.eigh(program.cosines)
    kept = values > 1e-13 * values[-1]
    factor = vectors[:, kept] * np.sqrt(values[kept])
    size = factor.shape[1]
    try:
        y = qpsolvers.solve_qp(np.eye(size), np.zeros(size), G=-factor, h=-program.violations, solver=solver)
    except Exception:
        return None
    if y is None or (program.violations - factor @ y).max() > 1e-9 * max(1.0, float(np.linalg.norm(y))):
        return None
    return np.asarray(vectors[:, kept] @ (y / np.sqrt(values[kept])))


@pytest.mark.slow
def test_a_thousand_random_programs_are_certified_and_agree_with_two_other_solvers() -> None:
    generator = np.random.default_rng(20261130)
    compared = {"daqp": 0, "quadprog": 0}
    found_by = set()
    statuses = {"inactive": 0, "solved": 0, "infeasible": 0}
    for _ in range(1000):
        rows = random_rows(generator)
        if not rows.any():
            continue
        primary = generator.dirichlet(np.ones(len(rows))) @ rows
        program = program_of(rows, primary, float(generator.choice([0.0, 0.005, 0.02, 0.1, 0.5, 1.0])))
        solution = solve(program)
        statuses[solution.status] += 1  # a KeyError is an uncertified program
        if solution.status == "infeasible":
            assert_hull_holds_zero(program, solution.opposed)
            continue
        assert certify(program, solution.multipliers).worst <= TOLERANCE
        own = direction(program, rows, primary, solution.multipliers)
        found_by.add(solution.found_by)
        for solver in compared:
            other = by_other_solver(program, solver)
            if other is not None:
                theirs = direction(program, rows, primary, other)
                length = float(np.linalg.norm(theirs))
                # Below 1e-7 there is no direction: rounding noise around zero, which the rule does not follow.
                assert np.linalg.norm(own - theirs) <= (1e-7 * length if length > 1e-7 else 1e-7)
                compared[solver] += 1
    assert min(compared.values()) > 500
    assert "polish" in found_by
    assert min(statuses.values()) > 50


def assert_hull_holds_zero(program: Program, weights: np.ndarray | None) -> None:
    """A proof anyone can check: non-negative weights, sum one, under which the rows cancel."""
    assert weights is not None
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1.0)
    assert np.sqrt(max(0.0, weights @ program.cosines @ weights)) < 1e-6
    assert weights @ program.violations > 0


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(np.array([[1.0, 0.0], [-1.0, 0.0]]), id="two opposite"),
        pytest.param(np.array([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]]), id="three at 120 degrees"),
        pytest.param(np.random.default_rng(0).standard_normal((60, 20)), id="more rows than dimensions"),
        pytest.param(np.random.default_rng(1).standard_normal((100, 2)), id="hundred in the plane"),
    ],
)
def test_opposed_rows_are_proved_infeasible(rows: np.ndarray) -> None:
    program = program_of(rows, np.array([1.0, 2.0, *np.zeros(rows.shape[1] - 2)]), 0.1)
    solution = solve(program)
    assert solution.status == "infeasible"
    assert not solution.multipliers.any()
    assert_hull_holds_zero(program, solution.opposed)


def test_float32_copies_of_opposite_rows_count_as_opposed() -> None:
    row = np.random.default_rng(3).standard_normal(10_000)
    noisy = -(row * (1 + 1e-8 * np.random.default_rng(4).standard_normal(10_000)))
    third = np.random.default_rng(5).standard_normal(10_000)
    assert solve(program_of(np.stack([row, noisy]), third, 0.1)).status == "infeasible"


def test_nearly_opposite_rows_are_still_served() -> None:
    row, other = np.random.default_rng(3).standard_normal((2, 1000))
    program = program_of(np.stack([row, -row + 1e-3 * other]), row + other, 0.1)
    solution = solve(program)
    assert solution.status == "solved"
    assert solution.found_by == "polish"
    assert program.progress(solution.multipliers).min() >= 0.1 - 1e-9 * solution.direction_norm
    assert solution.direction_norm > 50


@pytest.mark.parametrize("seed", range(20))
def test_camps_of_nearly_opposite_rows_are_always_certified_or_proved_opposed(seed: int) -> None:
    generator = np.random.default_rng(seed)
    noise = 10.0 ** generator.uniform(-9, -1)
    signs = generator.choice([-1.0, 1.0], size=(30, 1))
    rows = signs * generator.standard_normal(200) + noise * generator.standard_normal((30, 200))
    program = program_of(rows, generator.dirichlet(np.ones(30)) @ rows, float(generator.choice([0.0, 0.02, 0.5])))
    assert solve(program).status in ("inactive", "solved", "infeasible")


@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4, 1e-5])
def test_the_closer_to_opposite_the_longer_the_direction_and_still_certified(gap: float) -> None:
    row, other, third = np.random.default_rng(3).standard_normal((3, 50))
    program = program_of(np.stack([row, -row + gap * other, third]), 3 * row + third, 0.1)
    solution = solve(program)
    assert solution.status == "solved"
    assert 0.01 < solution.direction_norm * gap < 1


def test_rows_that_float64_cosines_cannot_tell_from_opposite_ones_count_as_opposed() -> None:
    row, other, third = np.random.default_rng(3).standard_normal((3, 50))
    program = program_of(np.stack([row, -row + 1e-8 * other, third]), 3 * row + third, 0.1)
    assert solve(program).status == "infeasible"


def test_relaxing_touches_only_the_rows_that_oppose_each_other() -> None:
    rows = np.array(
        [[1.0, 0, 0, 0], [-1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, -1.0, 0, 0], [0, 0, 1.0, 0], [0.1, 0, 0.2, -1.0]]
    )
    program = program_of(rows, np.array([1.0, 1.0, -1.0, 0.5]), 0.1)
    opposed = irreconcilable(program)
    assert opposed.tolist() == [True, True, True, True, False, False]
    relaxed = relax(program, opposed)
    solution = solve(relaxed)
    assert solution.status == "solved"
    progress = relaxed.progress(solution.multipliers)
    np.testing.assert_allclose(progress[opposed], 0.0, atol=1e-12)
    assert (progress[~opposed] >= 0.1 - 1e-12).all()


@pytest.mark.parametrize("solver", available_solvers())
def test_every_installed_solver_leads_to_the_same_certified_answer(solver: str) -> None:
    generator = np.random.default_rng(11)
    rows = generator.standard_normal((12, 40))
    program = program_of(rows, -rows[0] + 0.3 * rows[1], 0.1)
    expected, found = solve(program), solve(program, solver)
    assert found.status == "solved"
    np.testing.assert_allclose(found.multipliers, expected.multipliers, atol=1e-9)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda m: m * 0.0, id="no multipliers"),
        pytest.param(lambda m: m * 1.001, id="all too large"),
        pytest.param(lambda m: m - 2e-9 * (1 + m.max()), id="negative"),
        pytest.param(lambda m: m + 1e-6, id="inactive rows active"),
        pytest.param(lambda m: m * np.nan, id="not a number"),
    ],
)
def test_certificate_refuses_wrong_multipliers(spoil) -> None:
    generator = np.random.default_rng(2)
    rows = generator.standard_normal((9, 30))
    program = program_of(rows, -rows[0] - rows[1], 0.2)
    right = solve(program).multipliers
    assert certify(program, right).worst < 1e-14
    assert certify(program, spoil(right)).worst > TOLERANCE


@pytest.mark.parametrize("part", ["cosines", "alignments", "thresholds"])
def test_a_program_that_is_not_finite_is_refused_at_once(part: str) -> None:
    parts = {"cosines": np.eye(2), "alignments": np.zeros(2), "thresholds": np.ones(2)}
    parts[part] = parts[part] * np.nan
    with pytest.raises(ValueError, match="finite"):
        solve(Program(**parts))


def test_a_program_whose_shapes_disagree_is_refused() -> None:
    with pytest.raises(ValueError, match="shapes disagree"):
        solve(Program(np.eye(3), np.zeros(2), np.zeros(2)))


def test_a_solver_that_lies_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    import strategies.rules.projection as projection

    rows = np.random.default_rng(2).standard_normal((9, 30))
    program = program_of(rows, -rows[0] - rows[1], 0.2)
    expected = solve(program).multipliers
    for lie in (np.full(9, 1e9), np.zeros(9), np.full(9, np.nan), None):
        monkeypatch.setattr(projection, "_proxqp", lambda _, lie=lie: lie)
        solution = solve(program)
        assert solution.status == "solved"
        np.testing.assert_allclose(solution.multipliers, expected, atol=1e-9)


def test_when_nothing_can_be_shown_the_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import strategies.rules.projection as projection

    def gives_up(*_: object, **__: object) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(projection, "_proxqp", lambda _: None)
    monkeypatch.setattr(projection, "_polished", lambda *_: iter(()))
    monkeypatch.setattr(projection.scipy.optimize, "nnls", gives_up)
    rows = np.random.default_rng(2).standard_normal((9, 30))
    solution = solve(program_of(rows, -rows[0], 0.2))
    assert solution.status == "uncertified"
    assert not solution.multipliers.any()


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.5, 1.0]))
def test_two_rows_follow_the_closed_form(seed: int, tau: float) -> None:
    # PCD with two secondaries of unit length (paper/method.md): a 2 x 2 solve over the active set.
    generator = np.random.default_rng(seed)
    rows, primary = generator.standard_normal((2, 6)), generator.standard_normal(6)
    program = program_of(rows, primary, tau)
    c, b = program.cosines[0, 1], program.violations
    both = np.array([b[0] - c * b[1], b[1] - c * b[0]]) / (1 - c * c)
    singles = [np.array([max(b[0], 0.0), 0.0]), np.array([0.0, max(b[1], 0.0)])]
    fitting = [m for m in (np.zeros(2), *singles, both) if m.min() >= 0 and certify(program, m).worst < 1e-12]
    np.testing.assert_allclose(solve(program).multipliers, fitting[0], atol=1e-8)
