"""FedPCD as a rule: history, normalisation, ablations, infeasible rounds, invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.rules import FedAvg, FedPCD, Updates
from tests.support import updates


def conflicting(k: int = 6, n: int = 40, seed: int = 0) -> np.ndarray:
    """Rows of which some oppose the mean."""
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((k, n)) + 2 * generator.standard_normal(n)
    rows[0] *= -1
    return rows


def cosines_with(step: np.ndarray, rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = rows @ step / np.linalg.norm(rows, axis=1) / np.linalg.norm(step)
    return found


@pytest.mark.parametrize("tau", [0.005, 0.02, 0.1, 0.5])
def test_every_client_makes_the_promised_progress_and_the_step_keeps_its_length(tau: float) -> None:
    rows, weights = conflicting(), np.array([3, 40, 11, 7, 25, 1])
    aggregate, _ = FedPCD(tau=tau).aggregate(updates(rows, weights), {})
    mean = weights / weights.sum() @ rows
    assert aggregate.diagnostics["status"] == "solved"
    assert np.linalg.norm(aggregate.step) == pytest.approx(np.linalg.norm(mean), rel=1e-12)
    # After rescaling the guaranteed cosine is gamma = tau / |d*| (paper, Equation 18).
    gamma = tau / aggregate.diagnostics["direction-norm"]
    assert cosines_with(aggregate.step, rows).min() >= gamma - 1e-12
    assert cosines_with(aggregate.step, mean[None])[0] == pytest.approx(aggregate.diagnostics["cosine-to-fedavg"])


def test_no_other_direction_that_serves_everyone_is_closer_to_the_average() -> None:
    rows = conflicting(k=4, n=5)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    aggregate, _ = FedPCD(tau=0.1).aggregate(updates(rows), {})
    primary = rows.mean(0) / np.linalg.norm(rows.mean(0))
    best = aggregate.step / np.linalg.norm(aggregate.step) * aggregate.diagnostics["direction-norm"]
    distance = np.linalg.norm(best - primary)
    generator = np.random.default_rng(5)
    others = best + generator.standard_normal((100_000, 5)) * 10.0 ** generator.uniform(-6, 0, (100_000, 1))
    feasible = others[(others @ units.T >= 0.1).all(1)]
    assert len(feasible) > 100
    assert (np.linalg.norm(feasible - primary, axis=1) >= distance - 1e-12).all()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(np.ones((1, 4)), id="single client"),
        pytest.param(np.tile(np.arange(1.0, 6.0), (4, 1)), id="identical clients"),
        pytest.param(np.abs(np.random.default_rng(0).standard_normal((5, 9))), id="agreeing clients"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_inactive_program_returns_fedavgs_step_bit_for_bit(rows: np.ndarray, dtype: type) -> None:
    batch = updates(rows.astype(dtype), [1, 2, 3, 4, 5][: len(rows)])
    ours, _ = FedPCD(tau=0.01).aggregate(batch, {})
    theirs, _ = FedAvg().aggregate(batch, {})
    assert ours.diagnostics["status"] == "inactive"
    assert ours.step.tobytes() == theirs.step.tobytes()


@given(st.integers(0, 10_000), st.sampled_from([1e-150, 1e-12, 1e-3, 1e5, 1e100]))
@settings(max_examples=30)
def test_scaling_all_updates_scales_the_step_and_leaves_the_multipliers(seed: int, scale: float) -> None:
    rows = conflicting(seed=seed)
    plain, _ = FedPCD(tau=0.05).aggregate(updates(rows), {})
    scaled, _ = FedPCD(tau=0.05).aggregate(updates(rows * scale), {})
    np.testing.assert_allclose(scaled.step / scale, plain.step, rtol=1e-9, atol=1e-12)
    assert scaled.diagnostics["multipliers"] == pytest.approx(plain.diagnostics["multipliers"], rel=1e-9)


@given(st.permutations(range(6)))
@settings(max_examples=20)
def test_renaming_clients_does_not_change_the_step(order: list[int]) -> None:
    rows, weights = conflicting(), np.arange(1.0, 7.0)
    plain, _ = FedPCD(tau=0.05).aggregate(updates(rows, weights), {})
    renamed, _ = FedPCD(tau=0.05).aggregate(updates(rows[order], weights[order]), {})
    np.testing.assert_allclose(renamed.step, plain.step, rtol=1e-9, atol=1e-12)


def test_a_cached_client_constrains_exactly_as_long_as_the_window_says() -> None:
    rule = FedPCD(tau=0.1, history_window=3)
    _, state = rule.aggregate(updates([[-1.0, 0.2, 0.0]], server_round=1, first=9), {})
    cached = []
    for server_round in range(2, 7):
        aggregate, state = rule.aggregate(updates([[1.0, 0.0, 0.0]], server_round=server_round), state)
        cached.append(aggregate.diagnostics["constraints-cached"])
        assert aggregate.diagnostics["multipliers"].keys() == ({"0", "9"} if cached[-1] else set())
    assert cached == [1, 1, 1, 0, 0]


def test_a_returning_clients_new_update_replaces_its_old_one() -> None:
    rule = FedPCD(tau=0.1, history_window=10)
    _, state = rule.aggregate(updates([[-1.0, 0.1], [1.0, 0.0]], server_round=1), {})
    _, state = rule.aggregate(updates([[1.0, 0.3]], server_round=2), state)
    aggregate, state = rule.aggregate(updates([[0.0, 1.0]], server_round=3, first=7), state)
    assert state["history-clients"] == ["7", "0", "1"]
    np.testing.assert_array_equal(state["history-row/0"], [1.0, 0.3])
    assert aggregate.diagnostics["constraints-cached"] == 2


def test_cached_clients_shape_the_constraints_but_not_the_primary() -> None:
    cached, current = np.array([[0.0, -1.0, 0.5]]), np.array([[1.0, 0.2, 0.0]])
    rule = FedPCD(tau=0.1)
    _, state = rule.aggregate(updates(cached * 1e6, first=3), {})
    with_history, _ = rule.aggregate(updates(current, server_round=2), state)
    assert np.linalg.norm(with_history.step) == pytest.approx(np.linalg.norm(current[0]))
    assert cosines_with(with_history.step, cached)[0] > 0
    without, _ = FedPCD(tau=0.1, history_window=0).aggregate(updates(current, server_round=2), state)
    np.testing.assert_array_equal(without.step, current[0])


def test_incremental_gram_equals_one_from_scratch() -> None:
    generator = np.random.default_rng(0)
    rule, state, latest = FedPCD(tau=0.05, history_window=4), {}, {}
    for server_round in range(1, 13):
        chosen = sorted(generator.choice(12, 3, replace=False).tolist(), key=lambda c: (0, c))
        rows = generator.standard_normal((3, 30)).astype(np.float32)
        ids = tuple(str(c) for c in chosen)
        _, state = rule.aggregate(Updates(server_round, ids, tuple(rows), np.ones(3)), state)
        latest.update({c: (server_round, row) for c, row in zip(ids, rows, strict=True)})
    kept = {c: row for c, (r, row) in latest.items() if 13 - r <= 4}
    assert set(state["history-clients"]) == set(kept)
    exact = [kept[c].astype(float) for c in state["history-clients"]]
    units = np.stack([row / np.linalg.norm(row) for row in exact])
    np.testing.assert_allclose(state["history-cosines"], units @ units.T, atol=1e-12)


def test_the_paper_count_of_represented_clients_is_met() -> None:
    # N (1 - (1 - rho)^(H + 1)) distinct clients under independent participation: 68.6 for N=100, rho=.1, H=10.
    generator, rule, state, counts = np.random.default_rng(1), FedPCD(), {}, []
    for server_round in range(1, 201):
        ids = tuple(str(c) for c in np.flatnonzero(generator.random(100) < 0.1))
        if not ids:
            continue
        rows = tuple(generator.standard_normal((len(ids), 3)))
        aggregate, state = rule.aggregate(Updates(server_round, ids, rows, np.ones(len(ids))), state)
        counts.append(aggregate.diagnostics["constraints-current"] + aggregate.diagnostics["constraints-cached"])
    assert np.mean(counts[20:]) == pytest.approx(100 * (1 - 0.9**11), rel=0.03)


def test_the_state_survives_a_copy_of_its_plain_parts() -> None:
    rule, rows = FedPCD(tau=0.1, normalization="ema"), conflicting()
    _, state = rule.aggregate(updates(rows), {})
    copied = {k: np.array(v) if isinstance(v, np.ndarray) else v for k, v in state.items()}
    assert all(isinstance(v, np.ndarray | list | float) for v in state.values())
    batch = updates(conflicting(seed=8), server_round=2, first=3)
    first, second = rule.aggregate(batch, state)[0], rule.aggregate(batch, copied)[0]
    assert first.step.tobytes() == second.step.tobytes()


def test_ema_equals_l2_in_a_clients_first_round() -> None:
    rows = conflicting()
    l2, _ = FedPCD(tau=0.1).aggregate(updates(rows), {})
    ema, _ = FedPCD(tau=0.1, normalization="ema").aggregate(updates(rows), {})
    np.testing.assert_allclose(ema.step, l2.step, rtol=1e-12)


def test_ema_demands_more_of_a_client_whose_update_grew() -> None:
    rows, beta = conflicting(), 0.5
    rule = FedPCD(tau=0.1, normalization="ema", ema_beta=beta, history_window=0)
    _, state = rule.aggregate(updates(rows), {})
    grown = rows.copy()
    grown[0] *= 3
    aggregate, _ = rule.aggregate(updates(grown, server_round=2), state)
    # PCD: v = beta v + (1 - beta) |g|^2, divided by 1 - beta^t; here t = 2 and |g| tripled.
    average = np.sqrt(((beta * (1 - beta)) + (1 - beta) * 9) / (1 - beta**2))
    units = grown / np.linalg.norm(grown, axis=1, keepdims=True)
    direction = aggregate.step / np.linalg.norm(aggregate.step) * aggregate.diagnostics["direction-norm"]
    assert units[0] @ direction == pytest.approx(0.1 * 3 / average, abs=1e-9)


def test_without_normalisation_the_raw_program_is_solved() -> None:
    rows = conflicting(k=3, n=8) * np.array([[1.0], [5.0], [0.2]])
    aggregate, _ = FedPCD(tau=0.1, normalization="none", history_window=0).aggregate(updates(rows), {})
    mean, multipliers = rows.mean(0), aggregate.diagnostics["multipliers"]
    # d* = gbar + sum mu_i g_i with <g_i, d*> >= tau |g_i|^2, in raw units.
    direction = aggregate.step / np.linalg.norm(aggregate.step)
    length = aggregate.diagnostics["direction-norm"] * np.linalg.norm(mean)
    slack = rows @ (direction * length) - 0.1 * np.linalg.norm(rows, axis=1) ** 2
    assert slack.min() == pytest.approx(0.0, abs=1e-9)
    rebuilt = mean + sum(mu * rows[int(c)] for c, mu in multipliers.items())
    np.testing.assert_allclose(rebuilt, direction * length, atol=1e-9)


def test_without_primary_the_direction_serves_the_worst_off_client_best() -> None:
    rows = conflicting()
    aggregate, _ = FedPCD(tau=0.1, primary=False).aggregate(updates(rows), {})
    worst = cosines_with(aggregate.step, rows).min()
    assert np.linalg.norm(aggregate.step) == pytest.approx(np.linalg.norm(rows.mean(0)))
    with_primary, _ = FedPCD(tau=0.1).aggregate(updates(rows), {})
    noise = 0.1 * np.random.default_rng(5).standard_normal((200, 40))
    candidates = [with_primary.step, *(aggregate.step + noise)]
    assert all(cosines_with(other, rows).min() <= worst + 1e-12 for other in candidates)


OPPOSED = np.array([[1.0, 0.2, 0.0, 0.0], [-1.0, -0.2, 0.0, 0.0], [0.3, 0.1, 1.0, 0.0], [0.5, 0.0, -0.8, 1.0]])


def test_an_infeasible_round_is_fedavg_by_default_and_says_so() -> None:
    aggregate, _ = FedPCD(tau=0.2).aggregate(updates(OPPOSED, [1, 3, 1, 1]), {})
    plain, _ = FedAvg().aggregate(updates(OPPOSED, [1, 3, 1, 1]), {})
    assert aggregate.diagnostics["status"] == "infeasible"
    assert aggregate.diagnostics["tau-met"] is False
    assert aggregate.step.tobytes() == plain.step.tobytes()


def test_relaxing_harms_nobody_and_gives_all_others_their_progress() -> None:
    aggregate, _ = FedPCD(tau=0.2, on_infeasible="relax").aggregate(updates(OPPOSED, [1, 3, 1, 1]), {})
    assert aggregate.diagnostics["relaxed-clients"] == ["0", "1"]
    progress = cosines_with(aggregate.step, OPPOSED) * aggregate.diagnostics["direction-norm"]
    np.testing.assert_allclose(progress[:2], 0.0, atol=1e-12)
    assert (progress[2:] >= 0.2 - 1e-9).all()
    assert aggregate.diagnostics["kkt-residual"] < 1e-12


def test_zero_policy_leaves_the_model_where_it_is() -> None:
    aggregate, _ = FedPCD(tau=0.2, on_infeasible="zero").aggregate(updates(OPPOSED, [1, 3, 1, 1]), {})
    assert not aggregate.step.any()
    assert aggregate.diagnostics["status"] == "infeasible"


@pytest.mark.parametrize("policy", ["primary", "relax", "zero"])
def test_when_everyone_opposes_everyone_only_the_primary_policy_moves(policy: str) -> None:
    angles = np.radians([0, 120, 240])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.array([[1.0], [2.0], [3.0]])
    aggregate, _ = FedPCD(tau=0.1, on_infeasible=policy).aggregate(updates(rows), {})
    assert aggregate.step.any() == (policy == "primary")


def test_updates_that_cancel_out_move_nothing_and_say_so() -> None:
    rows = np.array([[1.0, -2.0], [-1.0, 2.0]])
    aggregate, state = FedPCD(tau=0.1).aggregate(updates(rows), {})
    assert aggregate.diagnostics["status"] == "stationary"
    assert not aggregate.step.any()
    assert len(state["history-clients"]) == 2


def test_zero_updates_demand_nothing_and_are_not_remembered() -> None:
    aggregate, state = FedPCD(tau=0.1).aggregate(updates([[0.0, 0.0], [1.0, 0.0]]), {})
    np.testing.assert_array_equal(aggregate.step, [0.5, 0.0])
    assert state["history-clients"] == ["1"]
    nothing, state = FedPCD(tau=0.1).aggregate(updates([[0.0, 0.0]], server_round=2, first=4), state)
    assert nothing.diagnostics["status"] == "stationary"
    assert not nothing.step.any()


def test_an_uncertified_program_falls_back_to_the_average_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import strategies.rules.projection as projection

    monkeypatch.setattr(projection, "TOLERANCE", -1.0)
    aggregate, _ = FedPCD(tau=0.1).aggregate(updates(conflicting()), {})
    plain, _ = FedAvg().aggregate(updates(conflicting()), {})
    assert aggregate.diagnostics["status"] == "uncertified"
    assert aggregate.step.tobytes() == plain.step.tobytes()
    opposed, _ = FedPCD(tau=0.2, on_infeasible="relax").aggregate(updates(OPPOSED), {})
    assert opposed.diagnostics["status"] == "uncertified"
    strict, _ = FedPCD(tau=0.1, on_infeasible="zero").aggregate(updates(conflicting()), {})
    assert not strict.step.any()


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-5])
def test_the_step_keeps_fedavgs_length_however_short_the_direction_is(gap: float) -> None:
    rows = np.array([[1.0, 0.0, 0.0], [-1.0, gap, 0.0], [-1.0, 0.0, gap]])
    aggregate, _ = FedPCD(tau=0.0).aggregate(updates(rows), {})
    assert aggregate.diagnostics["direction-norm"] < 3 * gap
    assert np.linalg.norm(aggregate.step) == pytest.approx(np.linalg.norm(rows.mean(0)), rel=1e-12)
    assert cosines_with(aggregate.step, rows).min() > -1e-4


def test_an_entry_of_a_round_to_come_is_not_used() -> None:
    _, state = FedPCD(tau=0.1).aggregate(updates([[0.0, 1.0]], server_round=5, first=3), {})
    for server_round, cached in ((4, 0), (5, 0), (6, 1)):
        aggregate, _ = FedPCD(tau=0.1).aggregate(updates([[1.0, 0.0]], server_round=server_round), state)
        assert aggregate.diagnostics["constraints-cached"] == cached


def test_state_and_updates_are_left_as_they_were() -> None:
    rule, batch = FedPCD(tau=0.1, normalization="ema"), updates(conflicting())
    _, state = rule.aggregate(batch, {})
    before = {k: np.array(v).tobytes() for k, v in state.items()}
    rows = [row.tobytes() for row in batch.rows]
    rule.aggregate(updates(conflicting(seed=3), server_round=2, first=2), state)
    assert {k: np.array(v).tobytes() for k, v in state.items()} == before
    assert [row.tobytes() for row in batch.rows] == rows


@pytest.mark.parametrize("server_rate", [0.05, 0.1, 0.4])
def test_the_server_learning_rate_is_relative_to_the_local_one(server_rate: float) -> None:
    batch = updates(conflicting(), rate=0.1)
    plain, _ = FedPCD(tau=0.1).aggregate(batch, {})
    scaled, _ = FedPCD(tau=0.1, server_learning_rate=server_rate).aggregate(batch, {})
    np.testing.assert_allclose(scaled.step, plain.step * server_rate / 0.1, rtol=1e-12)
    agreeing = updates(np.eye(3), rate=0.1)
    mean, _ = FedPCD(server_learning_rate=server_rate).aggregate(agreeing, {})
    np.testing.assert_allclose(mean.step, np.full(3, server_rate / 0.1 / 3))


def test_raw_constraints_of_absent_clients_use_the_learning_rate_of_their_own_round() -> None:
    rows = conflicting(k=2, n=6)
    rule = FedPCD(tau=0.1, normalization="none")
    _, state = rule.aggregate(updates(rows[:1] * 0.5, server_round=1, rate=0.05, first=7), {})
    halved, _ = rule.aggregate(updates(rows[1:], server_round=2, rate=0.1), state)
    _, state = rule.aggregate(updates(rows[:1], server_round=1, rate=0.1, first=7), {})
    same, _ = rule.aggregate(updates(rows[1:], server_round=2, rate=0.1), state)
    np.testing.assert_allclose(halved.step, same.step, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tau", -0.1), ("tau", 1.5), ("tau", float("nan")), ("tau", "high"), ("tau", True),
        ("history_window", -1), ("history_window", 2.5), ("history_window", True),
        ("normalization", "l1"), ("ema_beta", 1.0), ("primary", "yes"), ("on_infeasible", "ignore"),
        ("solver", "mosek-not-installed"), ("server_learning_rate", -1.0), ("server_learning_rate", float("inf")),
    ],
)  # fmt: skip
def test_a_hyper_parameter_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        FedPCD(**{name: value})


def test_no_primary_with_tau_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="tau > 0"):
        FedPCD(primary=False, tau=0.0)


@pytest.mark.parametrize(
    ("parts", "pattern"),
    [
        ({"client_ids": ()}, "at least one update"),
        ({"client_ids": ("1", "0")}, "distinct and sorted"),
        ({"client_ids": ("0", "0")}, "distinct and sorted"),
        ({"rows": (np.zeros(3), np.zeros(4))}, "vectors of one length"),
        ({"num_examples": np.array([1.0, 0.0])}, "must be > 0"),
        ({"num_examples": np.array([1.0])}, "disagree"),
        ({"local_learning_rate": 0.0}, "local_learning_rate must be > 0"),
    ],
    ids=str,
)
def test_updates_that_make_no_sense_are_refused(parts: dict, pattern: str) -> None:
    good = {"round": 1, "client_ids": ("0", "1"), "rows": (np.zeros(3), np.zeros(3)), "num_examples": np.ones(2)}
    Updates(**good)
    with pytest.raises(ValueError, match=pattern):
        Updates(**{**good, **parts})


def test_convergence_bound_of_the_theorem_holds_on_quadratics() -> None:
    """Theorem 4.1 with K = 1 (r = 0): full participation, exact gradients, H = 0."""
    generator = np.random.default_rng(3)
    # Clients share a minimiser, so that every client can progress until all are stationary.
    factors = [generator.standard_normal((8, 8)) for _ in range(4)]
    hessians = [f @ f.T / 8 + 0.1 * np.eye(8) for f in factors]
    smooth, theta, rule = (
        max(np.linalg.eigvalsh(h)[-1] for h in hessians),
        generator.standard_normal(8),
        FedPCD(tau=0.05),
    )

    def value(point: np.ndarray) -> float:
        return float(np.mean([point @ h @ point / 2 for h in hessians]))

    start, squares, gammas = value(theta), [], []
    rate = 0.02 / smooth
    for server_round in range(1, 200):
        gradients = np.stack([h @ theta for h in hessians])
        aggregate, _ = rule.aggregate(updates(gradients * rate, server_round=server_round, rate=rate), {})
        squares.append(np.linalg.norm(gradients.mean(0)) ** 2)
        gammas.append(cosines_with(aggregate.step, gradients).min())
        theta = theta - aggregate.step
    gamma = min(gammas)
    assert 0 < rate <= gamma / smooth
    assert np.mean(squares) <= 2 * start / (rate * gamma * gamma * len(squares))


def test_synthetic_demonstration_of_the_history_window() -> None:
    """The paper's Figure 3: 30 clients, 10%, H = 10, tau = .1; without history never more than three constraints."""
    generator = np.random.default_rng(0)
    majority, minority = np.array([1.0, 0.2]), np.array([-0.5, 1.0])
    clients = [(minority if c < 5 else majority) + 0.1 * generator.standard_normal(2) for c in range(30)]
    counts: dict[int, list[int]] = {0: [], 10: []}
    for window, found in counts.items():
        state: dict = {}
        draws = np.random.default_rng(1)
        for server_round in range(1, 31):
            chosen = sorted(draws.choice(30, 3, replace=False).tolist())
            batch = Updates(server_round, tuple(map(str, chosen)), tuple(clients[c] for c in chosen), np.ones(3))
            aggregate, state = FedPCD(tau=0.1, history_window=window).aggregate(batch, state)
            found.append(aggregate.diagnostics["constraints-current"] + aggregate.diagnostics["constraints-cached"])
            if server_round >= 16 and window == 10:
                served = [c for c in range(30) if str(c) in {*batch.client_ids, *state["history-clients"]}]
                assert min(cosines_with(aggregate.step, np.stack([clients[c] for c in served]))) > 0
    assert max(counts[0]) == 3
    assert counts[10][0] == 3
    assert min(counts[10][15:]) > 15
