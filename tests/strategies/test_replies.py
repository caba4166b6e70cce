"""Reply checks: nothing a client sends may raise, and everything that does not count has a reason."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from strategies.model import Model
from strategies.replies import Reply, SecureAggregationError, are_individual, screen, to_updates
from strategies.rules import Aggregate, FedPCD
from tests.support import initial_model, train


def good(client: int, **changes: Any) -> Reply:
    parts = {"client_id": str(client), "arrays": train(initial_model(), client, 0.1), "num_examples": 5, "metrics": {}}
    return Reply(**{**parts, **changes})


def changed(client: int, name: str, value: np.ndarray) -> Reply:
    return good(client, arrays={**train(initial_model(), client, 0.1), name: value})


def reason(reply: Reply, norm_screen: float = 10.0) -> str:
    """Why this one reply of four is refused."""
    others = [good(c) for c in range(3)]
    accepted, rejections = screen(Model(initial_model()), [*others, reply], ["0", "1", "2", "9"], norm_screen)
    assert [a.client_id for a in accepted] == ["0", "1", "2"]
    assert [r.client_id for r in rejections] == [reply.client_id]
    return rejections[0].reason


def scaled(client: int, factor: float) -> Reply:
    start = initial_model()
    moved = train(start, client, 0.1)
    far = {n: (start[n] + factor * (a - start[n])).astype(a.dtype) if n == "weight" else a for n, a in moved.items()}
    return good(client, arrays=far)


WEIGHT = initial_model()["weight"]
BAD = {
    "error": (good(9, error="ValueError: boom"), "ValueError: boom"),
    "no arrays": (good(9, arrays=None), "no arrays"),
    "missing name": (good(9, arrays={"weight": WEIGHT}), r"missing \[bn"),
    "other name": (good(9, arrays={**initial_model(), "extra": WEIGHT}), r"unexpected \[extra\]"),
    "transposed": (changed(9, "weight", WEIGHT.T.copy()), r"shape \(4, 5\), expected \(5, 4\)"),
    "broadcastable": (changed(9, "weight", WEIGHT[:1]), "shape"),
    "0-dim as vector": (changed(9, "scale", np.ones(1, np.float32)), "shape"),
    "integers for floats": (changed(9, "weight", np.ones((5, 4), np.int64)), "dtype int64"),
    "floats for counters": (changed(9, "bn.num_batches_tracked", np.asarray(1.5)), "dtype float64"),
    "complex": (changed(9, "weight", WEIGHT.astype(np.complex64)), "complex64"),
    "text": (changed(9, "weight", np.full((5, 4), "x")), "dtype <U1"),
    "nan": (changed(9, "weight", np.where(np.arange(20).reshape(5, 4) == 7, np.nan, WEIGHT)), "NaN or infinity"),
    "infinity": (changed(9, "scale", np.asarray(np.inf, np.float32)), "'scale' holds NaN"),
    "nan in statistics": (changed(9, "bn.running_mean", np.full(4, np.nan, np.float32)), "NaN"),
    "negative variance": (changed(9, "bn.running_var", -np.ones(4, np.float32)), "negative variance"),
    "overflows the model's dtype": (changed(9, "weight", np.full((5, 4), 1e300)), "'weight' holds NaN or infinity"),
    "overflows half precision": (changed(9, "half", np.full(3, 2e5, np.float32)), "'half' holds NaN or infinity"),
    "overflowing statistics": (changed(9, "bn.running_mean", np.full(4, 1e300)), "'bn.running_mean' holds NaN"),
    "huge statistics": (changed(9, "bn.running_mean", np.full(4, 3e38, np.float32)), "its statistics has length"),
    "huge": (changed(9, "weight", np.full((5, 4), 3e38, np.float32)), r"times the median \S+ of the others'"),
    "no examples": (good(9, num_examples=0), "num-examples must be > 0"),
    "negative examples": (good(9, num_examples=-3), "got -3"),
    "nan examples": (good(9, num_examples=float("nan")), "got nan"),
    "infinite examples": (good(9, num_examples=float("inf")), "got inf"),
    "absurd examples": (good(9, num_examples=10**400), "at most"),
    "text examples": (good(9, num_examples="many"), "got 'many'"),
    "boolean examples": (good(9, num_examples=True), "got True"),
    "list of examples": (good(9, num_examples=[5]), r"got \[5\]"),
    "examples missing": (good(9, num_examples=None), "got None"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_costs_its_sender_the_round_with_a_reason(name: str) -> None:
    reply, pattern = BAD[name]
    assert re.search(pattern, reason(reply)), reason(reply)


def test_a_client_that_never_answers_is_named() -> None:
    accepted, rejections = screen(Model(initial_model()), [good(1)], ["1", "2"], 0.0)
    assert [(r.client_id, r.kind) for r in rejections] == [("2", "silent")]
    assert len(accepted) == 1


def test_a_client_that_answers_twice_counts_not_at_all() -> None:
    accepted, rejections = screen(Model(initial_model()), [good(1), good(2), good(1)], ["1", "2"], 0.0)
    assert [a.client_id for a in accepted] == ["2"]
    assert "more than once" in rejections[0].reason


def test_a_stranger_is_refused() -> None:
    accepted, rejections = screen(Model(initial_model()), [good(1), good(5)], ["1"], 0.0)
    assert [a.client_id for a in accepted] == ["1"]
    assert "not asked" in rejections[0].reason


@pytest.mark.parametrize(("factor", "refused"), [(8.0, False), (50.0, True), (1e10, True)])
def test_norm_screening_compares_with_the_cohort_and_the_model(factor: float, refused: bool) -> None:
    # The model is about as long as ten of the updates.
    replies = [good(c) for c in range(4)] + [scaled(9, factor)]
    _, rejections = screen(Model(initial_model()), replies, ["0", "1", "2", "3", "9"], 10.0)
    assert (rejections != []) == refused
    unscreened, _ = screen(Model(initial_model()), replies, ["0", "1", "2", "3", "9"], 0.0)
    assert len(unscreened) == 5


@pytest.mark.parametrize("satisfied", [1, 2, 4])
def test_badly_served_clients_are_not_screened_out_because_all_others_are_satisfied(satisfied: int) -> None:
    replies = [scaled(c, 1e-5) for c in range(satisfied)] + [good(9)]
    accepted, rejections = screen(Model(initial_model()), replies, [r.client_id for r in replies], 10.0)
    assert rejections == []
    assert len(accepted) == satisfied + 1


def counting(client: int, examples: int) -> Reply:
    return good(client, num_examples=examples)


@pytest.mark.parametrize(
    ("counts", "refused"),
    [
        ([100, 120, 90, 2**53], ["3"]),
        ([100, 120, 90, 101_000], ["3"]),
        ([100, 120, 90, 100_000], []),
        ([5, 5000, 60_000], []),
        ([2**53, 100], []),
        ([100, 2000, 1], []),
        ([2**53], []),
        ([2**53, 2**53, 100], []),
    ],
    ids=[
        "all weight claimed",
        "just too many",
        "a large client",
        "three sizes",
        "one of two",
        "tiny claim",
        "alone",
        "colluding",
    ],
)
def test_numbers_of_examples_are_compared_with_the_cohorts_median(counts: list[int], refused: list[str]) -> None:
    replies, cohort = [counting(c, n) for c, n in enumerate(counts)], [str(c) for c in range(len(counts))]
    _, rejections = screen(Model(initial_model()), replies, cohort, 10.0)
    assert [r.client_id for r in rejections] == refused
    assert all("times the others' median" in r.reason and "(examples-screen)" in r.reason for r in rejections)
    assert len(screen(Model(initial_model()), replies, cohort, 10.0, examples_screen=0.0)[0]) == len(counts)


def test_a_huge_update_is_screened_out_even_alone() -> None:
    _, rejections = screen(Model(initial_model()), [scaled(9, 1e10)], ["9"], 10.0)
    assert "norm-screen" in rejections[0].reason


def test_one_client_cannot_drive_a_counter_away() -> None:
    far = changed(9, "bn.num_batches_tracked", np.asarray(2**62))
    replies = [good(1), good(3), far]
    model = Model(initial_model())
    accepted, _ = screen(model, replies, ["1", "3", "9"], 10.0)
    batch = to_updates(model, accepted, 1, 0.1)
    moved = Model(initial_model()).moved(FedPCD().aggregate(batch, {})[0], [r.buffers for r in accepted], batch.weights)
    assert moved["bn.num_batches_tracked"] == 3


def test_clients_that_did_not_move_do_not_make_the_others_look_long() -> None:
    replies = [good(c, arrays=initial_model()) for c in range(3)] + [good(7), good(8)]
    accepted, rejections = screen(Model(initial_model()), replies, ["0", "1", "2", "7", "8"], 10.0)
    assert rejections == []
    assert len(accepted) == 5


def test_updates_are_displacements_in_the_order_of_client_ids_whatever_the_order_of_keys_and_arrival() -> None:
    replies = [good(c) for c in (10, 2, 1)]
    replies[0] = good(10, arrays=dict(reversed(train(initial_model(), 10, 0.1).items())))
    model = Model(initial_model())
    accepted, _ = screen(model, replies, ["1", "2", "10"], 0.0)
    batch = to_updates(model, accepted, 4, 0.1)
    assert batch.client_ids == ("1", "2", "10")
    expected = initial_model()["weight"] - train(initial_model(), 10, 0.1)["weight"]
    np.testing.assert_array_equal(batch.rows[2][:20], expected.ravel())
    assert batch.rows[0].dtype == np.float32
    assert batch.rows[0].size == 20 + 1 + 0 + 3


def test_new_model_keeps_names_order_shapes_and_dtypes_and_treats_buffers_by_rule() -> None:
    model = Model(initial_model())
    accepted, _ = screen(model, [good(c) for c in (1, 3)], ["1", "3"], 0.0)
    batch = to_updates(model, accepted, 1, 0.1)
    aggregate, _ = FedPCD().aggregate(batch, {})
    moved = model.moved(aggregate, [r.buffers for r in accepted], np.array([0.25, 0.75]))
    assert list(moved) == list(initial_model())
    for name, array in initial_model().items():
        assert (moved[name].dtype, moved[name].shape) == (array.dtype, array.shape)
    np.testing.assert_allclose(moved["bn.running_var"], 0.25 * 0.6 + 0.75 * 0.8, rtol=1e-6)
    assert moved["bn.num_batches_tracked"] == 1
    np.testing.assert_array_equal(moved["mask"], [True, False])


def test_float64_models_keep_their_precision() -> None:
    model = Model({"w": np.array([1.0, 1.0 + 1e-12])})
    accepted, _ = screen(model, [Reply("0", {"w": np.array([1.0, 1.0])}, 1)], ["0"], 0.0)
    assert accepted[0].row.dtype == np.float64
    assert accepted[0].row[1] == pytest.approx(1e-12, rel=1e-3)


def test_a_step_out_of_the_dtypes_range_is_an_error_and_not_an_infinite_model() -> None:
    model = Model({"w": np.zeros(2, np.float16)})
    with pytest.raises(FloatingPointError, match="'w' infinite in float16"):
        model.moved(Aggregate(np.array([1e6, 0.0])), [], np.zeros(0))


@pytest.mark.parametrize(
    ("arrays", "pattern"),
    [
        ({"w": np.array(["a"])}, "dtype <U1"),
        ({"w": np.array([np.nan])}, "not finite"),
        ({"steps": np.array([1])}, "no trainable"),
        ({"bn.running_mean": np.zeros(3)}, "no trainable"),
        ({}, "no trainable"),
    ],
)
def test_a_global_model_that_cannot_be_trained_is_refused(arrays: dict, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        Model(arrays)


def test_identical_updates_of_all_clients_are_taken_for_secure_aggregation() -> None:
    same = train(initial_model(), 1, 0.1)
    accepted, _ = screen(Model(initial_model()), [good(1, arrays=same), good(2, arrays=same)], ["1", "2"], 0.0)
    with pytest.raises(SecureAggregationError, match="secure aggregation"):
        are_individual(accepted)


def test_clients_that_all_return_the_received_model_are_not() -> None:
    still, _ = screen(Model(initial_model()), [good(c, arrays=initial_model()) for c in (1, 2)], ["1", "2"], 0.0)
    alone, _ = screen(Model(initial_model()), [good(1)], ["1"], 0.0)
    assert not are_individual(still)
    assert not are_individual(alone)
    different, _ = screen(Model(initial_model()), [good(1), good(2)], ["1", "2"], 0.0)
    assert are_individual(different)


arbitrary_arrays = st.dictionaries(
    st.sampled_from([*initial_model(), "other", ""]),
    hnp.arrays(
        st.sampled_from(["f2", "f4", "f8", "i1", "u8", "?", "c8", "<U2", "S3", "M8[s]"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    ),
)  # fmt: skip
arbitrary_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)


@st.composite
def spoiled_models(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """A right model of which some arrays were replaced."""
    arrays = train(initial_model(), 9, 0.1)
    for name in draw(st.sets(st.sampled_from(sorted(arrays)), max_size=3)):
        dtype = draw(st.sampled_from([arrays[name].dtype, np.dtype(np.float64), np.dtype(np.int32)]))
        shape = draw(st.sampled_from([arrays[name].shape, (2,), ()]))
        if dtype.kind == "f" and draw(st.booleans()):
            extreme = draw(st.sampled_from([0.0, 1e300, -1e300, 3e38, 7e4, float("nan")]))
            with np.errstate(over="ignore"):
                arrays[name] = np.full(shape, extreme).astype(dtype)
        else:
            arrays[name] = draw(hnp.arrays(dtype, shape))
    return arrays


@given(
    st.one_of(arbitrary_arrays, spoiled_models(), st.none()),
    arbitrary_values,
    st.dictionaries(st.text(max_size=3), arbitrary_values),
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_a_client_sends_the_round_goes_on_and_the_model_stays_finite(arrays, count, metrics) -> None:
    model = Model(initial_model())
    replies = [good(0), good(1), Reply("9", arrays, count, metrics)]
    accepted, rejections = screen(model, replies, ["0", "1", "9"], 10.0)
    assert sorted([a.client_id for a in accepted] + [r.client_id for r in rejections]) == ["0", "1", "9"]
    assert all(r.reason for r in rejections)
    batch = to_updates(model, accepted, 1, 0.1)
    aggregate, _ = FedPCD().aggregate(batch, {})
    moved = model.moved(aggregate, [r.buffers for r in accepted], batch.weights)
    assert all(np.isfinite(a).all() for a in moved.values() if a.dtype.kind == "f")
    assert (moved["bn.running_var"] >= 0).all()
