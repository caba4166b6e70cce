from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict

from client_app.client import Order, evaluate_client
from client_app.config import TaskConfig
from client_app.models import build_model
from client_app.partition import load_partition
from server_app.evaluation import (
    ClientMetrics,
    DisagreementError,
    ServerEvaluation,
    check_agreement,
    initial_arrays,
    usable_metrics,
)
from strategies.protocol import ACCURACY, LOSS, NUM_EXAMPLES
from strategies.reports import EvaluationReport, Rejection

CLIENTS = 30
RUN_CONFIG = {"num-clients": CLIENTS, "alpha": 0.1, "seed": 5}
TASK = TaskConfig.from_run_config(RUN_CONFIG)


def a_model() -> ArrayRecord:
    """Return a model that is right about some examples and wrong about others."""
    state = build_model(TASK).state_dict()
    generator = torch.Generator().manual_seed(1)
    return ArrayRecord(
        {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in state.items()}
    )


def on_clients(arrays: ArrayRecord) -> ClientMetrics:
    state = arrays.to_torch_state_dict()
    node = {"partition-id": 0, "num-partitions": 1}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=RUN_CONFIG)
    found = {}
    for client in map(str, range(CLIENTS)):
        result = evaluate_client(context, Order(client, 1), state)
        found[client] = {
            ACCURACY: result.accuracy,
            LOSS: result.loss,
            NUM_EXAMPLES: result.num_examples,
        }
    return found


def test_the_server_measures_what_the_clients_measure() -> None:
    arrays = a_model()
    mine, theirs = ServerEvaluation(TASK)(arrays), on_clients(arrays)
    assert list(mine) == [str(client) for client in range(CLIENTS)]
    assert len({values[ACCURACY] for values in mine.values()}) > 3
    for client, values in theirs.items():
        assert mine[client][ACCURACY] == values[ACCURACY]
        assert mine[client][NUM_EXAMPLES] == values[NUM_EXAMPLES]
        assert mine[client][LOSS] == pytest.approx(values[LOSS], abs=1e-6)


def test_every_example_counts_for_each_client_that_has_it() -> None:
    shared = np.concatenate(load_partition(TASK).test)
    assert len(np.unique(shared)) < len(shared)  # else this task would not show it
    metrics = ServerEvaluation(TASK)(a_model())
    assert sum(values[NUM_EXAMPLES] for values in metrics.values()) == len(shared)


def test_evaluation_does_not_depend_on_what_was_evaluated_before() -> None:
    evaluation = ServerEvaluation(TASK)
    first = evaluation(a_model())
    evaluation(initial_arrays(TASK))
    assert evaluation(a_model()) == first


def test_a_diverged_model_is_evaluated_all_the_same() -> None:
    state = {name: torch.full_like(value, math.nan) for name, value in build_model(TASK).state_dict().items()}
    metrics = ServerEvaluation(TASK)(ArrayRecord(state))
    assert all(math.isnan(values[LOSS]) for values in metrics.values())
    assert all(0.0 <= values[ACCURACY] <= 1.0 for values in metrics.values())


def test_the_number_of_torch_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    ServerEvaluation(TASK)(a_model())
    assert torch.get_num_threads() == before


def test_initial_models_depend_on_the_seed_alone() -> None:
    def content(run_config: dict[str, int | float]) -> list[bytes]:
        arrays = initial_arrays(TaskConfig.from_run_config(run_config))
        return [array.numpy().tobytes() for array in arrays.values()]

    assert content({"seed": 1}) == content({"seed": 1, "num-clients": 7, "alpha": 1.0})
    assert content({"seed": 1}) != content({"seed": 2})
    assert list(initial_arrays(TASK)) == list(build_model(TASK).state_dict())


def test_equal_accuracies_agree() -> None:
    same = {"0": {ACCURACY: 0.5, LOSS: 1.0}}
    check_agreement(1, same, {"0": {ACCURACY: 0.5 + 1e-9, LOSS: 9.0}})


@pytest.mark.parametrize("accuracy", [0.55, 0.45, math.nan])
def test_a_disagreement_names_round_and_client(accuracy: float) -> None:
    with pytest.raises(DisagreementError, match=r"round 7: .*accuracy 0\.5 for client 4"):
        check_agreement(7, {"4": {ACCURACY: 0.5}}, {"4": {ACCURACY: accuracy}})


def test_a_client_that_the_server_does_not_know_is_a_disagreement() -> None:
    with pytest.raises(DisagreementError, match="client 99"):
        check_agreement(1, {"4": {ACCURACY: 0.5}}, {"99": {ACCURACY: 0.5}})


def test_clients_that_did_not_answer_cannot_disagree() -> None:
    check_agreement(1, {"4": {ACCURACY: 0.5}, "5": {ACCURACY: 0.1}}, {"5": {ACCURACY: 0.1}})


def test_an_answer_without_a_usable_accuracy_costs_its_sender_the_evaluation() -> None:
    silent = Rejection("d", "silent", "no answer")
    report = EvaluationReport(
        3,
        {
            "a": {ACCURACY: 0.5, LOSS: 1.0, NUM_EXAMPLES: 2.0},
            "b": {LOSS: 1.0, NUM_EXAMPLES: 2.0},
            "c": {ACCURACY: 1.5, LOSS: 1.0, NUM_EXAMPLES: 2.0},
        },
        (silent,),
    )
    metrics, rejections = usable_metrics(report)
    assert list(metrics) == ["a"]
    assert rejections[0] == silent
    assert [(rejection.client_id, rejection.kind) for rejection in rejections[1:]] == [
        ("b", "invalid"),
        ("c", "invalid"),
    ]
    assert "'accuracy' is missing" in rejections[1].reason
    assert "= 1.5" in rejections[2].reason


def test_a_missing_loss_is_not_a_number() -> None:
    metrics, rejections = usable_metrics(EvaluationReport(1, {"a": {ACCURACY: 0.5, NUM_EXAMPLES: 2.0}}, ()))
    assert math.isnan(metrics["a"][LOSS])
    assert rejections == []
