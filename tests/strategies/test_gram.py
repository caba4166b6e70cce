"""Norms, cosines and combinations of long rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.rules import gram


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cosines_equal_the_plain_formula_over_many_blocks(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "_BUFFER_ELEMENTS", 700)
    rows = np.random.default_rng(0).standard_normal((7, 1003)).astype(dtype)
    exact = rows.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1)
    found_norms, block = gram.cosines(tuple(rows[:3]), tuple(rows[3:]), norms[3:])
    np.testing.assert_allclose(found_norms, norms[:3], rtol=1e-14)
    np.testing.assert_allclose(block, (exact[:3] @ exact.T) / np.outer(norms[:3], norms), atol=1e-14)
    assert (np.diag(block) == 1.0).all()


@given(st.sampled_from([1e-300, 1e-150, 1e-12, 1.0, 1e12, 1e150, 1e300]), st.integers(0, 99))
def test_cosines_do_not_depend_on_the_scale_of_rows(scale: float, seed: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((4, 17))
    norms, block = gram.cosines(tuple(rows * scale), (), np.zeros(0))
    _, expected = gram.cosines(tuple(rows), (), np.zeros(0))
    np.testing.assert_allclose(block, expected, atol=1e-14)
    np.testing.assert_allclose(norms, np.linalg.norm(rows, axis=1) * scale, rtol=1e-13)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float32_rows_neither_overflow_nor_vanish(scale: float) -> None:
    rows = (np.random.default_rng(1).standard_normal((3, 50)) * scale).astype(np.float32)
    norms, block = gram.cosines(tuple(rows), (), np.zeros(0))
    exact = rows.astype(np.float64)
    np.testing.assert_allclose(norms, np.linalg.norm(exact, axis=1), rtol=1e-13)
    assert gram.norm(rows[0]) == pytest.approx(norms[0], rel=1e-13)
    assert np.isfinite(block).all()


def test_a_zero_row_has_no_direction() -> None:
    norms, block = gram.cosines((np.zeros(5), np.ones(5)), (), np.zeros(0))
    assert norms.tolist() == [0.0, pytest.approx(5**0.5)]
    assert block.tolist() == [[0.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_norm_shows_that_a_row_is_not_finite(value: float) -> None:
    row = np.ones(1000)
    row[321] = value
    assert not np.isfinite(gram.norm(row))


def test_norm_of_an_empty_row_is_zero() -> None:
    assert gram.norm(np.zeros(0)) == 0.0


def test_combination_equals_the_plain_sum_and_skips_rows_without_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "_BUFFER_ELEMENTS", 64)
    rows = list(np.random.default_rng(0).standard_normal((4, 301)))
    rows[2] = np.full(301, np.nan)
    weights = np.array([0.5, -2.0, 0.0, 1e-3])
    np.testing.assert_allclose(gram.combine(rows, weights), weights[[0, 1, 3]] @ np.stack([rows[0], rows[1], rows[3]]))
    assert not gram.combine(rows, np.zeros(4)).any()
