"""Public bug reports of federated-learning software that this project must not repeat; each names its thread.

Cases about single rules (D4, D12 to D15) and replies (D3, D5, D7) also have property tests beside their modules; here
each is played through Flower, in both APIs, as its reporter met it. The app's own resumption (D10) has its tests in
tests/server_app/test_resume.py and tests/end_to_end/test_killed_servers.py.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from strategies.engine import Memory
from strategies.inprocess import InProcessGrid
from strategies.protocol import ARRAYS, CLIENT_ID, CONFIG
from strategies.rules import RULES, FedPCD
from tests.federations import run_legacy, run_message
from tests.support import TARGETS, assert_same_bits, initial_model, message_client, updates

BOTH = pytest.mark.parametrize("runner", [run_message, run_legacy], ids=["message", "legacy"])
METHODS = pytest.mark.parametrize("method", sorted(RULES))


def everyone(runner) -> dict:
    """Keyword arguments for full participation."""
    return {"fraction_train": 1.0} if runner is run_message else {"fraction_fit": 1.0}


@BOTH
def test_d1_q_fedavg_weighs_each_client_by_its_own_loss_at_the_received_model(runner) -> None:
    # flower #659, #804: without an evaluate function the loss was unbound, with one all clients had the server's.
    seen: dict[str, float] = {}

    def unequal(client: int, arrays: dict, metrics: dict) -> None:
        metrics["loss-before"] = seen[str(client)] = 1.0 + client

    rounds = {"q": 2.0} | everyone(runner)
    unequally = runner("qfedavg", rounds=1, tamper=unequal, **rounds)
    equally = runner("qfedavg", rounds=1, tamper=lambda c, a, m: m.update({"loss-before": 5.0}), **rounds)
    assert len(set(seen.values())) == TARGETS
    assert any(unequally.model[n].tobytes() != equally.model[n].tobytes() for n in unequally.model)


@BOTH
@METHODS
@pytest.mark.parametrize("count", [0, -5])
def test_d2_no_client_with_examples_leaves_the_model_and_marks_the_round_skipped(runner, method, count) -> None:
    # flower #7645, #7646, #7708, #7709, #7693, #7694: ZeroDivisionError or a NaN model.
    run = runner(method, rounds=2, tamper=lambda c, a, m: m.update({"num-examples": count}))
    assert [r.skipped for r in run.rounds] == [True, True]
    assert_same_bits(run.model, initial_model())
    assert all("num-examples must be > 0" in j.reason for r in run.rounds for j in r.rejections)


@BOTH
@METHODS
def test_d2_one_client_without_examples_costs_only_its_own_update(runner, method) -> None:
    def empty(client: int, arrays: dict, metrics: dict) -> None:
        if client == 4:
            metrics["num-examples"] = 0

    run = runner(method, rounds=1, tamper=empty, **everyone(runner))
    assert [j.client_id for j in run.rounds[0].rejections] == ["4"]
    assert len(run.rounds[0].accepted) == TARGETS - 1


def test_d2_nan_examples_cost_only_the_senders_update() -> None:
    run = run_message(
        "fedpcd", rounds=1, tamper=lambda c, a, m: m.update({"num-examples": float("nan")} if c == 4 else {})
    )
    assert "4" not in run.rounds[0].accepted


@METHODS
def test_d3_arrays_are_matched_by_name_not_by_position(method) -> None:
    # flower PR #7757: another key order applied updates to the wrong tensor.
    def reversed_keys(client: int, arrays: dict, metrics: dict) -> None:
        items = list(arrays.items())
        arrays.clear()
        arrays.update(reversed(items))

    assert_same_bits(run_message(method, tamper=reversed_keys).model, run_message(method).model)


@BOTH
@METHODS
def test_d4_a_client_that_returns_the_received_model_changes_no_other_row(runner, method) -> None:
    # easyFL #59: NaN when an update is divided by its zero norm.
    def lazy(client: int, arrays: dict, metrics: dict) -> None:
        if client == 3:
            arrays.update(initial_model())

    run = runner(method, rounds=1, tamper=lazy, **everyone(runner))
    assert all(np.isfinite(a).all() for a in run.model.values())
    assert "3" in run.rounds[0].accepted
    if method == "fedpcd":
        assert run.rounds[0].diagnostics["constraints-current"] == TARGETS - 1


HOSTILE = {
    "nan": lambda a: np.full_like(a, np.nan),
    "infinity": lambda a: np.full_like(a, np.inf),
    "huge": lambda a: np.full_like(a, 3e38),
    "one bad value": lambda a: np.where(np.arange(a.size).reshape(a.shape) == 13, np.nan, a).astype(a.dtype),
}


@BOTH
@METHODS
@pytest.mark.parametrize("kind", HOSTILE)
def test_d5_one_hostile_model_is_screened_out_and_its_sender_named(runner, method, kind) -> None:
    # NVFlare PR #5240, flower #2252: one non-finite model destroys the global one.
    def attack(client: int, arrays: dict, metrics: dict) -> None:
        if client == 5:
            arrays["weight"] = HOSTILE[kind](arrays["weight"])

    def absent(client: int, arrays: dict, metrics: dict) -> None:
        if client == 5:
            raise ValueError("gone")

    attacked = runner(method, tamper=attack, **everyone(runner))
    assert [(j.client_id, j.kind) for j in attacked.rounds[0].rejections] == [("5", "invalid")]
    without = runner(method, tamper=absent, **everyone(runner))
    assert [r.rejections for r in without.rounds] == [without.rounds[0].rejections] * 3
    assert [r.accepted for r in attacked.rounds] == [r.accepted for r in without.rounds]
    assert_same_bits(attacked.model, without.model)


@BOTH
@METHODS
def test_d6_batchnorm_buffers_keep_type_and_meaning(runner, method) -> None:
    # flower #4345, #1060; FedScale #57; PFLlib #260; FL-bench #110.
    run = runner(method, rounds=1, **everyone(runner))
    model, shares = run.model, np.array([10 + 3 * c for c in range(TARGETS)], dtype=float)
    assert model["bn.num_batches_tracked"].dtype == np.int64
    assert model["bn.num_batches_tracked"] == (TARGETS - 1) // 2
    expected = np.average(0.5 + 0.1 * np.arange(TARGETS), weights=shares)
    np.testing.assert_allclose(model["bn.running_var"], expected, rtol=1e-6)
    assert (model["bn.running_var"] >= 0).all()
    assert_equal_types(model)


@BOTH
@METHODS
def test_d7_scalars_and_empty_arrays_go_round_unchanged_in_shape(runner, method) -> None:
    # flower #4344; PR #5824, #6783, #6524: "index 0 is out of bounds", TypeError.
    run = runner(method)
    assert run.model["scale"].shape == ()
    assert run.model["scale"] != initial_model()["scale"]
    assert run.model["nothing"].shape == (0,)
    assert_equal_types(run.model)


@METHODS
def test_d8_fifty_orders_of_arrival_give_the_same_bits(method) -> None:
    # flower #3328.
    class Shuffled(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            np.random.default_rng(next(order)).shuffle(replies)
            return replies

    order = itertools.count()
    first = run_message(method).model
    for _ in range(50):
        assert_same_bits(first, run_message(method, grid=Shuffled(message_client(), 3)).model)


@BOTH
@METHODS
def test_d9_one_clients_exception_is_named_and_the_round_goes_on(runner, method) -> None:
    # flower #4346, #1400, #1752, #3712.
    def boom(client: int, arrays: dict, metrics: dict) -> None:
        if client == 1:
            raise ValueError("boom")

    run = runner(method, tamper=boom, **everyone(runner))
    for report in run.rounds:
        assert not report.skipped
        assert [(j.client_id, j.kind) for j in report.rejections] == [("1", "error")], report.rejections
        assert "boom" in report.rejections[0].reason


@METHODS
def test_d9_a_client_that_never_answers_is_named(method) -> None:
    def silent(message: Message, context):
        if message.metadata.message_type == "train" and message.content[CONFIG][CLIENT_ID] == "2":
            return InProcessGrid.SILENT
        return None

    run = run_message(method, fraction_train=1.0, grid=InProcessGrid(message_client(), 3, intercept=silent))
    assert [(j.client_id, j.kind) for j in run.rounds[0].rejections] == [("2", "silent")]


@METHODS
def test_d9_an_error_that_the_superlink_reports_for_a_dead_node_is_named_after_its_client(method) -> None:
    # Flower reports an unavailable node with the SuperLink's own id (1) as the source.
    def dead(message: Message, context):
        if message.metadata.message_type == "train" and message.content[CONFIG][CLIENT_ID] == "2":
            raise ConnectionError("Node Unavailable")
        return

    class FromSuperLink(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            for reply in replies:
                if reply.has_error():
                    reply.metadata.__dict__["_src_node_id"] = 1
            return replies

    run = run_message(method, fraction_train=1.0, grid=FromSuperLink(message_client(), 3, intercept=dead))
    assert [j.client_id for j in run.rounds[0].rejections] == ["2"]


@METHODS
def test_d9_a_reply_that_cannot_be_decoded_is_its_senders_fault(method) -> None:
    def garbled(message: Message, context):
        if message.metadata.message_type != "train" or message.content[CONFIG][CLIENT_ID] != "2":
            return None
        reply = message_client()(message, context)
        broken = reply.content[ARRAYS]
        broken["weight"].data = b"not an array"
        return Message(RecordDict({ARRAYS: broken, "metrics": reply.content["metrics"]}), reply_to=message)

    run = run_message(method, fraction_train=1.0, grid=InProcessGrid(message_client(), 3, intercept=garbled))
    (rejection,) = run.rounds[0].rejections
    assert rejection.client_id == "2"
    assert "cannot be read" in rejection.reason


@BOTH
@METHODS
def test_d11_every_clients_own_metrics_are_kept_without_any_aggregation_function(runner, method) -> None:
    # flower #983, #1348.
    run = runner(method, rounds=1)
    assert run.evaluations[0].metrics["3"] == {"num-examples": 19.0, "accuracy": 0.03, "loss": 4.0}
    assert set(run.rounds[0].train_metrics) == set(run.rounds[0].accepted)


def test_d12_an_ill_conditioned_three_by_three_program_ends_certified() -> None:
    # quadprog #32, qpsolvers #47: endless loop on a nearly rank-one Gram matrix with entries like these.
    lengths = np.sqrt([224.6, 181.4, 299.2])
    base = np.array([[1.0, 1e-9, 0.0], [1.0, 0.0, 1e-9], [1.0, -1e-9, -1e-9]])
    for signs in itertools.product([1, -1], repeat=3):
        rows = base * lengths[:, None] * np.array(signs)[:, None]
        aggregate, _ = FedPCD(tau=0.02).aggregate(updates(rows), {})
        assert aggregate.diagnostics["status"] in ("inactive", "solved", "infeasible", "stationary")
        assert np.isfinite(aggregate.step).all()


@pytest.mark.parametrize("scale", [1.0, 3.0, 1e-6])
def test_d13_duplicate_zero_and_collinear_updates_need_no_ridge(scale) -> None:
    # qpsolvers #23, PR #12; GEM #4: "matrix G is not positive definite".
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((4, 12))
    rows[3] -= 3 * rows[0]
    crowd = np.vstack([rows, rows[0], scale * rows[0], scale * rows[2], np.zeros(12)])
    aggregate, _ = FedPCD(tau=0.1).aggregate(updates(crowd), {})
    assert aggregate.diagnostics["status"] == "solved"
    assert aggregate.diagnostics["kkt-residual"] < 1e-9
    moving = crowd[:-1] / np.linalg.norm(crowd[:-1], axis=1, keepdims=True)
    direction = aggregate.step / np.linalg.norm(aggregate.step) * aggregate.diagnostics["direction-norm"]
    assert (moving @ direction >= 0.1 - 1e-9).all()


@pytest.mark.parametrize("policy", ["primary", "relax", "zero"])
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(np.random.default_rng(0).standard_normal((100, 20)), id="m > n"),
        pytest.param(
            np.kron([[1.0], [-1.0]], np.random.default_rng(1).standard_normal((50, 500))), id="50 opposite pairs"
        ),
    ],
)
@pytest.mark.timeout(20)
def test_d14_infeasible_programs_of_a_hundred_clients_end_with_a_policy(rows, policy) -> None:
    # proxsuite #291: minutes before an infeasible program is called so. The benchmark measures our time.
    aggregate, _ = FedPCD(tau=0.1, on_infeasible=policy).aggregate(updates(rows, np.arange(1, 101)), {})
    assert aggregate.diagnostics["status"] == "infeasible"
    assert np.isfinite(aggregate.step).all()


@METHODS
def test_d10_a_strategy_that_is_given_its_memory_goes_on_bit_for_bit(method) -> None:
    # flower #599, pfl #103: no resumption, or one that loses the algorithm's state.
    whole = run_message(method, rounds=10)
    first = run_message(method, rounds=5)
    second = run_message(method, rounds=10, after=first)
    assert [report.round for report in second.rounds] == [6, 7, 8, 9, 10]
    assert [report.cohort for report in (*first.rounds, *second.rounds)] == [r.cohort for r in whole.rounds]
    assert_same_bits(second.model, whole.model)
    assert sorted(second.result.train_metrics_clientapp) == [6, 7, 8, 9, 10]


def test_d10_without_its_memory_it_does_not() -> None:
    whole, first = run_message("fedpcd", rounds=10, tau=0.5), run_message("fedpcd", rounds=5, tau=0.5)
    first.memory = Memory()
    second = run_message("fedpcd", rounds=10, tau=0.5, after=first)
    assert any(second.model[name].tobytes() != whole.model[name].tobytes() for name in whole.model)


@pytest.mark.parametrize("scale", [1e-12, 1e-150, 1e12])
def test_d15_thresholds_do_not_depend_on_scale(scale) -> None:
    # TorchJD PR #249: unstable for tiny gradients.
    rows = np.random.default_rng(0).standard_normal((6, 30))
    rows[0] *= -2
    rows[1] = 0.0
    plain, _ = FedPCD(tau=0.1).aggregate(updates(rows), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled, _ = FedPCD(tau=0.1).aggregate(updates(rows * scale), {})
    assert scaled.diagnostics["multipliers"] == pytest.approx(plain.diagnostics["multipliers"], rel=1e-12)


def assert_equal_types(model: dict[str, np.ndarray]) -> None:
    """Names, order, dtypes and shapes are those of the initial model."""
    assert [(n, a.dtype, a.shape) for n, a in model.items()] == [
        (n, a.dtype, a.shape) for n, a in initial_model().items()
    ]
