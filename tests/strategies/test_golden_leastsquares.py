"""AdaFed, DQN-Fed, ConFIG, CRAFT and PCD against published and independently computed numbers."""
# ruff: noqa: E501  (rows of numbers)

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from strategies.rules.adafed import AdaFed
from strategies.rules.config import ConFIG
from strategies.rules.craft import CRAFT
from strategies.rules.dqnfed import DQNFed
from strategies.rules.pcd import PCD
from strategies.rules.updates import LOSS_BEFORE, Updates
from tests.support import updates

PLANE = [[1.0, 0.0], [-0.5, 1.0]]
R4 = [[1.0, 2.0, 0.0, -1.0], [0.5, -1.0, 2.0, 0.0], [-2.0, 1.0, 1.0, 0.5]]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def with_losses(rows: Any, losses: Any, rate: float = 1.0) -> Updates:
    return replace(updates(rows, rate=rate), metrics={LOSS_BEFORE: np.array(losses, dtype=float)})


# Float64 outputs of an independent reference that walks through the paper's Gram-Schmidt: rows, losses, gamma, d.
ADAFED = {
    "AdaFed-1": (PLANE, [0.5, 2.0], 1.0, [0.09411764705882353, 0.4235294117647058]),
    "AdaFed-2": (R4, [0.3, 1.2, 2.0], 1.0, [-0.37160638585731054, 0.34134070933926636, 0.8456350280107836, 0.020043494382810736]),
    "AdaFed-4": (R4, [0.3, 1.2, 2.0], 0.0, [0.026039058587881803, 0.5998998497746622, 1.0205307961942913, -0.22834251377065595]),
    "vanishing denominator": ([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]], [1.0, 1.0], 1.0, [1.0, 0.0, 0.0]),
    "orthogonal": ([[2.0, 0.0], [0.0, 2.0]], [4.0, 4.0], 1.0, [0.25, 0.25]),
    "zero update": ([[1.0, 0.0], [0.0, 0.0], [-0.5, 1.0]], [0.5, 3.0, 2.0], 1.0, [0.09411764705882353, 0.4235294117647058]),
    "zero loss": ([[2.0, 0.0], [0.0, 2.0]], [0.0, 4.0], 1.0, [0.0, 0.5]),
    "no losses": (PLANE, [0.0, 0.0], 1.0, [0.0, 0.0]),
    "no losses, exponent 0": ([[2.0, 0.0], [0.0, 2.0]], [0.0, 0.0], 0.0, [1.0, 1.0]),
    "opposed": ([[1.0, 0.0], [-2.0, 0.0]], [1.0, 2.0], 1.0, [0.0, 0.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAFED)
def test_adafed_equals_the_reference(name: str) -> None:
    rows, losses, gamma, direction = ADAFED[name]
    aggregate, _ = AdaFed(loss_exponent=gamma).aggregate(with_losses(rows, losses), {})
    close(aggregate.step, direction)
    weights = [aggregate.diagnostics["weights"][str(i)] for i in range(len(rows))]
    close(np.array(weights) @ np.array(rows), direction)
    assert aggregate.diagnostics["status"] == ("solved" if any(direction) else "stationary")


def test_adafed_gives_every_client_a_rate_proportional_to_its_loss() -> None:
    losses = np.array([0.3, 1.2, 2.0])
    aggregate, _ = AdaFed(loss_exponent=2.0).aggregate(with_losses(R4, losses), {})
    close(np.array(R4) @ aggregate.step, losses**2 * (aggregate.step @ aggregate.step))


def test_adafed_variants_change_lengths_and_rates() -> None:
    batch = with_losses(np.array(R4) * 0.1, [0.3, 1.2, 2.0], rate=0.1)
    plain, _ = AdaFed(server_learning_rate=0.5).aggregate(batch, {})
    close(plain.step, 0.5 * np.array(ADAFED["AdaFed-2"][3]))
    rescaled, _ = AdaFed(rescale="mean-norm", server_learning_rate=0.5).aggregate(batch, {})
    assert np.linalg.norm(rescaled.step) == pytest.approx(0.5 * np.linalg.norm(np.mean(R4, axis=0)), rel=1e-12)
    close(rescaled.step / np.linalg.norm(rescaled.step), plain.step / np.linalg.norm(plain.step))
    units = np.array(R4) / np.linalg.norm(R4, axis=1, keepdims=True)
    normalized, _ = AdaFed(normalize_rows=True).aggregate(batch, {})
    direct, _ = AdaFed().aggregate(with_losses(units, [0.3, 1.2, 2.0]), {})
    close(normalized.step, 0.1 * direct.step)


@pytest.mark.parametrize("losses", [[1e-300, 1e-300], [1e300, 1e-300], [1e300, 1e300]])
def test_adafed_stays_finite_with_extreme_losses(losses: list[float]) -> None:
    for exponent in (0.5, 5.0):
        aggregate, _ = AdaFed(loss_exponent=exponent).aggregate(with_losses(PLANE, losses), {})
        assert np.isfinite(aggregate.step).all()


# Rows are the gradients after local training; Newton directions; d of the convex form; d of the exact form.
DQNFED = {
    "DQN-Fed-1": (PLANE, [[0.5, 0.0], [-0.25, 0.25]], [0.7804878048780488, 0.975609756097561], [0.5, 0.625]),
    "DQN-Fed-2": (R4, R4, [-0.003403188250044792, 0.11248432742253268, 0.17087587318645892, -0.03850976177682249], [-0.0785123966942135, 2.5950413223140503, 3.94214876033058, -0.8884297520661169]),
    "DQN-Fed-3": (R4, [[1.0, 2.0, 0.0, -1.0], [0.25, -0.5, 1.0, 0.0], [-0.5, 0.25, 0.25, 0.125]], [0.09480742242320286, 0.19321863575722925, 0.20098064694977216, -0.10423272172843355], [0.9715909090909107, 1.9801136363636371, 2.059659090909092, -1.068181818181819]),
}  # fmt: skip


@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("name", DQNFED)
def test_dqnfed_equals_the_reference(name: str, rate: float) -> None:
    gradients, newton, convex, exact = DQNFED[name]
    batch = replace(updates(np.array(gradients) * rate, rate=rate), newton_directions=tuple(np.array(newton)))
    for form, direction in (("convex", convex), ("exact", exact)):
        aggregate, _ = DQNFed(rate_form=form).aggregate(batch, {})
        close(aggregate.step, rate * np.array(direction))
        assert aggregate.diagnostics["status"] == "solved"
        assert aggregate.diagnostics["clamped-clients"] == []


def test_dqnfed_counts_a_rate_that_is_no_descent_as_zero() -> None:
    newton = (np.array([1.0, 0.0, 0.0]), np.array([0.0, -1.0, 0.0]), np.array([0.0, 0.0, np.nan]))
    batch = replace(updates(np.eye(3)), newton_directions=newton)
    aggregate, _ = DQNFed(rate_form="exact").aggregate(batch, {})
    assert aggregate.diagnostics["clamped-clients"] == ["1", "2"]
    close(aggregate.step, [1.0, 0.0, 0.0])
    nobody = replace(batch, newton_directions=tuple(np.zeros((3, 3))))
    aggregate, _ = DQNFed().aggregate(nobody, {})
    assert aggregate.diagnostics["status"] == "stationary"
    assert not aggregate.step.any()


def test_dqnfed_with_orthogonal_gradients_and_no_curvature_takes_their_sum() -> None:
    batch = replace(updates(np.eye(3)), newton_directions=tuple(np.eye(3)))
    aggregate, _ = DQNFed(rate_form="exact").aggregate(batch, {})
    close(aggregate.step, [1.0, 1.0, 1.0])
    assert DQNFed(newton_memory=3).client_config() == {"newton-memory": 3}


CONFIG = {
    "ConFIG-1": (PLANE, [0.5854101966249687, 0.947213595499958]),
    "ConFIG-2": (R4, [0.009689885006690891, 1.886613876205011, 3.028450014799084, -0.6804852499292112]),
    "zero update": ([[1.0, 0.0], [0.0, 0.0], [-0.5, 1.0]], [0.5854101966249687, 0.947213595499958]),
    "single client": ([[3.0, 4.0]], [3.0, 4.0]),
    "orthogonal": ([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0]),
    "opposed": ([[1.0, 0.0], [-2.0, 0.0]], [0.0, 0.0]),
    "nothing": ([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0]),
}


@pytest.mark.parametrize("name", CONFIG)
def test_config_equals_the_reference(name: str) -> None:
    rows, direction = CONFIG[name]
    aggregate, _ = ConFIG(length_scale="sum").aggregate(updates(rows), {})
    close(aggregate.step, direction)
    weights = [aggregate.diagnostics["weights"][str(i)] for i in range(len(rows))]
    close(np.array(weights) @ np.array(rows), direction)


@pytest.mark.parametrize(
    ("model", "mean"),
    [
        ("min", 1.0),
        ("max", 4.0),
        ("mean", 7 / 3),
        ("harmonic", 12 / 7),
        ("geometric", 2.0),
        ("projection", 7 / 3),
    ],
)
def test_config_length_models_replace_the_lengths(model: str, mean: float) -> None:
    # Cosines with the common direction are all 1/sqrt(3), so its length is the sum of the lengths over sqrt(3).
    aggregate, _ = ConFIG(length_model=model, length_scale="sum").aggregate(updates(np.diag([1.0, 2.0, 4.0])), {})
    close(aggregate.step, np.full(3, mean))


CRAFT_CASES = {
    "CRAFT-1": ([[0.1, 0.0], [-0.05, 0.1]], [0.5, 0.5], None, [0.5000000000000001, 0.8090169943749472]),
    "CRAFT-2": (np.array(R4) * 0.1, [0.2, 0.3, 0.5], [1.0, 1.0, 0.0, 0.0], [-0.02924525934529376, 0.440030637320946, 0.5710198106184851, 0.36091806673996407]),
    "CRAFT-4": ([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], [0.2, 0.5, 0.3], None, [0.35, 0.3]),
    "CRAFT-6": ([[3.0, 4.0], [0.0, 0.0]], [0.5, 0.5], [0.0, 1.0], [3.0, 4.0]),
    "opposed, equal shares": ([[1.0, 0.0], [-2.0, 0.0]], [0.5, 0.5], None, [0.0, 0.0]),
    "nobody moved": ([[0.0, 0.0], [0.0, 0.0]], [0.5, 0.5], [0.0, 1.0], [0.0, 0.0]),
}  # fmt: skip


def craft_direction(rule: CRAFT, batch: Updates, reference: Any = None) -> np.ndarray:
    state = {} if reference is None else {"reference": np.array(reference)}
    aggregate, after = rule.aggregate(batch, state)
    close(aggregate.step, rule.craft_step * after["reference"])
    return np.asarray(after["reference"])


@pytest.mark.parametrize("length", [1.0, 1e-3, 40.0])
@pytest.mark.parametrize("name", CRAFT_CASES)
def test_craft_equals_the_reference(name: str, length: float) -> None:
    rows, shares, reference, direction = CRAFT_CASES[name]
    scaled = None if reference is None else length * np.array(reference)
    close(craft_direction(CRAFT(craft_step=0.3), updates(rows, shares), scaled), direction)


def test_craft_treats_layers_apart() -> None:
    generator = np.random.default_rng(3)
    rows, shares, reference = generator.standard_normal((3, 10)), [1.0, 2.0, 5.0], generator.standard_normal(10)
    layers = (slice(0, 4), slice(4, 10))
    whole = replace(updates(rows, shares), layers=layers)
    found = craft_direction(CRAFT(), whole, reference)
    for layer in layers:
        close(found[layer], craft_direction(CRAFT(), updates(rows[:, layer], shares), reference[layer]))
    close(
        craft_direction(CRAFT(layerwise=False), whole, reference),
        craft_direction(CRAFT(), updates(rows, shares), reference),
    )


def test_craft_aligns_with_every_client_by_its_share_and_leaves_the_rest_of_the_last_direction() -> None:
    generator = np.random.default_rng(4)
    rows, shares, reference = (
        generator.standard_normal((4, 30)),
        np.array([0.1, 0.2, 0.3, 0.4]),
        generator.standard_normal(30),
    )
    units, last = rows / np.linalg.norm(rows, axis=1, keepdims=True), reference / np.linalg.norm(reference)
    found = craft_direction(CRAFT(), updates(rows, shares), reference)
    close(units @ found, shares)
    change = found - last
    close(change, np.linalg.pinv(units) @ (units @ change))
    lengths = 10.0 ** generator.uniform(-6, 6, (4, 1))
    close(craft_direction(CRAFT(), updates(rows * lengths, shares), reference), found)


def test_crafts_cutoff_merges_near_collinear_clients() -> None:
    rows = [[1.0, 0.0], [1.0, 1e-3]]
    strict = craft_direction(CRAFT(alignment_cutoff=1e-6), updates(rows, [0.2, 0.8]))
    merged = craft_direction(CRAFT(alignment_cutoff=1e-2), updates(rows, [0.2, 0.8]))
    assert np.linalg.norm(strict) > 100
    assert np.linalg.norm(merged) < 1


@pytest.mark.parametrize(
    ("degrees", "tau", "published"),
    [
        (150, 0.0, (0.25, 0.433)),
        (150, 0.3, (-0.0098, 0.583)),
        (150, 0.7, (-0.3562, 0.783)),
        (60, 0.0, (1.0, 0.0)),
        (60, 0.3, (1.0, 0.0)),
        (60, 0.7, (1.1, 0.1732)),
    ],
)
def test_pcd_has_the_published_direction_at_the_primarys_length(
    degrees: int, tau: float, published: tuple[float, float]
) -> None:
    angle = np.radians(degrees)
    rows = np.array([[1.0, 0.0], [np.cos(angle), np.sin(angle)]])
    aggregate, _ = PCD(tau=tau, priority_client="0").aggregate(updates(2.0 * rows), {})
    mu = max(0.0, tau - rows[1, 0])
    direction = rows[0] + mu * rows[1]
    np.testing.assert_allclose(direction, published, atol=6e-4)
    close(aggregate.step, 2.0 * direction / np.linalg.norm(direction))
    close(aggregate.diagnostics["multipliers"].get("1", 0.0), mu)


def test_pcd_with_two_active_secondaries_equals_the_closed_form() -> None:
    rows, tau = np.array([[1.0, 0.0, 0.0], [-0.5, 1.0, 0.2], [-0.8, 0.1, 0.6]]), 0.3
    first, second, third = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    demands = np.array([tau - second @ first, tau - third @ first])
    mu = np.linalg.solve([[1.0, second @ third], [second @ third, 1.0]], demands)
    assert (mu > 0).all()
    direction = first + mu[0] * second + mu[1] * third
    aggregate, _ = PCD(tau=tau, priority_client="0").aggregate(updates(rows), {})
    close(aggregate.step, direction / np.linalg.norm(direction))
    close([aggregate.diagnostics["multipliers"][c] for c in "12"], mu)


def test_pcd_divides_by_the_moving_average_of_the_squared_norm() -> None:
    beta, tau, rule = 0.5, 0.3, PCD(tau=0.3, norm_decay=0.5, priority_client="0")
    first = np.array([[1.0, 0.0], [-0.5, 1.0]])
    second = np.array([[3.0, 0.0], [-1.0, 0.5]])
    _, state = rule.aggregate(updates(first), {})
    aggregate, _ = rule.aggregate(updates(second, server_round=2), state)
    squares = (beta * (1 - beta) * (first**2).sum(1) + (1 - beta) * (second**2).sum(1)) / (1 - beta**2)
    primary, secondary = second / np.sqrt(squares)[:, None]
    mu = tau - secondary @ primary / (secondary @ secondary)
    direction = primary + mu * secondary
    close(aggregate.step, 3.0 * direction / np.linalg.norm(direction))
    close(aggregate.diagnostics["multipliers"]["1"], mu)


def test_pcd_follows_the_primary_where_no_direction_serves_all() -> None:
    rows = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, -2.0, 0.0]]
    aggregate, _ = PCD(tau=0.2).aggregate(updates(rows), {})
    assert aggregate.diagnostics["status"] == "infeasible"
    close(aggregate.step, np.mean(rows, axis=0))


def test_pcd_with_a_zero_primary_stays_and_with_an_absent_one_follows_the_mean() -> None:
    rows = [[0.0, 0.0], [1.0, 2.0]]
    aggregate, _ = PCD(priority_client="0").aggregate(updates(rows), {})
    assert aggregate.diagnostics["status"] == "stationary"
    assert not aggregate.step.any()
    alone, _ = PCD(priority_client="0").aggregate(updates(rows[1:]), {})
    assert alone.diagnostics["primary"] == "0"
    close(alone.step, rows[1])
    absent, _ = PCD(priority_client="9", server_learning_rate=0.5).aggregate(updates(rows), {})
    assert absent.diagnostics["primary"] == "mean"
    close(absent.step, [0.25, 0.5])


@pytest.mark.parametrize(
    ("rule", "field", "value"),
    [
        (AdaFed, "loss_exponent", -1.0),
        (AdaFed, "normalize_rows", 1),
        (AdaFed, "rescale", "mean"),
        (AdaFed, "server_learning_rate", -0.1),
        (DQNFed, "newton_memory", 0),
        (DQNFed, "rate_form", "other"),
        (ConFIG, "length_model", "sum"),
        (CRAFT, "craft_step", 0.0),
        (CRAFT, "layerwise", "yes"),
        (CRAFT, "alignment_cutoff", 1.5),
        (PCD, "tau", 1.5),
        (PCD, "norm_decay", 1.0),
        (PCD, "priority_client", 3),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(rule: type, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*, got"):
        rule(**{field: value})
