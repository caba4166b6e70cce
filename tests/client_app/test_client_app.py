from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import (
    EvaluateIns,
    FitIns,
    GetParametersIns,
    GetPropertiesIns,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.compat.common import recorddict_compat as compat
from flwr.supercore.task_identity import TaskIdentity

from client_app import client
from client_app.app import app
from client_app.code_hash import code_hash
from client_app.config import ConfigError, TaskConfig
from client_app.data import load_dataset
from client_app.models import build_model
from client_app.partition import load_partition
from client_app.training import evaluate
from strategies import protocol

SIMULATED = {"partition-id": 1, "num-partitions": 3}
CONFIG: dict[str, Any] = {"client-id": "4", "server-round": 1, "local-learning-rate": 0.1}


@pytest.fixture(autouse=True)
def identity() -> None:
    # Flower's Message asks in whose name it is made.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def context(node_config: dict[str, Any] | None = None, **run_config: Any) -> Context:
    return Context(1, 5, dict(node_config or SIMULATED), RecordDict(), run_config)


def call(kind: str, content: RecordDict, where: Context) -> RecordDict:
    message = Message(content, 5, kind)
    message.metadata.__dict__["_message_id"] = "1"
    return app(message, where).content


def initial(task: TaskConfig | None = None) -> ArrayRecord:
    return ArrayRecord(build_model(task or TaskConfig()).state_dict())


def train(
    where: Context, arrays: ArrayRecord | None = None, **changes: Any
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    content = RecordDict({protocol.ARRAYS: arrays or initial(), protocol.CONFIG: ConfigRecord(config)})
    reply = call("train", content, where)
    assert list(reply) == [protocol.ARRAYS, protocol.METRICS]
    return {name: array.numpy() for name, array in reply[protocol.ARRAYS].items()}, dict(reply[protocol.METRICS])


def evaluate_on(where: Context, arrays: ArrayRecord, **changes: Any) -> dict[str, Any]:
    config = {"client-id": "4", "server-round": 1} | changes
    reply = call("evaluate", RecordDict({protocol.ARRAYS: arrays, protocol.CONFIG: ConfigRecord(config)}), where)
    assert list(reply) == [protocol.METRICS]
    return dict(reply[protocol.METRICS])


def equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return list(first) == list(second) and all(np.array_equal(first[name], second[name]) for name in first)


def test_a_simulated_node_says_which_clients_it_serves() -> None:
    roster = call("query", RecordDict(), context({"partition-id": 1, "num-partitions": 3}, **{"num-clients": 8}))
    assert dict(roster[protocol.ROSTER]) == {
        "client-ids": ["1", "4", "7"],
        "hosting": "logical",
        "num-partitions": 3,
        "code-hash": code_hash(),
    }


def test_a_simulated_node_may_serve_nobody() -> None:
    roster = call("query", RecordDict(), context({"partition-id": 2, "num-partitions": 3}, **{"num-clients": 2}))
    assert list(roster[protocol.ROSTER][protocol.CLIENT_IDS]) == []


def test_a_deployed_node_says_that_it_is_one_client() -> None:
    roster = call("query", RecordDict(), context({"client-id": "site-a", "partition-id": 3}))[protocol.ROSTER]
    assert (roster[protocol.CLIENT_IDS], roster[protocol.HOSTING], roster[protocol.NUM_PARTITIONS]) == (
        ["site-a"],
        "own",
        0,
    )


def test_a_deployed_node_without_a_part_of_the_data_says_so_before_any_training() -> None:
    with pytest.raises(ConfigError, match=r"client-id='site-a' does not say which part.*add partition-id"):
        call("query", RecordDict(), context({"client-id": "site-a"}))


def test_a_nodes_own_folder_and_device_go_before_the_runs(tmp_path: Path) -> None:
    own = {"client-id": "site-a", "partition-id": 3, "device": "cpu", "data-dir": str(tmp_path)}
    task = client.task_of(context(own, device="cuda"))
    assert (task.device, task.data_dir) == ("cpu", str(tmp_path))


def test_a_node_refuses_a_run_whose_device_it_lacks_before_any_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda'"):
        call("query", RecordDict(), context(device="cuda"))


def test_a_node_refuses_a_run_with_a_wrong_setting_before_any_training() -> None:
    with pytest.raises(ConfigError, match="batch-size"):
        call("query", RecordDict(), context(**{"batch-size": 1.5}))


def test_training_takes_one_gradient_step_on_the_clients_own_examples() -> None:
    task = TaskConfig()
    images, labels = load_dataset(task).train_examples(load_partition(task).train[4])
    model = build_model(task)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    arrays, metrics = train(context())
    for (name, before), gradient in zip(model.state_dict().items(), gradients, strict=True):
        assert np.allclose(arrays[name], (before - 0.1 * gradient).numpy(), rtol=0, atol=1e-6)
    assert metrics == {
        "num-examples": len(labels),
        "train-loss": pytest.approx(loss.item(), rel=1e-6),
        "participations": 1,
    }


def test_evaluation_is_on_the_clients_own_test_examples() -> None:
    task = TaskConfig()
    images, labels = load_dataset(task).test_examples(load_partition(task).test[4])
    accuracy, loss = evaluate(build_model(task), images, labels)
    metrics = evaluate_on(context(), initial())
    assert metrics == {"num-examples": 20, "accuracy": accuracy, "loss": pytest.approx(loss, rel=1e-6)}


def test_the_same_message_gives_the_same_bits_whatever_came_before() -> None:
    run_config = {"batch-size": 4, "local-epochs": 3}
    first, _ = train(context(**run_config))
    where = context(**run_config)
    train(where, **{"client-id": "7"})
    evaluate_on(where, initial())
    torch.manual_seed(99)
    again, _ = train(where)
    assert equal(first, again)


def test_a_clients_work_does_not_depend_on_which_node_serves_it() -> None:
    first, _ = train(context({"partition-id": 1, "num-partitions": 3}, **{"batch-size": 4}))
    second, _ = train(context({"partition-id": 0, "num-partitions": 1}, **{"batch-size": 4}))
    assert equal(first, second)


@pytest.mark.parametrize("changes", [{"server-round": 2}, {"client-id": "1"}, {"local-learning-rate": 0.05}])
def test_another_round_client_or_learning_rate_gives_another_model(changes: dict[str, Any]) -> None:
    run_config = {"batch-size": 4}
    assert not equal(train(context(**run_config))[0], train(context(**run_config), **changes)[0])


def test_another_seed_gives_another_model() -> None:
    assert not equal(train(context(seed=1))[0], train(context(seed=2))[0])


def test_the_received_model_decides_and_not_the_one_trained_before() -> None:
    where = context()
    first, _ = train(where)
    onward, _ = train(where, ArrayRecord({name: Array(value) for name, value in first.items()}))
    assert not equal(first, onward)
    assert equal(first, train(where)[0])


def test_participations_are_counted_per_client_on_a_node_that_serves_several() -> None:
    where = context()
    clients = ["4", "7", "4", "4", "1"]
    counts = [train(where, **{"client-id": client})[1]["participations"] for client in clients]
    assert counts == [1, 1, 2, 3, 1]


def test_evaluation_is_not_a_participation() -> None:
    where = context()
    evaluate_on(where, initial())
    assert train(where)[1]["participations"] == 1


def test_messages_worked_on_at_the_same_time_do_not_disturb_each_other() -> None:
    run_config = {"batch-size": 3, "local-epochs": 4}
    clients = ["1", "4", "7", "10", "13", "16"]
    expected = {client: train(context(**run_config), **{"client-id": client}) for client in clients}
    results: dict[str, Any] = {}

    def work(client: str) -> None:
        results[client] = train(context(**run_config), **{"client-id": client})

    threads = [threading.Thread(target=work, args=(name,)) for name in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in clients:
        assert equal(results[name][0], expected[name][0])
        assert results[name][1] == expected[name][1]


def test_training_leaves_torchs_global_settings_alone() -> None:
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    train(context(**{"torch-threads": threads + 1}))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_diverged_training_is_reported_for_the_server_to_judge() -> None:
    arrays, metrics = train(context(**{"local-epochs": 5}), **{"local-learning-rate": 1e30})
    assert not np.isfinite(metrics["train-loss"])
    assert not all(np.isfinite(array).all() for array in arrays.values())


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_message_for_a_client_of_another_node_is_refused(kind: str) -> None:
    config = ConfigRecord({**CONFIG, "client-id": "3"})
    with pytest.raises(ValueError, match="client-id='3' is not served by this node"):
        call(kind, RecordDict({protocol.ARRAYS: initial(), protocol.CONFIG: config}), context())


@pytest.mark.parametrize("key", ["client-id", "server-round", "local-learning-rate"])
def test_a_message_without_a_needed_key_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"lacks '{key}'"):
        train(context(), **{key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("client-id", 4),
        ("server-round", 1.0),
        ("server-round", True),
        ("local-learning-rate", "0.1"),
        ("local-learning-rate", 0.0),
        ("local-learning-rate", float("nan")),
    ],
)
def test_a_message_with_an_unusable_value_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key}="):
        train(context(), **{key: value})


def test_an_integer_learning_rate_is_a_learning_rate() -> None:
    assert equal(train(context(), **{"local-learning-rate": 1})[0], train(context(), **{"local-learning-rate": 1.0})[0])


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_message_without_model_or_config_is_refused_and_says_what_it_holds(kind: str) -> None:
    with pytest.raises(ValueError, match=r"'arrays'.*'config'.*it holds: nothing"):
        call(kind, RecordDict(), context())
    with pytest.raises(ValueError, match="it holds: arrays, config"):
        call(kind, RecordDict({"arrays": MetricRecord({"x": 1}), "config": ConfigRecord()}), context())


def test_a_model_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Missing key|size mismatch"):
        train(context(), initial(TaskConfig(model="cnn")))


def test_a_deployed_client_trains_on_the_part_of_the_data_that_its_node_names() -> None:
    deployed = context({"client-id": "site-a", "partition-id": 4})
    arrays, metrics = train(deployed, **{"client-id": "site-a"})
    # Full batch: no random stream is used, so the data alone decide.
    assert equal(arrays, train(context())[0])
    assert metrics["participations"] == 1


def test_a_deployed_client_without_a_part_of_the_data_is_told_which_key_to_set() -> None:
    with pytest.raises(ConfigError, match="partition-id=<0 to 99>"):
        train(context({"client-id": "site-a"}), **{"client-id": "site-a"})


def legacy(ins: FitIns | EvaluateIns, where: Context) -> Any:
    if isinstance(ins, FitIns):
        return compat.recorddict_to_fitres(call("train", compat.fitins_to_recorddict(ins, True), where), True)
    return compat.recorddict_to_evaluateres(call("evaluate", compat.evaluateins_to_recorddict(ins, True), where))


def legacy_model() -> Any:
    return ndarrays_to_parameters([value.numpy() for value in build_model(TaskConfig()).state_dict().values()])


@pytest.mark.parametrize("run_config", [{}, {"batch-size": 4, "local-epochs": 2}])
def test_both_apis_train_to_the_same_bits(run_config: dict[str, Any]) -> None:
    arrays, metrics = train(context(**run_config))
    result = legacy(FitIns(legacy_model(), dict(CONFIG)), context(**run_config))
    assert equal(arrays, dict(zip(arrays, parameters_to_ndarrays(result.parameters), strict=True)))
    assert {"num-examples": result.num_examples, **result.metrics} == metrics


def test_both_apis_evaluate_to_the_same_numbers() -> None:
    metrics = evaluate_on(context(), initial())
    result = legacy(EvaluateIns(legacy_model(), {"client-id": "4", "server-round": 1}), context())
    assert {"num-examples": result.num_examples, "loss": result.loss, **result.metrics} == metrics


def test_the_legacy_roster_is_one_string_of_client_ids() -> None:
    content = compat.getpropertiesins_to_recorddict(GetPropertiesIns({}))
    reply = call("get_properties", content, context(**{"num-clients": 8}))
    assert compat.recorddict_to_getpropertiesres(reply).properties == {
        "client-ids": "1,4,7",
        "hosting": "logical",
        "num-partitions": 3,
        "code-hash": code_hash(),
    }


def test_a_legacy_server_may_ask_a_client_for_the_initial_model() -> None:
    content = compat.getparametersins_to_recorddict(GetParametersIns({}))
    reply = compat.recorddict_to_getparametersres(call("get_parameters", content, context(seed=3)), True)
    expected = build_model(TaskConfig(seed=3)).state_dict().values()
    arrays = parameters_to_ndarrays(reply.parameters)
    assert all(np.array_equal(array, value.numpy()) for array, value in zip(arrays, expected, strict=True))


def test_a_legacy_model_with_too_few_arrays_is_refused() -> None:
    few = ndarrays_to_parameters([np.zeros(3)])
    with pytest.raises(ValueError, match=r"has 1 arrays, the model 4: 1\.weight"):
        legacy(FitIns(few, dict(CONFIG)), context())


def test_a_message_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="No train function registered with name 'other'"):
        call("train.other", RecordDict(), context())
