"""Every registered method keeps what it promises, on random rounds of every kind."""

from __future__ import annotations

import copy
import io
import json
import re
import warnings
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from strategies.describe import describe
from strategies.rules import RULES, Rule
from strategies.rules.updates import NEEDS
from tests.strategies.properties import CHECKS, FAMILIES, Case, around, draw, mean_of, same, size, step_of

CASES = 300
"""Random rounds per method and guarantee, over all families together."""
PER_FAMILY = -(-CASES // len(FAMILIES))

PROMISES = [(name, guarantee) for name, rule in RULES.items() for guarantee in rule.guarantees]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "guarantee"), PROMISES)
def test_a_method_keeps_its_promise(name: str, guarantee: str, family: str) -> None:
    for seed in range(PER_FAMILY):
        case = draw(family, seed)
        CHECKS[guarantee](name, RULES[name](), case, np.random.default_rng(seed))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RULES)
def test_a_step_is_finite_and_silent_at_every_scale(name: str, family: str) -> None:
    for seed in range(8):
        case, rule = draw(family, seed), RULES[name]()
        plain = rule.aggregate(case.build(rule), {})[0]
        _check_finite(plain.step, case)
        for scale in (1e-12, 1e12, 1e150):
            scaled = rule.aggregate(replace(case, scale=scale).build(rule), {})[0]
            _check_finite(scaled.step, case)
            if "scale-equivariant" in rule.guarantees and "weights" in plain.diagnostics:
                assert scaled.diagnostics["weights"] == pytest.approx(plain.diagnostics["weights"], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_nothing_but_zero_updates_is_no_step(name: str) -> None:
    rule = RULES[name]()
    case = around(np.zeros((3, 6)), np.random.default_rng(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aggregate, state = rule.aggregate(case.build(rule), {})
        again, _ = rule.aggregate(case.build(rule, server_round=2), state)
    assert not aggregate.step.any()
    assert not again.step.any()


@pytest.mark.parametrize("name", RULES)
def test_memory_survives_files_and_is_never_changed_in_place(name: str) -> None:
    rule, generator = RULES[name](), np.random.default_rng(5)
    clients = around(generator.standard_normal((6, 12)), generator)
    kept: dict[str, Any] = {}
    filed: dict[str, Any] = {}
    for server_round in range(1, 7):
        present = np.sort(generator.choice(6, size=int(generator.integers(2, 5)), replace=False))
        moved = replace(clients, rows=generator.standard_normal((6, 12)))
        batch = replace(
            moved.take(present).build(rule, server_round),
            client_ids=tuple(str(c) for c in present),
            population=tuple(str(c) for c in range(6)),
        )
        before = copy.deepcopy(kept)
        direct, following = rule.aggregate(batch, kept)
        assert _pack(kept) == _pack(before)
        restored, filed = rule.aggregate(batch, _unpack(*_pack(filed)))
        assert direct.step.tobytes() == restored.step.tobytes()
        assert (direct.output_offset is None) == (restored.output_offset is None)
        if direct.output_offset is not None and restored.output_offset is not None:
            assert direct.output_offset.tobytes() == restored.output_offset.tobytes()
        assert _steady(direct.diagnostics) == _steady(restored.diagnostics)
        kept = following
        assert _pack(kept) == _pack(filed)


@pytest.mark.parametrize("name", RULES)
def test_updates_are_never_changed_in_place(name: str) -> None:
    rule, case = RULES[name](), draw("correlated", 1)
    batch = case.build(rule)
    for array in (*batch.rows, *batch.newton_directions, *batch.metrics.values(), batch.num_examples):
        array.flags.writeable = False
    rule.aggregate(batch, {})


@pytest.mark.parametrize("name", RULES)
def test_diagnostics_are_json(name: str) -> None:
    rule, case = RULES[name](), draw("correlated", 2)
    json.dumps(rule.aggregate(case.build(rule), {})[0].diagnostics, allow_nan=False)


@pytest.mark.parametrize("name", RULES)
def test_the_docstring_says_what_the_class_declares(name: str) -> None:
    rule = RULES[name]
    description = describe(name, rule)
    said = {part.strip() for part in description.guarantees.rstrip(".").split(",")}
    assert said == set(rule.guarantees)
    assert set(rule.guarantees) <= set(CHECKS)
    assert {need for need in NEEDS if re.search(rf"(?<![\w-]){need}(?![\w-])", description.needs)} == set(rule.needs)
    assert rule.needs or description.needs.startswith("nothing")
    assert set(rule.needs) <= set(NEEDS)
    for field in fields(rule):
        assert re.search(rf"^{field.name}\b", description.parameters, flags=re.MULTILINE), field.name


# ---- hyper-parameters at which a method becomes another one ----

REDUCTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("qfedavg", {"q": 0.0}, "uniform mean"),
    ("term", {"tilt": 1e-12}, "mean"),
    ("term", {"tilt": 1e-12, "tilt_prior": "uniform"}, "uniform mean"),
    ("fedmgda-plus", {"weight_radius": 0.0}, "mean of unit updates"),
    ("fedmgda-plus", {"weight_radius": 0.0, "weight_center": "uniform"}, "uniform mean of unit updates"),
    ("fedfv", {"protected_share": 1.0, "history_window": 0}, "uniform mean"),
    ("propfair", {}, "mean"),
    ("ditto", {}, "mean"),
    ("afl", {"multiplier_step": 0.0}, "uniform mean"),
]


def _expected(kind: str, case: Case) -> np.ndarray:
    if kind.endswith("unit updates"):
        case = replace(case, rows=case.rows / np.linalg.norm(case.rows, axis=1, keepdims=True))
    return mean_of(case, uniform=kind.startswith("uniform"))


@pytest.mark.parametrize(("name", "values", "kind"), REDUCTIONS)
def test_a_method_reduces_to_averaging(name: str, values: dict[str, Any], kind: str) -> None:
    if name not in RULES:
        pytest.skip(f"{name} is not registered")
    rule = RULES[name](**values)
    for seed in range(50):
        case = draw("correlated", seed)
        found, expected = step_of(rule, case), _expected(kind, case)
        assert np.linalg.norm(found - expected) <= 1e-9 * np.linalg.norm(expected)


def test_adafed_with_equal_rates_is_mgda_where_mgda_weighs_everyone() -> None:
    adafed, mgda = RULES["adafed"](loss_exponent=0.0), RULES["mgda"]()  # type: ignore[call-arg]
    compared = 0
    for seed in range(200):
        case = draw("gaussian", seed)
        batch = case.build(adafed)
        equal, _ = adafed.aggregate(batch, {})
        if min(equal.diagnostics["weights"].values()) > 0.0:
            same(equal.step, step_of(mgda, case), size(case))
            compared += 1
    assert compared >= 50


def test_crafts_first_round_is_configs_direction_weighted_by_shares() -> None:
    craft, config = RULES["craft"](layerwise=False), RULES["config"]()  # type: ignore[call-arg]
    for seed in range(50):
        case = draw("gaussian", seed)
        equal = replace(case, num_examples=np.ones(len(case.rows)))
        # With equal shares the demands are ConFIG's, up to a factor.
        found, expected = step_of(craft, equal), step_of(config, equal)
        same(found / np.linalg.norm(found), expected / np.linalg.norm(expected), 1.0)
        units = case.rows / np.linalg.norm(case.rows, axis=1, keepdims=True)
        shares = case.num_examples / case.num_examples.sum()
        same(step_of(craft, case), 0.1 * np.linalg.pinv(units) @ shares, 1.0)


def test_crafts_step_ignores_the_lengths_of_two_or_more_updates() -> None:
    craft = RULES["craft"]()
    for seed in range(50):
        case = draw("gaussian", seed)
        factors = 10.0 ** np.random.default_rng(seed).uniform(-6, 6, (len(case.rows), 1))
        same(step_of(craft, replace(case, rows=case.rows * factors)), step_of(craft, case), 1.0)


def _check_finite(step: np.ndarray, case: Case) -> None:
    assert step.shape == case.rows.shape[1:]
    assert step.dtype == np.float64
    assert np.isfinite(step).all()


def _steady(diagnostics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in diagnostics.items() if not key.startswith("seconds")}


def _pack(state: dict[str, Any]) -> tuple[bytes, str]:
    """A state as a file of arrays and a JSON text."""
    arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
    rest = {key: value for key, value in state.items() if key not in arrays}
    for key, value in rest.items():
        plain = isinstance(value, (bool, int, float, str))
        assert plain or (isinstance(value, list) and all(isinstance(v, (str, int, float)) for v in value)), key
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue(), json.dumps(rest)


def _unpack(file: bytes, text: str) -> dict[str, Any]:
    with np.load(io.BytesIO(file), allow_pickle=False) as arrays:
        return {**json.loads(text), **{key: arrays[key] for key in arrays.files}}


def test_every_rule_is_a_rule() -> None:
    assert all(issubclass(rule, Rule) for rule in RULES.values())
