"""Minimum-norm and projection rules against numbers of independent references, and what each method promises."""
# ruff: noqa: E501  (rows of numbers)

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from strategies.rules.fedfv import FedFV
from strategies.rules.fedlf import FedLF, fairness_gradient
from strategies.rules.fedmdfg import FedMDFG
from strategies.rules.fedmgda_plus import FedMGDAPlus
from strategies.rules.mgda import MGDA
from strategies.rules.minnorm import bounded_minimum_norm, minimum_norm
from strategies.rules.updates import LOSS_BEFORE, Updates
from tests.support import updates

Table = dict[str, dict[str, Any]]
A: dict[str, Any] = {
    "start": [0.5, -1, 0.25, 2],
    "rows": [[0.3, -0.2, 0.1, 0.4], [-0.25, 0.35, 0.05, 0.1], [0.1, 0.15, -0.45, -0.2]],
    "examples": [10, 30, 60],
    "losses": [0.9, 2.3, 1.4],
}
C: dict[str, Any] = {"start": [0, 0], "rows": [[1, 0], [-0.6, 0.8]], "examples": [1, 3], "losses": [1, 2]}
CASES = {"A": A, "C": C}
MGDA_GOLDEN: Table = {
    "MGDA-1": {
        "rows": [[1.0, 0.0], [-0.5, 1.0]],
        "step": [0.3076923076923078, 0.46153846153846145],
        "weights": [0.5384615384615385, 0.46153846153846145],
    },
    "MGDA-2": {
        "rows": [[1.0, 2.0, 0.0, -1.0], [0.5, -1.0, 2.0, 0.0], [-2.0, 1.0, 1.0, 0.5]],
        "step": [0.026039058587880692, 0.5998998497746624, 1.0205307961942913, -0.22834251377065562],
        "weights": [0.359038557836755, 0.3795693540310463, 0.2613920881321987],
    },
    "MGDA-4 (Pareto stationary)": {
        "rows": [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]],
        "step": [0.0, 0.0],
        "weights": [0.5, 0.5, 0.0],
    },
}
MDFG_GOLDEN: Table = {
    "FedMDFG-1 (fair, inactive)": {
        "rows": [[1.0, 0.0], [-0.5, 1.0]],
        "losses": [1.0, 1.1],
        "step": [0.2927050983124843, 0.47360679774997894],
        "growth": 0.9999999999999998,
        "active": False,
    },
    "FedMDFG-2 (unfair, active)": {
        "rows": [[1.0, 0.0], [-0.5, 1.0]],
        "losses": [0.5, 2.0],
        "step": [0.05779127633791802, 0.5537507036856432],
        "growth": 5.0648664791719735,
        "active": True,
    },
    "FedMDFG-3 (3 clients, R4)": {
        "rows": [[1.0, 2.0, 0.0, -1.0], [0.5, -1.0, 2.0, 0.0], [-2.0, 1.0, 1.0, 0.5]],
        "losses": [0.3, 1.2, 2.0],
        "step": [-0.770385584781968, 0.6351916858915377, 0.6940892845484967, 0.10680936508460066],
        "growth": 3.8462303023721613,
        "active": True,
    },
}
LF_GOLDEN: Table = {
    "FedLF-1 (2 clients, 2 layers)": {
        "rows": [[1.0, 0.0, 2.0, -1.0], [-0.5, 1.0, 0.5, 1.0]],
        "losses": [0.5, 2.0],
        "blocks": [(0, 2), (2, 4)],
        "absent": [],
        "step": [0.06183026112391452, 0.6210129697015252, 0.6741859945019344, 1.0153783310122777],
        "groups": 2,
    },
    "FedLF-4 (one layer = model-level)": {
        "rows": [[1.0, 2.0, 0.0, -1.0], [0.5, -1.0, 2.0, 0.0], [-2.0, 1.0, 1.0, 0.5]],
        "losses": [0.3, 1.2, 2.0],
        "blocks": [(0, 4)],
        "absent": [],
        "step": [-0.7693276264889876, 0.6383897406034517, 0.699661160994504, 0.1052036216529672],
        "groups": 1,
    },
    "FedLF-5 (stalled 1-parameter layer merged, paper)": {
        "rows": [[1.0, 2.0, 1.0], [-1.0, 1.0, 2.0]],
        "losses": [0.5, 2.0],
        "blocks": [(0, 1), (1, 3)],
        "absent": [],
        "step": [-1.3842056014801172, 0.209551866870164, 1.5937574683502806],
        "groups": 1,
    },
    "FedLF-3p (as FedLF-3 with the paper merge)": {
        "rows": [[1.0, 2.0, 0.0, -1.0], [0.5, -1.0, 2.0, 0.0], [-2.0, 1.0, 1.0, 0.5]],
        "losses": [0.3, 1.2, 2.0],
        "blocks": [(0, 2), (2, 4)],
        "absent": [[-1.0, -1.0, 0.0, 2.0]],
        "step": [-0.7489822024052157, 0.6515337722218477, 0.700971339400061, 0.15221230395170476],
        "groups": 1,
    },
}
PLUS_GOLDEN: dict[tuple[str, float, str], list[float]] = {
    ("A", 0.0, "examples"): [0.4995754186789159, -1.3713768880916606, 0.7128597425813336, 2.0882960730293587],
    ("A", 0.0, "uniform"): [0.44137629170290915, -1.2361506452505946, 0.43767778479779174, 1.808690237390937],
    ("A", 0.1, "examples"): [0.4638724147133112, -1.3062581732472818, 0.6087906909657248, 1.9771278951255127],
    ("A", 0.1, "uniform"): [0.4001166577720495, -1.1872972453911943, 0.41323602338142096, 1.769554208983522],
    ("A", 0.5, "examples"): [0.4001166577720495, -1.1872972453911943, 0.41323602338142096, 1.769554208983522],
    ("A", 0.5, "uniform"): [0.4001166577720495, -1.1872972453911943, 0.41323602338142096, 1.769554208983522],
    ("A", 1.0, "examples"): [0.4001166577720495, -1.1872972453911943, 0.41323602338142096, 1.769554208983522],
    ("A", 1.0, "uniform"): [0.4001166577720495, -1.1872972453911943, 0.41323602338142096, 1.769554208983522],
    ("C", 0.0, "examples"): [0.19999999999999998, -0.6000000000000001],
    ("C", 0.0, "uniform"): [-0.2, -0.4],
    ("C", 0.1, "examples"): [0.04000000000000002, -0.52],
    ("C", 0.1, "uniform"): [-0.19999999999999984, -0.40000000000000013],
    ("C", 0.5, "examples"): [-0.19999999999999984, -0.40000000000000013],
    ("C", 0.5, "uniform"): [-0.19999999999999984, -0.40000000000000013],
    ("C", 1.0, "examples"): [-0.19999999999999984, -0.40000000000000013],
    ("C", 1.0, "uniform"): [-0.19999999999999984, -0.40000000000000013],
}
FV_GOLDEN: dict[tuple[str, float], list[float]] = {
    ("A", 0.0): [0.4549978282571877, -1.1035703587375887, 0.34243566775832157, 1.8941527862649623],
    ("A", 0.1): [0.4760642625613217, -1.121156850923025, 0.33887788017590825, 1.9033107019204325],
    ("A", 0.5): [0.48611406237614885, -1.1285012890520476, 0.3600662811273551, 1.9393368875916952],
    ("A", 1.0): [0.45, -1.1, 0.35, 1.9],
    ("C", 0.0): [-0.2, -0.4],
    ("C", 0.1): [-0.013968605915391577, -0.4469953892925301],
    ("C", 0.5): [-0.013968605915391577, -0.4469953892925301],
    ("C", 1.0): [-0.2, -0.4],
}


def with_losses(given: Updates, losses: Any) -> Updates:
    """The updates with losses before training."""
    return replace(given, metrics={LOSS_BEFORE: np.asarray(losses, dtype=np.float64)})


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Fail unless two arrays agree."""
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def awkward_gram(generator: np.random.Generator, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with duplicates and collinear ones, of lengths over many orders; their cosines and norms."""
    rows = generator.standard_normal((m, int(generator.integers(m, 3 * m + 2))))
    rows += 0.5 * rows[0]
    if m > 2:
        rows[1], rows[2] = rows[0], 3.0 * rows[0]
    rows *= 10.0 ** generator.uniform(-4, 4, (m, 1))
    norms = np.linalg.norm(rows, axis=1)
    unit = rows / norms[:, None]
    return np.clip(unit @ unit.T, -1, 1), norms


@pytest.mark.parametrize("name", MGDA_GOLDEN)
def test_mgda_golden(name: str) -> None:
    case = MGDA_GOLDEN[name]
    aggregate, _ = MGDA().aggregate(updates(case["rows"]), {})
    close(aggregate.step, case["step"])
    if aggregate.diagnostics["status"] == "solved":
        close(list(aggregate.diagnostics["weights"].values()), case["weights"])


@pytest.mark.parametrize(("case", "radius", "center"), PLUS_GOLDEN)
def test_fedmgda_plus_golden(case: str, radius: float, center: str) -> None:
    data = CASES[case]
    aggregate, _ = FedMGDAPlus(radius, center).aggregate(updates(data["rows"], data["examples"]), {})
    assert aggregate.diagnostics["status"] == "solved"
    close(data["start"] - aggregate.step, PLUS_GOLDEN[case, radius, center])


@pytest.mark.parametrize(("case", "share"), FV_GOLDEN)
def test_fedfv_golden(case: str, share: float) -> None:
    data = CASES[case]
    aggregate, _ = FedFV(share).aggregate(with_losses(updates(data["rows"], data["examples"]), data["losses"]), {})
    close(data["start"] - aggregate.step, FV_GOLDEN[case, share])


@pytest.mark.parametrize("name", LF_GOLDEN)
def test_fedlf_golden(name: str) -> None:
    case = LF_GOLDEN[name]
    layers = tuple(slice(*block) for block in case["blocks"])
    state: dict[str, Any] = {}
    if case["absent"]:
        earlier = with_losses(replace(updates(case["absent"], first=7), layers=layers), [1.0])
        _, state = FedLF().aggregate(earlier, {})
    now = with_losses(replace(updates(case["rows"], server_round=2), layers=layers), case["losses"])
    aggregate, _ = FedLF().aggregate(now, state)
    close(aggregate.step, case["step"])
    assert aggregate.diagnostics["layers-after-merging"] == case["groups"]


@pytest.mark.parametrize("name", MDFG_GOLDEN)
def test_fedmdfg_golden(name: str) -> None:
    case = MDFG_GOLDEN[name]
    aggregate, _ = FedMDFG().aggregate(with_losses(updates(case["rows"]), case["losses"]), {})
    close(aggregate.step, case["step"])
    close(aggregate.diagnostics["direction-growth"], case["growth"])
    assert aggregate.diagnostics["fairness-active"] == case["active"]
    assert aggregate.diagnostics["status"] == "no-line-search"


def quadratic(silent: tuple[int, ...] = ()) -> tuple[Updates, list[float]]:
    """Two clients with ``1/2 |x - c_i|^2`` at x = 0, and the lengths of the steps that were tried."""
    centers, rate, lengths = np.array([[-1.0, 0.0], [0.5, -1.0]]), 0.1, []

    def trial(step: np.ndarray) -> np.ndarray:
        lengths.append(float(np.linalg.norm(step)))
        losses = 0.5 * ((-step - centers) ** 2).sum(axis=1)
        losses[list(silent)] = np.nan
        return np.asarray(losses)

    given = replace(updates(-centers * rate, rate=rate), trial_losses=trial)
    return with_losses(given, [0.5, 0.625]), lengths


def test_fedmdfg_line_search_golden() -> None:
    given, lengths = quadratic()
    aggregate, _ = FedMDFG().aggregate(given, {})
    direction = np.array([0.2927050983124843, 0.47360679774997894])
    close(aggregate.step, 1.6 * direction)
    close(lengths, np.array([3.2, 1.6]) * np.linalg.norm(direction))
    assert aggregate.diagnostics["accepted-step"] == pytest.approx(1.6)
    assert aggregate.diagnostics["trial-evaluations"] == 2
    assert given.trial_losses is not None
    close(given.trial_losses(aggregate.step), [0.42844582472000664, 0.49816718427000267])


def test_fedmdfg_survives_silent_clients() -> None:
    one, _ = FedMDFG().aggregate(quadratic(silent=(0,))[0], {})
    assert one.diagnostics["status"] == "solved"
    none, _ = FedMDFG().aggregate(quadratic(silent=(0, 1))[0], {})
    assert none.diagnostics["status"] == "line-search-failed"
    assert np.isfinite(none.step).all()


def test_fedmdfg_never_steps_beyond_eta_with_absent_clients() -> None:
    given, lengths = quadratic()
    _, state = FedMDFG().aggregate(with_losses(updates([[0.05, 0.1]], first=9, rate=0.1), [1.0]), {})
    aggregate, _ = FedMDFG().aggregate(replace(given, round=2), state)
    assert aggregate.diagnostics["constraints-cached"] == 1
    assert lengths
    assert aggregate.diagnostics["accepted-step"] <= 0.1


def test_fedmdfg_forces_fairness_where_some_but_not_all_got_worse() -> None:
    rows = [[1.0, 0.1], [0.1, 1.0]]
    _, state = FedMDFG().aggregate(with_losses(updates(rows), [1.0, 1.0]), {})
    for losses, active in (([1.1, 0.9], True), ([1.1, 1.2], False), ([0.9, 0.95], False)):
        aggregate, _ = FedMDFG().aggregate(with_losses(updates(rows, server_round=2), losses), state)
        assert aggregate.diagnostics["fairness-active"] is active


@pytest.mark.parametrize("m", [1, 2, 3, 10, 40])
def test_minimum_norm_is_certified(m: int) -> None:
    generator = np.random.default_rng(m)
    for _ in range(20):
        cosines, norms = awkward_gram(generator, m)
        found = minimum_norm(cosines, norms)
        if found.status == "stationary":
            continue
        assert found.status == "solved"
        assert (found.weights >= 0).all()
        assert found.weights.sum() == pytest.approx(1.0, abs=1e-12)
        image = cosines @ (norms * found.weights)
        square = float((norms * found.weights) @ image)
        # The least that float64 resolves is a few ulps of |v_i| |d|.
        assert (norms * image >= square * (1 - 1e-9) - 1e-14 * norms * square**0.5).all()


@pytest.mark.parametrize("m", [1, 2, 3, 10, 100])
def test_bounded_minimum_norm_is_certified_and_shrinks_with_the_radius(m: int) -> None:
    generator = np.random.default_rng(m)
    for _ in range(5):
        cosines, _ = awkward_gram(generator, m)
        center = generator.dirichlet(np.ones(m))
        squares = []
        for radius in (0.0, 0.01, 0.1, 0.5, 1.0):
            found = bounded_minimum_norm(cosines, center, radius)
            assert found.status in ("solved", "stationary")
            assert (np.abs(found.weights - center) <= radius + 1e-12).all()
            assert (found.weights >= 0).all()
            assert found.weights.sum() == pytest.approx(1.0, abs=1e-12)
            squares.append(float(found.weights @ cosines @ found.weights))
        assert (np.diff(squares) <= 1e-11).all()


def test_mgda_ignores_duplicates_and_zero_rows() -> None:
    rows = [[1.0, 2.0, 0.0, -1.0], [0.5, -1.0, 2.0, 0.0], [-2.0, 1.0, 1.0, 0.5]]
    plain = MGDA().aggregate(updates(rows), {})[0].step
    close(MGDA().aggregate(updates([*rows, rows[0], [0.0] * 4]), {})[0].step, plain)
    assert np.linalg.norm(plain) <= np.linalg.norm(np.mean(rows, axis=0))


@pytest.mark.parametrize("rule", [MGDA(), MGDA(normalize_rows=True), FedMGDAPlus(), FedFV(), FedLF(), FedMDFG()])
def test_nothing_to_do_is_no_step(rule: Any) -> None:
    given = with_losses(updates(np.zeros((3, 2))), np.zeros(3))
    aggregate, _ = rule.aggregate(given, {})
    assert not aggregate.step.any()
    assert aggregate.diagnostics["status"] == "stationary"
    opposed = with_losses(updates([[1.0, 0.0], [-1.0, 0.0]]), np.ones(2))
    assert not rule.aggregate(opposed, {})[0].step.any()


def fedfv_by_vectors(rows: np.ndarray, losses: np.ndarray, share: float) -> np.ndarray:
    """FedFV without history, on the vectors themselves."""
    k = len(rows)
    order = np.argsort(losses, kind="stable")
    keep = order[int(np.ceil((k - 1) * (1 - share))) :] if share > 0 else []
    projected = rows.copy()
    for i in order:
        for j in order:
            product = float(rows[j] @ projected[i])
            if i not in keep and j != i and product < 0:
                projected[i] -= product / (rows[j] @ rows[j]) * rows[j]
    mean = projected.mean(axis=0)
    return np.asarray(mean * np.linalg.norm(rows.mean(axis=0)) / np.linalg.norm(mean))


def test_fedfv_in_gram_space_equals_vectors() -> None:
    generator = np.random.default_rng(8)
    for _ in range(300):
        k = int(generator.integers(1, 11))
        rows = generator.standard_normal((k, int(generator.integers(2, 30))))
        losses, share = generator.uniform(0, 3, k), float(generator.choice([0.0, 0.1, 0.3, 0.5, 1.0]))
        aggregate, _ = FedFV(share).aggregate(with_losses(updates(rows), losses), {})
        close(aggregate.step, fedfv_by_vectors(rows, losses, share), 1e-8)


def test_fedfv_projects_against_absent_clients_from_round_tau_on() -> None:
    rule = FedFV(history_window=1)
    _, state = rule.aggregate(with_losses(updates([[-1.0, 1.0]], first=5), [1.0]), {})
    now = with_losses(updates([[1.0, 0.0]], server_round=2), [1.0])
    aggregate, _ = rule.aggregate(now, state)
    close(aggregate.step, [0.5**0.5, 0.5**0.5])
    longer = FedFV(history_window=2)
    _, state = longer.aggregate(with_losses(updates([[-1.0, 1.0]], first=5), [1.0]), {})
    close(longer.aggregate(now, state)[0].step, [1.0, 0.0])


def test_fedlf_has_no_conflict_in_any_layer() -> None:
    generator, layers = np.random.default_rng(3), (slice(0, 20), slice(20, 50), slice(50, 51))
    for _ in range(30):
        rows, absent = generator.standard_normal((4, 51)), generator.standard_normal((2, 51))
        _, state = FedLF().aggregate(with_losses(replace(updates(absent, first=10), layers=layers), [1, 2]), {})
        now = with_losses(replace(updates(rows, server_round=2), layers=layers), generator.uniform(0, 2, 4))
        aggregate, _ = FedLF().aggregate(now, state)
        assert aggregate.diagnostics["constraints-cached"] == 2
        assert (np.vstack([rows, absent])[:, :20] @ aggregate.step[:20] >= -1e-9).all()
        assert np.linalg.norm(aggregate.step) == pytest.approx(np.linalg.norm(rows.mean(axis=0)))


def test_fairness_gradient_is_that_of_the_cosine() -> None:
    losses = np.array([0.3, 1.2, 2.0])
    numeric = np.zeros(3)
    for i, shift in enumerate(1e-6 * np.eye(3)):
        high, low = losses + shift, losses - shift
        numeric[i] = -(high.sum() / np.linalg.norm(high) - low.sum() / np.linalg.norm(low))
    found = fairness_gradient(losses)
    assert found is not None
    close(found, numeric / np.linalg.norm(numeric), 1e-7)
    assert fairness_gradient(np.full(3, 0.7)) is None
    assert fairness_gradient(np.zeros(3)) is None


@pytest.mark.parametrize("scale", [1e-12, 1e-150, 1e150])
@pytest.mark.parametrize("rule", [MGDA(), FedFV(), FedLF(), FedMDFG()])
def test_scale_does_not_matter(rule: Any, scale: float) -> None:
    plain = rule.aggregate(with_losses(updates(A["rows"]), A["losses"]), {})[0].step
    scaled = rule.aggregate(with_losses(updates(np.array(A["rows"]) * scale), A["losses"]), {})[0].step
    close(scaled / scale, plain)


def test_fedmdfg_lets_no_client_without_an_update_veto_the_search() -> None:
    # A converged client's loss may rise by rounding; it asked for no decrease.
    centers = np.array([[-1.0, 0.0], [0.5, -1.0], [0.0, 0.0]])

    def losses(step: np.ndarray) -> np.ndarray:
        found = 0.5 * ((-step - centers) ** 2).sum(axis=1)
        found[2] = 0.5 + 1e-12
        return found

    batch = updates(np.vstack([0.1 * -centers[:2], np.zeros(2)]), rate=0.1)
    batch = replace(batch, metrics={LOSS_BEFORE: np.array([0.5, 0.625, 0.5])}, trial_losses=losses)
    aggregate, _ = FedMDFG().aggregate(batch, {})
    assert (aggregate.diagnostics["status"], aggregate.diagnostics["trial-evaluations"]) == ("solved", 2)


def test_fedmdfg_uses_absent_clients_of_the_last_round_only() -> None:
    def round_of(number: int, client: int) -> Updates:
        batch = updates([[1.0, 2.0]], server_round=number, first=client)
        return replace(batch, metrics={LOSS_BEFORE: np.ones(1)})

    _, state = FedMDFG().aggregate(round_of(1, 0), {})
    assert FedMDFG().aggregate(round_of(2, 1), state)[0].diagnostics["constraints-cached"] == 1
    assert FedMDFG().aggregate(round_of(9, 1), state)[0].diagnostics["constraints-cached"] == 0


def test_fedmdfg_survives_lengths_that_differ_beyond_the_range_of_squares() -> None:
    first = replace(updates([[1.0, 2.0]]), metrics={LOSS_BEFORE: np.ones(1)})
    second = replace(updates([[1e-170, 1e-170]], server_round=2, first=1), metrics={LOSS_BEFORE: np.ones(1)})
    aggregate, _ = FedMDFG().aggregate(second, FedMDFG().aggregate(first, {})[1])
    assert np.isfinite(aggregate.step).all()


def test_fedlf_merges_a_layer_in_which_no_participant_moved() -> None:
    layers = (slice(0, 2), slice(2, 4))
    first = replace(updates([[0.0, 0.0, 1.0, 0.0]], first=9), metrics={LOSS_BEFORE: np.ones(1)}, layers=layers)
    batch = replace(updates([[1.0, 1.0, 0.0, 0.0]], server_round=2), metrics={LOSS_BEFORE: np.ones(1)}, layers=layers)
    aggregate, _ = FedLF().aggregate(batch, FedLF().aggregate(first, {})[1])
    assert aggregate.diagnostics["layers-after-merging"] == 1
    assert aggregate.step[2] > 0.0


# fmt: off
# Cosines of six rows, then the centre of the weights.
CYCLING = [
    [1.0, 0.7738448002914422, 0.6477538938006755, 0.7954602388484359, 0.7280526267617112, 0.7171565871193747, 0.17708333333333334],
    [0.7738448002914422, 1.0, 0.7413461480371919, 0.7410325712911502, 0.8165718701086054, 0.7573771831816692, 0.16145833333333334],
    [0.6477538938006755, 0.7413461480371919, 1.0, 0.7574605868015756, 0.6739530755343712, 0.6988047849169176, 0.1796875],
    [0.7954602388484359, 0.7410325712911502, 0.7574605868015756, 1.0, 0.7805121588133274, 0.7278166362899093, 0.234375],
    [0.7280526267617112, 0.8165718701086054, 0.6739530755343712, 0.7805121588133274, 1.0, 0.7439853225705165, 0.06510416666666667],
    [0.7171565871193747, 0.7573771831816692, 0.6988047849169176, 0.7278166362899093, 0.7439853225705165, 1.0, 0.18229166666666666],
]
# fmt: on


def test_box_program_that_cycled_between_two_active_sets_is_solved() -> None:
    # Found by a reviewer: the solver's error put a weight on the wrong side of its bound.
    data = np.array(CYCLING)
    found = bounded_minimum_norm(data[:, :-1], data[:, -1], 0.1)
    assert found.status == "solved"
