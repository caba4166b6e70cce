"""What a rule needs is asked of the clients, checked in every reply, and missed by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import MessageType

import strategies
from strategies.engine import Engine, Options
from strategies.inprocess import InProcessGrid
from strategies.model import Model
from strategies.replies import Reply
from strategies.rules import RULES
from strategies.rules.updates import LOSS_BEFORE, METRIC_NEEDS, NEEDS, TRIAL_LOSSES
from tests.federations import run_legacy, run_message
from tests.support import message_client

BOTH = pytest.mark.parametrize("runner", [run_message, run_legacy])
ASKING = sorted(name for name, rule in RULES.items() if set(rule().required()) & set(METRIC_NEEDS))


def metric_of(name: str) -> str:
    """The first metric that a method needs."""
    return next(need for need in RULES[name]().required() if need in METRIC_NEEDS)


@pytest.mark.parametrize("name", sorted(RULES))
def test_declared_needs_are_known_ones(name: str) -> None:
    assert set(RULES[name].needs) <= set(NEEDS)
    assert set(RULES[name]().required()) <= set(NEEDS)


@BOTH
@pytest.mark.parametrize("name", ASKING)
def test_a_client_without_the_metric_is_rejected_with_its_name_and_the_round_goes_on(runner, name: str) -> None:
    need = metric_of(name)

    def forgetful(client: int, arrays: dict, metrics: dict) -> None:
        if client == 4:
            del metrics[need]

    everyone = {"fraction_train": 1.0} if runner is run_message else {"fraction_fit": 1.0}
    run = runner(name, rounds=1, tamper=forgetful, **everyone)
    assert [(r.client_id, r.kind) for r in run.rounds[0].rejections] == [("4", "invalid")]
    assert repr(need) in run.rounds[0].rejections[0].reason
    assert not run.rounds[0].skipped


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
def test_a_metric_that_is_no_finite_number_from_zero_up_costs_only_its_sender(name: str, value: float) -> None:
    need = metric_of(name)

    def strange(client: int, arrays: dict, metrics: dict) -> None:
        if client == 4:
            metrics[need] = value

    run = run_message(name, rounds=1, tamper=strange, fraction_train=1.0)
    assert [r.client_id for r in run.rounds[0].rejections] == ["4"]
    assert all(np.isfinite(array).all() for array in run.model.values())


@pytest.mark.parametrize("name", ASKING)
def test_a_run_whose_clients_all_lack_the_metric_ends_in_round_one_with_its_name(name: str) -> None:
    need = metric_of(name)
    with pytest.raises(strategies.MissingNeedError, match=f"{RULES[name].__name__} needs '{need}'"):
        run_message(name, rounds=2, code_hash=None, tamper=lambda client, arrays, metrics: metrics.pop(need))


@BOTH
@pytest.mark.parametrize("name", ASKING)
def test_one_client_that_keeps_the_metric_back_costs_its_round_where_all_run_the_servers_code(name, runner) -> None:
    # Whoever is first drawn alone could otherwise end every run, and every resumption of it.
    run = runner(name, rounds=1, tamper=lambda client, arrays, metrics: metrics.pop(metric_of(name)))
    (report,) = run.rounds
    assert report.skipped
    assert {j.kind for j in report.rejections} == {"invalid"}
    assert all(metric_of(name) in j.reason for j in report.rejections)


def test_a_rule_without_needs_sends_no_extra_config() -> None:
    assert Engine(RULES["fedavg"](), Options()).train_config() == {}
    assert Engine(RULES["fedpcd"](), Options()).train_config() == {}


def model_of(shapes: dict[str, tuple[int, ...]]) -> Model:
    return Model({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


def test_layers_hold_weight_bias_and_a_following_normalisation_of_the_same_parent() -> None:
    model = model_of(
        {
            "block.conv.weight": (2, 3),
            "block.norm.weight": (2,),
            "block.norm.bias": (2,),
            "block.conv2.weight": (2, 2),
            "head.weight": (5, 2),
            "head.bias": (5,),
        }
    )
    assert model.layer_slices == (slice(0, 10), slice(10, 14), slice(14, 29))
    assert model.array_slices[:3] == (slice(0, 6), slice(6, 8), slice(8, 10))


def test_layers_of_arrays_without_module_names_are_matrices_with_the_vectors_that_follow() -> None:
    model = model_of({"0": (4, 3), "1": (4,), "2": (2, 4), "3": (2,)})
    assert model.layer_slices == (slice(0, 16), slice(16, 26))


def test_trial_losses_are_asked_only_of_accepted_clients_and_nan_where_nobody_answers() -> None:
    class Probe(RULES["fedavg"]):  # type: ignore[misc, valid-type]
        needs = (TRIAL_LOSSES,)

        def aggregate(self, updates, state):
            aggregate, state = super().aggregate(updates, state)
            losses = updates.trial_losses(0.5 * aggregate.step)
            return replace(aggregate, diagnostics={"losses": losses.tolist()}), state

    asked = []

    def ask(arrays, clients):
        asked.append((arrays, clients))
        return {"0": 1.5}

    model = model_of({"w": (3, 2)})
    replies = [Reply(str(c), {"w": np.full((3, 2), 2.0 * c, np.float32)}, 1) for c in range(2)]
    replies.append(Reply("2", None, 1))
    engine = Engine(Probe(), Options(norm_screen=0.0))
    _, report = engine.aggregate(1, model, replies, ("0", "1", "2"), 0.0, ("0", "1", "2"), ask)
    assert report.diagnostics["losses"][0] == 1.5
    assert np.isnan(report.diagnostics["losses"][1])
    (arrays, clients) = asked[0]
    assert clients == ("0", "1")
    np.testing.assert_array_equal(arrays["w"], np.full((3, 2), 0.5))


def test_d1_q_fedavg_takes_each_clients_own_loss_and_no_evaluate_function() -> None:
    # flower #659, #804: one server-side loss for every client, or none at all.
    def equal(client: int, arrays: dict, metrics: dict) -> None:
        metrics[LOSS_BEFORE] = 1.0

    def worst(client: int, arrays: dict, metrics: dict) -> None:
        metrics[LOSS_BEFORE] = 100.0 if client == 3 else 0.01

    for runner in (run_message, run_legacy):
        key = "fraction_train" if runner is run_message else "fraction_fit"
        same = runner("qfedavg", rounds=1, tamper=equal, q=2.0, **{key: 1.0})
        differing = runner("qfedavg", rounds=1, tamper=worst, q=2.0, **{key: 1.0})
        assert same.model["weight"].tobytes() != differing.model["weight"].tobytes()


def test_a_line_search_that_nobody_ever_answers_ends_the_run_with_the_keys_name() -> None:
    def deaf(message, context):
        return InProcessGrid.SILENT if message.metadata.message_type == MessageType.EVALUATE else None

    grid = InProcessGrid(message_client(), 3, intercept=deaf)
    with pytest.raises(strategies.MissingNeedError, match=r"FedMDFG needs 'trial-losses'.*split='training'"):
        run_message("fedmdfg", rounds=1, grid=grid, fraction_evaluate=0.0, code_hash=None)
    grid = InProcessGrid(message_client(), 3, intercept=deaf)
    assert len(run_message("fedmdfg", rounds=1, grid=grid, fraction_evaluate=0.0).rounds) == 1
