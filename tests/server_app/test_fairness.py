from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_app.fairness import Fairness, fairness

if TYPE_CHECKING:
    import random


def by_client(values: list[float]) -> dict[str, float]:
    return {str(client): value for client, value in enumerate(values)}


accuracies = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=120)


def test_metrics_follow_the_papers_definitions() -> None:
    values = [0.5, 1.0, 0.0, 0.75, 0.25, 0.9, 0.8, 0.7, 0.6, 0.4, 0.3]  # 11 clients: each tail has two
    result = fairness(by_client(values))
    assert result.clients == 11
    assert result.mean == pytest.approx(np.mean(values), abs=1e-15)
    assert result.sigma_c == pytest.approx(np.std(values, ddof=0), abs=1e-15)
    assert result.worst_10 == pytest.approx((0.0 + 0.25) / 2)
    assert result.best_10 == pytest.approx((1.0 + 0.9) / 2)
    assert result.jain == pytest.approx(sum(values) ** 2 / (11 * sum(a * a for a in values)), abs=1e-15)
    assert (result.worst_client, result.worst_accuracy) == ("2", 0.0)


@pytest.mark.parametrize(("clients", "tail"), [(1, 1), (9, 1), (10, 1), (11, 2), (70, 7), (100, 10), (101, 11)])
def test_a_tail_holds_a_tenth_of_the_clients_rounded_up(clients: int, tail: int) -> None:
    values = [0.0] * tail + [1.0] * (clients - tail)
    assert fairness(by_client(values)).worst_10 == 0.0
    values[tail - 1] = 1.0
    assert fairness(by_client(values)).worst_10 == pytest.approx(1 / tail)


def test_a_hundred_clients_have_ten_in_each_tail() -> None:
    result = fairness(by_client([client / 100 for client in range(100)]))
    assert result.worst_10 == pytest.approx(np.mean(np.arange(10)) / 100)
    assert result.best_10 == pytest.approx(np.mean(np.arange(90, 100)) / 100)


def test_a_single_client_is_its_own_worst_and_best() -> None:
    result = fairness({"only": 0.3})
    assert (result.mean, result.worst_10, result.best_10) == (0.3, 0.3, 0.3)
    assert (result.sigma_c, result.jain) == (0.0, 1.0)
    assert result.worst_client == "only"


def test_all_zero_accuracies_count_as_equal() -> None:
    assert fairness(by_client([0.0] * 7)).jain == 1.0


def test_one_served_client_gives_the_smallest_jain_index() -> None:
    assert fairness(by_client([1.0, 0.0, 0.0, 0.0])).jain == pytest.approx(0.25)


def test_json_names_use_hyphens() -> None:
    names = {"clients", "mean", "sigma-c", "worst-10", "best-10", "jain", "worst-client", "worst-accuracy"}
    assert set(fairness({"0": 0.5}).as_json()) == names
    assert len(fields(Fairness)) == len(names)


def test_ties_for_the_worst_go_to_the_smallest_client_number() -> None:
    assert fairness({"10": 0.1, "9": 0.1, "2": 0.5}).worst_client == "9"


def test_no_client_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one client"):
        fairness({})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.01, 1.01])
def test_an_impossible_accuracy_names_the_client(value: float) -> None:
    with pytest.raises(ValueError, match="client 'clinic-3'"):
        fairness({"0": 0.5, "clinic-3": value})


@given(accuracies)
def test_jain_lies_between_one_over_n_and_one(values: list[float]) -> None:
    assert 1 / len(values) <= fairness(by_client(values)).jain <= 1.0


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=120))
def test_jain_equals_its_form_in_the_coefficient_of_variation(values: list[float]) -> None:
    result = fairness(by_client(values))
    assert result.jain == pytest.approx(1 / (1 + (result.sigma_c / result.mean) ** 2), rel=1e-12)


@given(accuracies)
def test_tails_enclose_the_mean(values: list[float]) -> None:
    result = fairness(by_client(values))
    assert result.worst_accuracy <= result.worst_10 <= result.mean <= result.best_10 <= max(values)
    assert 0.0 <= result.sigma_c <= 0.5


@given(accuracies, st.randoms())
def test_order_of_clients_never_changes_a_bit(values: list[float], shuffler: random.Random) -> None:
    items = list(by_client(values).items())
    shuffled = items.copy()
    shuffler.shuffle(shuffled)
    assert fairness(dict(items)) == fairness(dict(shuffled))


@given(st.floats(0.0, 1.0), st.integers(1, 120))
def test_equal_clients_are_perfectly_fair(value: float, clients: int) -> None:
    result = fairness(by_client([value] * clients))
    assert (result.sigma_c, result.jain) == (0.0, 1.0)
    assert result.worst_10 == result.mean == result.best_10 == value
