"""The Flower strategies in both APIs: equality, foreign projects, keywords, wrappers, waiting."""

from __future__ import annotations

import copy
import inspect
import pickle
import time
from dataclasses import fields

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import Code, Status, ndarrays_to_parameters
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping as LegacyPrivacy
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

import strategies
from strategies import legacy
from strategies.inprocess import InProcessGrid
from strategies.protocol import CLIENT_ID, CONFIG, METRICS, ROSTER
from strategies.rules import RULES
from tests.federations import OURS, run_legacy, run_message
from tests.support import (
    HASH,
    TARGETS,
    arrays_of,
    assert_same_bits,
    initial_model,
    legacy_client,
    message_client,
    record,
)

METHODS = sorted(RULES)


def conflict(client: int, arrays: dict[str, np.ndarray], metrics: dict) -> None:
    """Make clients disagree so much that programs are active."""
    if client % 3 == 0:
        start = initial_model()["weight"]
        arrays["weight"] = np.asarray(start - 3 * (arrays["weight"] - start)).astype(np.float32)


@pytest.mark.parametrize("method", METHODS)
def test_both_apis_give_the_same_bits_whatever_the_number_of_nodes(method: str) -> None:
    hyper = {"tau": 0.3} if method == "fedpcd" else {}
    first = run_message(method, nodes=1, tamper=conflict, **hyper)
    for other in (
        run_message(method, nodes=5, tamper=conflict, **hyper),
        run_message(method, nodes=TARGETS, tamper=conflict, **hyper),
        run_legacy(method, nodes=4, tamper=conflict, **hyper),
    ):
        assert [r.cohort for r in first.rounds] == [r.cohort for r in other.rounds]
        assert [r.rejections for r in first.rounds] == [r.rejections for r in other.rounds]
        assert_same_bits(first.model, other.model)
    if method == "fedpcd":
        assert any(r.diagnostics["status"] == "solved" for r in first.rounds)


@pytest.mark.parametrize("method", METHODS)
def test_another_seed_gives_another_model(method: str) -> None:
    assert run_message(method).model["weight"].tobytes() != run_message(method, seed=2).model["weight"].tobytes()


def test_all_methods_see_the_same_cohorts() -> None:
    cohorts = {tuple(r.cohort for r in run_message(m, rounds=5).rounds) for m in METHODS}
    assert len(cohorts) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("api", [strategies, legacy], ids=["message", "legacy"])
def test_a_foreign_project_needs_no_change_to_its_clients(method: str, api) -> None:
    runner = run_message if api is strategies else run_legacy
    run = runner(method, client_ids="node", code_hash=None)
    assert [len(r.accepted) for r in run.rounds] == [1, 1, 1]
    full = {"fraction_train": 1.0} if api is strategies else {"fraction_fit": 1.0}
    run = runner(method, client_ids="node", code_hash=None, **full)
    assert [len(r.accepted) for r in run.rounds] == [3, 3, 3]
    assert run.model["weight"].tobytes() != initial_model()["weight"].tobytes()


def test_full_participation_of_foreign_nodes_equals_flowers_own_fedavg() -> None:
    from flwr.serverapp.strategy import FedAvg

    start = {name: initial_model()[name] for name in ("weight", "bn.running_mean")}
    ours = strategies.FedAvg().start(InProcessGrid(message_client(), 3), record(start), num_rounds=2)
    theirs = FedAvg().start(InProcessGrid(message_client(), 3), record(start), num_rounds=2)
    for name, array in arrays_of(theirs.arrays).items():
        np.testing.assert_allclose(arrays_of(ours.arrays)[name], array, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("api", [strategies, legacy], ids=["message", "legacy"])
def test_help_shows_hyper_parameters_options_and_flowers_keywords(method: str, api) -> None:
    parameters = inspect.signature(api.METHODS[method]).parameters
    assert {f.name for f in fields(RULES[method])} <= set(parameters)
    flower = {"fraction_train", "min_available_nodes"} if api is strategies else {"fraction_fit", "initial_parameters"}
    assert flower | {"seed", "norm_screen", "client_ids"} <= set(parameters)
    assert api.METHODS[method].__doc__ == RULES[method].__doc__


@pytest.mark.parametrize("api", [strategies, legacy], ids=["message", "legacy"])
def test_an_unknown_keyword_is_a_type_error_that_names_it(api) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'tua'; did you mean 'tau'"):
        api.FedPCD(tua=0.1)
    with pytest.raises(TypeError, match=r"'zzzzz'; see help\(FedPCD\)"):
        api.FedPCD(zzzzz=0.1)
    with pytest.raises(ValueError, match=r"tau must be a number in \[0, 1\]"):
        api.FedPCD(tau=2)
    with pytest.raises(ValueError, match="client_ids must be one of"):
        api.FedPCD(client_ids="guess")
    with pytest.raises(AttributeError, match="no attribute 'FedNothing'"):
        api.FedNothing  # noqa: B018


@pytest.mark.parametrize("api", [strategies, legacy], ids=["message", "legacy"])
def test_classes_are_found_by_name_listed_copied_and_pickled(api) -> None:
    assert api.FedPCD is api.METHODS["fedpcd"]
    assert "FedPCD" in api.__all__
    assert pickle.loads(pickle.dumps(api.FedPCD)) is api.FedPCD
    assert copy.deepcopy(api.FedPCD(tau=0.3)).rule.tau == 0.3
    assert "FedPCD" in dir(strategies)


def test_private_wrappers_are_refused_and_say_why() -> None:
    wrapped = DifferentialPrivacyServerSideFixedClipping(strategies.FedPCD(**OURS), 1.0, 1.0, 2)
    with pytest.raises(strategies.CentralPrivacyError, match="local differential privacy"):
        wrapped.start(InProcessGrid(message_client(), 2), record({"weight": initial_model()["weight"]}), num_rounds=1)
    older = LegacyPrivacy(legacy.FedPCD(**OURS), 1.0, 1.0, 2)
    with pytest.raises(strategies.CentralPrivacyError, match="DifferentialPrivacyServerSideFixedClipping"):
        older.configure_fit(1, ndarrays_to_parameters([np.zeros(2)]), None)


def test_fedavg_may_be_wrapped_for_central_privacy() -> None:
    plain = record({"weight": initial_model()["weight"]})
    wrapped = DifferentialPrivacyServerSideFixedClipping(
        strategies.FedAvg(min_train_nodes=1, fraction_train=1.0, **{**OURS, "client_ids": "node", "code_hash": None}),
        0.0,
        1e9,
        3,
    )
    result = wrapped.start(InProcessGrid(message_client(), 3), plain, num_rounds=1)
    assert arrays_of(result.arrays)["weight"].tobytes() != initial_model()["weight"].tobytes()


def test_local_privacy_on_the_clients_is_allowed() -> None:
    from flwr.clientapp import ClientApp
    from flwr.clientapp.mod import LocalDpMod

    inner = message_client()
    noisy = LocalDpMod(10.0, 1.0, 1.0, 1e-5)

    def intercept(message: Message, context) -> Message | None:
        if message.metadata.message_type != "train":
            return None
        return noisy(message, context, lambda m, c: inner(m, c))

    grid = InProcessGrid(ClientApp(), 3, intercept=lambda m, c: intercept(m, c) or inner(m, c))
    only = record({"weight": initial_model()["weight"]})
    result = strategies.FedPCD(**OURS).start(grid, only, num_rounds=2)
    assert np.isfinite(arrays_of(result.arrays)["weight"]).all()


@pytest.mark.parametrize("runner", [run_message, run_legacy])
def test_secure_aggregation_is_refused(runner) -> None:
    def same(client: int, arrays: dict, metrics: dict) -> None:
        arrays.update({n: a + np.asarray(1).astype(a.dtype) for n, a in initial_model().items() if n != "mask"})

    with pytest.raises(strategies.SecureAggregationError, match="needs each client's own update"):
        runner("fedpcd", tamper=same)
    assert not runner("fedavg", rounds=1, tamper=same).rounds[0].skipped


def test_missing_nodes_are_counted_when_the_deadline_passes() -> None:
    with pytest.raises(strategies.RosterError, match=r"after waiting for 0 s 2 of 5 nodes are ready, 3 missing"):
        run_message("fedavg", nodes=2, client_ids="node", code_hash=None, min_available_nodes=5, wait_timeout=0.0)
    with pytest.raises(strategies.RosterError, match=r"2 of 5 nodes are ready, 3 missing"):
        run_legacy("fedavg", nodes=2, client_ids="node", code_hash=None, min_available_clients=5, wait_timeout=0.0)


@pytest.mark.parametrize("runner", [run_message, run_legacy])
def test_other_code_on_the_nodes_is_refused(runner) -> None:
    with pytest.raises(strategies.RosterError, match=f"hash {HASH}"):
        runner("fedavg", code_hash="another")


def test_a_client_app_that_cannot_say_which_clients_it_serves_is_reported() -> None:
    from flwr.clientapp import ClientApp

    with pytest.raises(strategies.RosterError, match=r"(?s)0 of 2 nodes are ready.*No query function"):
        run_message("fedavg", grid=InProcessGrid(ClientApp(), 2), wait_timeout=0.0)
    silent = InProcessGrid(message_client(), 2, intercept=lambda *_: InProcessGrid.SILENT)
    with pytest.raises(strategies.RosterError, match="it did not answer"):
        run_message("fedavg", grid=silent, wait_timeout=0.0)
    empty = InProcessGrid(
        message_client(), 2, intercept=lambda m, _: Message(RecordDict({"x": ConfigRecord()}), reply_to=m)
    )
    with pytest.raises(strategies.RosterError, match=f"no '{ROSTER}' record"):
        run_message("fedavg", grid=empty, wait_timeout=0.0)
    with pytest.raises(strategies.RosterError, match="0 of 2 nodes"):
        run_legacy("fedavg", wait_timeout=0.0, nodes=0)


def test_deployed_nodes_are_clients_by_their_own_ids() -> None:
    configs = [{"client-id": name} for name in ("3", "11", "7")]
    run = run_message("fedpcd", grid=InProcessGrid(message_client(), node_configs=configs), fraction_train=1.0)
    assert run.rounds[0].accepted == ("3", "7", "11")


def test_clients_are_told_their_id_round_and_learning_rate() -> None:
    seen = []

    def look(message: Message, context) -> None:
        if message.metadata.message_type == "train":
            seen.append(dict(message.content[CONFIG]))

    grid = InProcessGrid(message_client(), 2, intercept=look)
    run = run_message("fedavg", rounds=2, grid=grid, local_learning_rate=lambda r: 0.1 / r)
    assert [c["local-learning-rate"] for c in seen] == [0.1] * 6 + [0.05] * 6
    assert tuple(c[CLIENT_ID] for c in seen[:6]) == run.rounds[0].cohort
    assert {c["server-round"] for c in seen} == {1, 2}


@pytest.mark.parametrize("runner", [run_message, run_legacy])
def test_evaluation_covers_every_client_in_the_rounds_asked_for_and_the_last(runner) -> None:
    run = runner("fedavg", rounds=5, evaluate_every=2)
    assert [e.round for e in run.evaluations] == [2, 4, 5]
    assert list(run.evaluations[0].metrics) == [str(c) for c in range(TARGETS)]
    assert run.evaluations[0].metrics["7"] == {"num-examples": 31.0, "accuracy": 0.07, "loss": 8.0}
    none = runner("fedavg", rounds=1, fraction_evaluate=0.0)
    assert none.evaluations == []


def test_evaluation_results_are_means_weighted_by_examples() -> None:
    weights = np.array([10 + 3 * c for c in range(TARGETS)])
    expected = float(np.average(np.arange(TARGETS) / 100, weights=weights))
    metrics = run_message("fedavg", rounds=1).result.evaluate_metrics_clientapp[1]
    assert metrics["accuracy"] == pytest.approx(expected)
    history = run_legacy("fedavg", rounds=1).result
    assert history.metrics_distributed["accuracy"][0][1] == pytest.approx(expected)


def test_flowers_own_metric_functions_are_still_called() -> None:
    from flwr.app import MetricRecord

    run = run_message(
        "fedavg",
        rounds=1,
        train_metrics_aggr_fn=lambda records, key: MetricRecord({"records": len(records)}),
        evaluate_metrics_aggr_fn=lambda records, key: MetricRecord({"records": len(records)}),
    )
    assert run.result.train_metrics_clientapp[1]["records"] == 6
    assert run.result.evaluate_metrics_clientapp[1]["records"] == TARGETS
    older = run_legacy(
        "fedavg",
        rounds=1,
        fit_metrics_aggregation_fn=lambda pairs: {"pairs": len(pairs)},
        evaluate_metrics_aggregation_fn=lambda pairs: {"pairs": len(pairs)},
        on_fit_config_fn=lambda r: {"note": "x"},
        on_evaluate_config_fn=lambda r: {"note": "y"},
    )
    assert older.result.metrics_distributed_fit["pairs"] == [(1, 6)]
    assert older.result.metrics_distributed["pairs"] == [(1, TARGETS)]


def test_training_metrics_hold_the_rules_numbers_and_the_clients_mean() -> None:
    run = run_message("fedpcd", rounds=1, tamper=conflict, tau=0.3)
    metrics = run.result.train_metrics_clientapp[1]
    cohort = [int(c) for c in run.rounds[0].cohort]
    expected = np.average(cohort, weights=[10 + 3 * c for c in cohort])
    assert metrics["train-loss"] == pytest.approx(1.0 + expected)
    assert metrics["clients-accepted"] == 6
    assert metrics["constraints-active"] > 0
    assert set(run.rounds[0].seconds) == {"clients", "aggregation"}


def test_training_can_be_switched_off() -> None:
    def boom(*_: object) -> None:
        raise AssertionError("nobody should train")

    run = run_message("fedavg", rounds=1, fraction_train=0.0, tamper=boom)
    assert_same_bits(run.model, initial_model())
    assert run.result.train_metrics_clientapp == {}


def test_older_api_refuses_failures_where_asked_to() -> None:
    def first_fails(client: int, arrays: dict, metrics: dict) -> None:
        if client == 0:
            raise ValueError("boom")

    run = run_legacy("fedavg", rounds=1, fraction_fit=1.0, tamper=first_fails, accept_failures=False)
    assert_same_bits(run.model, initial_model())


def test_older_api_needs_as_many_names_as_arrays() -> None:
    strategy = legacy.FedAvg(parameter_names=["a", "b"])
    with pytest.raises(ValueError, match="parameter_names has 2 names, the model 1 arrays"):
        strategy.configure_fit(1, ndarrays_to_parameters([np.zeros(2)]), None)


def test_older_api_rejects_a_reply_with_another_number_of_arrays() -> None:
    def drop(client: int, arrays: dict, metrics: dict) -> None:
        if client % 2:
            del arrays["mask"]
        elif client == 2:
            arrays["more"] = np.zeros(1)

    report = run_legacy("fedavg", rounds=1, fraction_fit=1.0, tamper=drop).rounds[0]
    assert [r.client_id for r in report.rejections] == ["1", "2", "3", "5", "7", "9", "11"]
    assert "missing [mask]" in report.rejections[0].reason
    assert "unexpected [array 8]" in report.rejections[1].reason


def test_evaluation_replies_without_examples_are_rejected_with_a_reason() -> None:
    def intercept(message: Message, context) -> Message | None:
        if message.metadata.message_type != "evaluate":
            return None
        client = int(message.content[CONFIG][CLIENT_ID])
        if client == 0:
            raise ValueError("no test data")
        if client == 1:
            from flwr.app import MetricRecord

            return Message(RecordDict({METRICS: MetricRecord({"num-examples": 0, "accuracy": 0.5})}), reply_to=message)
        return InProcessGrid.SILENT if client == 2 else None

    grid = InProcessGrid(message_client(), 3, intercept=intercept)
    report = run_message("fedavg", rounds=1, grid=grid).evaluations[0]
    assert [(r.client_id, r.kind) for r in report.rejections] == [("0", "error"), ("1", "invalid"), ("2", "silent")]
    assert "no test data" in report.rejections[0].reason
    assert len(report.metrics) == TARGETS - 3


def test_clients_of_the_in_process_grid_answer_one_after_the_other_even_if_threads_ask_them() -> None:
    # The older API asks every client from a thread of its own; in parallel, NumPy failed to read a header now and then.
    busy: list[int] = []

    def alone(client: int, arrays: dict, metrics: dict) -> None:
        busy.append(client)
        time.sleep(0.005)
        assert busy.pop() == client
        assert not busy

    run = run_legacy("fedavg", rounds=1, fraction_fit=1.0, tamper=alone)
    assert run.rounds[0].rejections == ()
    assert len(run.rounds[0].accepted) == TARGETS


def test_the_in_process_grid_is_a_whole_flower_grid() -> None:
    grid = InProcessGrid(message_client(), 2)
    grid.set_run(None)
    assert grid.run.run_id == 1
    nodes = list(grid.get_node_ids())
    questions = [Message(RecordDict(), node, "query") for node in nodes]
    numbers = list(grid.push_messages(questions))
    assert len(list(grid.pull_messages(numbers))) == 2
    assert list(grid.pull_messages(numbers)) == []
    with pytest.raises(NotImplementedError, match="Message"):
        grid.create_message()


def test_a_run_in_which_no_round_succeeds_returns_the_initial_model() -> None:
    def boom(*_: object) -> None:
        raise ValueError("boom")

    run = run_message("fedpcd", tamper=boom)
    assert_same_bits(run.model, initial_model())
    assert all(r.skipped for r in run.rounds)
    assert isinstance(run.result.arrays, ArrayRecord)


def test_clients_of_the_older_api_are_passed_through() -> None:
    names = list(initial_model())
    grid = InProcessGrid(legacy_client(names), 1)
    from flwr.common import GetParametersIns, GetPropertiesIns, ReconnectIns
    from flwr.server.compat.grid_client_proxy import GridClientProxy

    proxy = legacy._Client("0", GridClientProxy(next(iter(grid.get_node_ids())), grid, 1))
    assert proxy.get_properties(GetPropertiesIns({}), None, 0).properties["hosting"] == "logical"
    assert proxy.reconnect(ReconnectIns(None), None, 0).reason == ""
    assert proxy.get_parameters(GetParametersIns({}), None, 0).parameters.tensors == []


@pytest.mark.parametrize("runner", [run_message, run_legacy])
def test_secure_aggregation_is_found_out_after_a_round_that_said_nothing(runner) -> None:
    count = iter(range(100))

    def same_later(client: int, arrays: dict, metrics: dict) -> None:
        start = initial_model()
        moved = next(count) >= TARGETS
        arrays.update({n: a + np.asarray(int(moved)).astype(a.dtype) for n, a in start.items() if n != "mask"})
        arrays["mask"] = start["mask"]

    full = {"fraction_train": 1.0} if runner is run_message else {"fraction_fit": 1.0}
    with pytest.raises(strategies.SecureAggregationError):
        runner("fedpcd", tamper=same_later, **full)


def test_subclasses_of_either_side_do_not_get_around_the_privacy_check() -> None:
    class Mine(strategies.FedPCD):  # type: ignore[misc, valid-type]
        def configure_train(self, *args, **keywords):
            return super().configure_train(*args, **keywords)

    class Theirs(DifferentialPrivacyServerSideFixedClipping):
        pass

    for inner, outer in (
        (Mine, DifferentialPrivacyServerSideFixedClipping),
        (strategies.FedPCD, Theirs),
        (Mine, Theirs),
    ):
        with pytest.raises(strategies.CentralPrivacyError):
            outer(inner(**OURS), 1.0, 1.0, 2).start(
                InProcessGrid(message_client(), 2), record({"weight": initial_model()["weight"]}), num_rounds=1
            )


@pytest.mark.parametrize(
    ("keywords", "pattern"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"evaluate_every": 0}, "evaluate_every"),
        ({"evaluate_every": 1.5}, "evaluate_every"),
        ({"local_learning_rate": 0.0}, "local_learning_rate"),
        ({"local_learning_rate": float("inf")}, "local_learning_rate"),
        ({"local_learning_rate": "x"}, "local_learning_rate"),
        ({"norm_screen": -1}, "norm_screen"),
        ({"wait_timeout": float("nan")}, "wait_timeout"),
        ({"code_hash": "x", "client_ids": "node"}, "code_hash needs"),
        ({"buffer_patterns": "*x"}, "buffer_patterns"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_named_at_once(keywords: dict, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        strategies.FedAvg(**keywords)


def test_numbers_of_numpy_are_numbers() -> None:
    strategy = strategies.FedPCD(tau=np.float32(0.5), history_window=np.int64(3), seed=np.int64(1))
    assert strategy.rule.tau == 0.5


def test_a_second_start_is_a_run_of_its_own() -> None:
    strategy = strategies.FedPCD(tau=0.3, normalization="ema", fraction_train=0.5, min_train_nodes=1, **OURS)
    start = record(initial_model())
    models = [
        arrays_of(strategy.start(InProcessGrid(message_client(conflict), 3), start, num_rounds=3).arrays)
        for _ in range(2)
    ]
    assert_same_bits(*models)


def test_flowers_minimum_of_training_nodes_is_waited_for() -> None:
    with pytest.raises(strategies.RosterError, match="2 of 5 clients are reachable"):
        run_message("fedavg", nodes=2, client_ids="node", code_hash=None, min_train_nodes=5, wait_timeout=0.0)


def test_a_fraction_of_the_clients_evaluates_where_asked_to() -> None:
    run = run_message("fedavg", rounds=1, fraction_evaluate=0.25)
    assert len(run.evaluations[0].metrics) == 3
    older = run_legacy("fedavg", rounds=1, fraction_evaluate=0.25)
    assert older.evaluations[0].metrics.keys() == run.evaluations[0].metrics.keys()


def test_older_api_names_clients_that_report_a_bad_status() -> None:
    class Refusing(legacy._Client):
        def fit(self, ins, timeout, group_id):
            result = super().fit(ins, timeout, group_id)
            if self.cid == "3":
                result.status = Status(Code.FIT_NOT_IMPLEMENTED, "no data today")
            return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(legacy, "_Client", Refusing)
        report = run_legacy("fedavg", rounds=1, fraction_fit=1.0).rounds[0]
    (rejection,) = report.rejections
    assert (rejection.client_id, rejection.kind, rejection.reason) == ("3", "error", "no data today")


def test_older_api_survives_results_of_wrong_types() -> None:
    class Odd(legacy._Client):
        def fit(self, ins, timeout, group_id):
            result = super().fit(ins, timeout, group_id)
            result.num_examples = [5] if self.cid == "3" else result.num_examples
            return result

        def evaluate(self, ins, timeout, group_id):
            result = super().evaluate(ins, timeout, group_id)
            result.loss = [1.0] if self.cid == "3" else result.loss
            return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(legacy, "_Client", Odd)
        run = run_legacy("fedavg", rounds=1, fraction_fit=1.0)
    assert [r.client_id for r in run.rounds[0].rejections] == ["3"]
    assert "loss" not in run.evaluations[0].metrics["3"]
    with pytest.raises(RuntimeError, match="without configure_fit"):
        legacy.FedAvg().aggregate_fit(1, [], [])


@pytest.mark.parametrize("runner", [run_message, run_legacy])
def test_a_step_out_of_range_skips_the_round_instead_of_ending_the_run(runner) -> None:
    def far(client: int, arrays: dict, metrics: dict) -> None:
        arrays["half"] = np.full(3, -6e4 - client, np.float16)

    run = runner("fedpcd", tamper=far, norm_screen=0.0, server_learning_rate=10.0)
    assert all(r.skipped and r.diagnostics["status"] == "overflow" for r in run.rounds)
    assert "'half' infinite in float16" in run.rounds[0].diagnostics["error"]
    assert_same_bits(run.model, initial_model())


def test_training_metrics_do_not_depend_on_the_clock() -> None:
    first, second = (run_message("fedpcd").result.train_metrics_clientapp for _ in range(2))
    assert {r: dict(m) for r, m in first.items()} == {r: dict(m) for r, m in second.items()}


def test_a_message_for_a_node_that_is_not_there_is_an_error_reply() -> None:
    grid = InProcessGrid(message_client(), 1)
    (reply,) = grid.send_and_receive([Message(RecordDict(), 12345, "query")])
    assert reply.has_error()
    assert list(InProcessGrid(message_client(), node_configs=[]).get_node_ids()) == []


def test_a_round_without_any_reachable_client_is_skipped() -> None:
    class Leaving(InProcessGrid):
        gone = False

        def get_node_ids(self):
            return [] if self.gone else super().get_node_ids()

    grid = Leaving(message_client(), 2)

    def leave(report) -> None:
        grid.gone = True

    run = run_message("fedpcd", grid=grid, on_round=leave, wait_timeout=0.0, rounds=2, fraction_evaluate=0.0)
    assert run.model["weight"].tobytes() != initial_model()["weight"].tobytes()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Traceback ...\n  File x\nValueError: boom", "ValueError: boom"),
        (
            "a\nException ClientAppException occurred. Message: device='cuda' is not there'>",
            "device='cuda' is not there",
        ),
        ("", "unknown error"),
        (None, "unknown error"),
        ("x" * 10**7, "x" * 10_000),
    ],
    ids=["traceback", "wrapped", "empty", "none", "endless"],
)
def test_error_texts_are_cut_to_what_happened(text, expected) -> None:
    from strategies.logs import last_line

    assert last_line(text) == expected
