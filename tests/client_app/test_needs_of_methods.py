"""What methods ask of the client beyond its update: metrics, loss transforms, personal models, Newton directions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import EvaluateIns, FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common import recorddict_compat as compat
from flwr.server import ServerConfig
from flwr.server.compat import start_grid
from flwr.supercore.task_identity import TaskIdentity
from torch.nn import functional

import strategies
from client_app import STATE_DIR_VARIABLE, client, client_state, newton, streams
from client_app.app import app
from client_app.code_hash import code_hash
from client_app.config import TaskConfig
from client_app.data import load_dataset
from client_app.models import build_model
from client_app.needs import read_needs
from client_app.newton import inverse_times, quasi_newton
from client_app.partition import load_partition
from client_app.personal import load_personal
from client_app.training import train_locally
from client_app.utility import Utility
from strategies import legacy, protocol
from strategies.inprocess import InProcessGrid

CONFIG: dict[str, Any] = {"client-id": "4", "server-round": 1, "local-learning-rate": 0.1}
METRICS = "loss-before,accuracy-before,accuracy-after"
PLAIN = {"num-examples", "train-loss", "participations"}
NEWTON = {"needs": "newton-direction"}
DITTO = {"needs": "personal-model"}

Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def identity() -> None:
    # Flower's Message asks in whose name it is made.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


@pytest.fixture(params=["message", "legacy"])
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def context(**run_config: Any) -> Context:
    return Context(1, 5, {"partition-id": 1, "num-partitions": 3}, RecordDict(), run_config)


def initial() -> Arrays:
    return {name: value.numpy() for name, value in build_model(TaskConfig()).state_dict().items()}


def moved(arrays: Arrays, seed: int = 0) -> Arrays:
    generator = np.random.default_rng(seed)
    return {n: (a + 0.1 * generator.standard_normal(a.shape)).astype(a.dtype) for n, a in arrays.items()}


def call(kind: str, content: RecordDict, where: Context) -> RecordDict:
    message = Message(content, 5, kind)
    message.metadata.__dict__["_message_id"] = "1"
    return app(message, where).content


def content_of(arrays: Arrays, config: Mapping[str, Any]) -> RecordDict:
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return RecordDict({protocol.ARRAYS: record, protocol.CONFIG: ConfigRecord(dict(config))})


def parameters_of(arrays: Arrays) -> Any:
    return ndarrays_to_parameters(list(arrays.values()))


def fit(
    api: str, where: Context, arrays: Arrays | None = None, **changes: Any
) -> tuple[Arrays, dict[str, Any], Arrays]:
    """Train; the trained model, the metrics and the Newton direction, however the API carries them."""
    arrays, config = arrays or initial(), {**CONFIG, **{k.replace("_", "-"): v for k, v in changes.items()}}
    if api == "message":
        reply = call("train", content_of(arrays, config), where)
        records = [{n: a.numpy() for n, a in reply[key].items()} for key in reply if key != protocol.METRICS]
        assert [key for key in reply if key != protocol.METRICS] == ["arrays", "newton-direction"][: len(records)]
        return records[0], dict(reply[protocol.METRICS]), records[1] if len(records) > 1 else {}
    content = compat.fitins_to_recorddict(FitIns(parameters_of(arrays), config), True)
    result = compat.recorddict_to_fitres(call("train", content, where), True)
    names, answers = list(arrays), parameters_to_ndarrays(result.parameters)
    assert len(answers) in (len(names), 2 * len(names))
    trained, direction = answers[: len(names)], answers[len(names) :]
    metrics = {"num-examples": result.num_examples, **result.metrics}
    return dict(zip(names, trained, strict=True)), metrics, dict(zip(names, direction, strict=bool(direction)))


def evaluate(api: str, where: Context, arrays: Arrays | None = None, **changes: Any) -> dict[str, Any]:
    arrays, config = arrays or initial(), {"client-id": "4", "server-round": 1} | changes
    if api == "message":
        return dict(call("evaluate", content_of(arrays, config), where)[protocol.METRICS])
    content = compat.evaluateins_to_recorddict(EvaluateIns(parameters_of(arrays), config), True)
    result = compat.recorddict_to_evaluateres(call("evaluate", content, where))
    return {"num-examples": result.num_examples, "loss": result.loss, **result.metrics}


def examples(split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    task = TaskConfig()
    dataset, partition = load_dataset(task), load_partition(task)
    if split == "train":
        return dataset.train_examples(partition.train[4])
    return dataset.test_examples(partition.test[4])


def loaded(arrays: Mapping[str, Any]) -> torch.nn.Module:
    model = build_model(TaskConfig())
    model.load_state_dict({name: torch.as_tensor(value) for name, value in arrays.items()})
    return model


def measure(arrays: Mapping[str, Any], split: str = "train") -> tuple[float, float]:
    """Accuracy and mean loss, in plain torch."""
    images, labels = examples(split)
    with torch.no_grad():
        logits = loaded(arrays)(images)
    return (logits.argmax(1) == labels).double().mean().item(), functional.cross_entropy(logits.double(), labels).item()


def gradient(arrays: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], float]:
    """The full-batch gradient and the loss, in plain torch."""
    model = loaded(arrays)
    loss = functional.cross_entropy(model(examples()[0]), examples()[1])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return {n: g.numpy() for (n, _), g in zip(model.named_parameters(), gradients, strict=True)}, loss.item()


def same_bits(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return list(first) == list(second) and all(
        np.asarray(first[n]).tobytes() == np.asarray(second[n]).tobytes() for n in first
    )


def close(first: Mapping[str, Any], second: Mapping[str, Any], tolerance: float) -> bool:
    return list(first) == list(second) and all(
        np.allclose(np.asarray(first[n]), np.asarray(second[n]), rtol=0, atol=tolerance) for n in first
    )


def flat(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype=np.float64).ravel() for a in arrays.values()])


# ---- metrics before and after ----


def test_metrics_before_are_of_the_received_model_and_after_of_the_trained_one(api: str) -> None:
    received = moved(initial())
    trained, metrics, _ = fit(
        api, context(**{"batch-size": 8, "local-epochs": 5}), received, needs=METRICS, local_learning_rate=0.3
    )
    accuracy, loss = measure(received)
    assert metrics["loss-before"] == pytest.approx(loss, rel=1e-6)
    assert metrics["accuracy-before"] == accuracy
    assert metrics["accuracy-after"] == measure(trained)[0]
    assert metrics["accuracy-after"] != metrics["accuracy-before"]


def test_both_apis_report_the_same_metrics_to_the_bit() -> None:
    run_config = {"batch-size": 4, "local-epochs": 2}
    (first, metrics, _), (second, others, _) = (
        fit(api, context(**run_config), needs=METRICS) for api in ("message", "legacy")
    )
    assert same_bits(first, second)
    assert metrics == others


@pytest.mark.parametrize("need", METRICS.split(","))
def test_only_the_metrics_that_were_asked_for_are_reported(api: str, need: str) -> None:
    assert set(fit(api, context(), needs=need)[1]) == PLAIN | {need}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    model, sizes = build_model(TaskConfig()), []

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        sizes.append(len(output))

    handle = model.register_forward_hook(count)
    monkeypatch.setattr(client, "_model", lambda task: model)
    yield sizes
    handle.remove()


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (None, 1),
        ("", 1),
        ("train-loss", 1),
        ("trial-losses", 1),
        ("loss-before", 2),
        ("accuracy-before", 2),
        ("loss-before, accuracy-before", 2),
        ("accuracy-after", 2),
        (METRICS, 3),
        ("personal-model", 2),
        ("newton-direction", 2),
    ],
)
def test_the_examples_pass_the_model_only_as_often_as_the_needs_ask(
    api: str, passes: list[int], needs: str | None, expected: int
) -> None:
    changes = {} if needs is None else {"needs": needs}
    fit(api, context(), **changes)
    assert passes == [len(examples()[1])] * expected


def test_a_plain_message_gets_no_metric_and_no_record_beyond_the_update(api: str) -> None:
    _, metrics, direction = fit(api, context())
    assert set(metrics) == PLAIN
    assert direction == {}


def test_asking_for_metrics_does_not_change_a_bit_of_the_trained_model(api: str) -> None:
    run_config = {"batch-size": 4, "local-epochs": 3}
    plain, metrics, _ = fit(api, context(**run_config))
    asked, more, _ = fit(api, context(**run_config), needs=METRICS)
    assert same_bits(plain, asked)
    assert metrics == {key: more[key] for key in metrics}


# ---- PropFair ----

MARGIN = 0.2
# Baseline M, loss, value and slope with the linear fallback, value and slope with the Huber one.
PROPFAIR = [
    (2.0, 0.0, 0.0, 0.5, 0.0, 0.5),
    (2.0, 0.5, 0.2876820724517809, 0.6666666666666666, 0.2876820724517809, 0.6666666666666666),
    (2.0, 1.5, 1.3862943611198906, 2.0, 1.3862943611198906, 2.0),
    (2.0, 1.79, 2.2537949288246137, 4.761904761904763, 2.2537949288246137, 4.761904761904763),
    (2.0, 1.85, 0.925, 0.5, 9.25, 5.0),
    (2.0, 3.0, 1.5, 0.5, 15.0, 5.0),
    (2.0, 4.9, 2.45, 0.5, 24.5, 5.0),
    (5.0, 0.0, 0.0, 0.2, 0.0, 0.2),
    (5.0, 0.5, 0.10536051565782628, 0.2222222222222222, 0.10536051565782628, 0.2222222222222222),
    (5.0, 1.5, 0.35667494393873245, 0.2857142857142857, 0.35667494393873245, 0.2857142857142857),
    (5.0, 1.79, 0.44316697529217586, 0.3115264797507788, 0.44316697529217586, 0.3115264797507788),
    (5.0, 1.85, 0.4620354595965587, 0.31746031746031744, 0.4620354595965587, 0.31746031746031744),
    (5.0, 3.0, 0.916290731874155, 0.5, 0.916290731874155, 0.5),
    (5.0, 4.9, 0.9800000000000001, 0.2, 24.5, 5.0),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-9)])
@pytest.mark.parametrize("fallback", ["linear", "huber"])
@pytest.mark.parametrize("case", PROPFAIR, ids=[f"M={c[0]}-l={c[1]}" for c in PROPFAIR])
def test_propfairs_values_and_slopes_are_the_references(
    case: tuple[float, ...], fallback: str, dtype: torch.dtype, tolerance: float
) -> None:
    baseline, loss, *expected = case
    value, slope = expected[:2] if fallback == "linear" else expected[2:]
    point = torch.tensor(loss, dtype=dtype, requires_grad=True)
    result = Utility(baseline, MARGIN, fallback)(point)
    (derivative,) = torch.autograd.grad(result, point)
    assert result.item() == pytest.approx(value, rel=tolerance, abs=tolerance)
    assert derivative.item() == pytest.approx(slope, rel=tolerance)


@pytest.mark.parametrize("loss", [0.1, 1.0, 7.0])
def test_propfair_with_a_large_baseline_is_the_loss_over_it(loss: float) -> None:
    for baseline in (1e2, 1e4, 1e6):
        scaled = baseline * Utility(baseline, MARGIN)(torch.tensor(loss, dtype=torch.float64)).item()
        assert abs(scaled - loss) <= loss**2 / baseline


@pytest.mark.parametrize(
    ("baseline", "fallback", "slope"),
    [(5.0, "linear", None), (5.0, "huber", None), (2.0, "linear", 0.5), (2.0, "huber", 5.0)],
)
def test_a_propfair_step_is_the_plain_one_times_the_slope_and_the_reported_loss_is_plain(
    api: str, baseline: float, fallback: str, slope: float | None
) -> None:
    slopes, loss = gradient(initial())
    slope = slope or 1 / (baseline - loss)
    utility = {"utility_baseline": baseline, "utility_margin": MARGIN, "utility_fallback": fallback}
    trained, metrics, _ = fit(api, context(), loss_transform="propfair", **utility)
    expected = {name: start - 0.1 * slope * slopes[name] for name, start in initial().items()}
    assert close(trained, expected, 1e-6)
    assert not close(trained, fit(api, context())[0], 1e-4)
    assert metrics["train-loss"] == pytest.approx(loss, rel=1e-6)
    assert set(metrics) == PLAIN


@pytest.mark.parametrize(
    "wrong",
    [{"baseline": 0.1}, {"baseline": float("nan")}, {"margin": 0.0}, {"margin": -1.0}, {"fallback": "cubic"}],
)
def test_a_propfair_message_with_an_unusable_utility_is_refused(wrong: dict[str, Any]) -> None:
    settings = {"baseline": 2.0, "margin": MARGIN, "fallback": "linear", **wrong}
    config = {"loss-transform": "propfair", **{f"utility-{key}": value for key, value in settings.items()}}
    with pytest.raises(ValueError, match="not a utility"):
        read_needs(config)


@pytest.mark.parametrize("key", ["utility-baseline", "utility-margin", "utility-fallback"])
def test_a_propfair_message_that_lacks_a_setting_is_refused_by_name(key: str) -> None:
    config = {
        "loss-transform": "propfair",
        "utility-baseline": 2.0,
        "utility-margin": MARGIN,
        "utility-fallback": "linear",
    }
    del config[key]
    with pytest.raises(ValueError, match=key):
        read_needs(config)


# ---- Ditto ----


@pytest.fixture(params=["context", "folder"])
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "folder":
        monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path))
    else:
        monkeypatch.delenv(STATE_DIR_VARIABLE, raising=False)
    return str(request.param)


def memory_of(where: Context) -> RecordDict:
    """What the node knows after all rounds."""
    return client_state.of_message(where, "evaluate", {"server-round": 99})


def personal(where: Context, memory: str = "4") -> Arrays:
    model = load_personal(memory_of(where), memory)
    assert model is not None
    return {name: value.numpy() for name, value in model.items()}


def test_without_a_pull_the_personal_model_trains_locally_on_from_itself(api: str, kept: str) -> None:
    where, expected = context(), initial()
    for number in (1, 2, 3):
        received = initial() if number == 1 else moved(initial(), number)
        fit(api, where, received, server_round=number, personal_weight=0.0, **DITTO)
        expected, _, _ = fit(api, context(), expected, server_round=number, strategy="purely-local")
        assert close(personal(where), expected, 0.0)


@pytest.mark.parametrize(("setting", "epochs"), [(0, 2), (3, 3)])
def test_personal_mini_batches_come_from_a_stream_of_their_own(api: str, setting: int, epochs: int) -> None:
    where, model = context(**{"batch-size": 4, "local-epochs": 2}), loaded(initial())
    for number in (1, 2):
        fit(api, where, server_round=number, personal_weight=0.0, personal_epochs=setting, **DITTO)
        (own,) = streams.client_sequence(0, number, "4").spawn(1)
        training = {"learning_rate": 0.1, "local_epochs": epochs, "batch_size": 4}
        train_locally(model, *examples(), rng=np.random.default_rng(own), **training)
        assert close(personal(where), {n: v.numpy() for n, v in model.state_dict().items()}, 1e-6)


@pytest.mark.parametrize("run_config", [{}, {"batch-size": 4, "local-epochs": 3}])
def test_a_huge_pull_makes_the_personal_model_the_received_one(api: str, run_config: dict[str, Any]) -> None:
    where = context(**run_config)
    fit(api, where, personal_weight=0.0, **DITTO)
    received = moved(initial())
    assert not close(personal(where), received, 1e-2)
    fit(api, where, received, server_round=2, personal_weight=1e6, **DITTO)
    assert close(personal(where), received, 1e-5)


def test_a_personal_step_goes_down_the_loss_and_towards_the_received_model(api: str) -> None:
    where = context()
    fit(api, where, personal_weight=0.0, **DITTO)
    before, received = personal(where), moved(initial())
    fit(api, where, received, server_round=2, personal_weight=0.5, **DITTO)
    slopes, _ = gradient(before)
    expected = {n: v - 0.1 * (slopes[n] + 0.5 * (v - received[n])) for n, v in before.items()}
    assert close(personal(where), expected, 1e-6)


@pytest.mark.parametrize("run_config", [{}, {"batch-size": 4, "local-epochs": 2}])
def test_training_a_personal_model_does_not_change_a_bit_of_the_global_reply(
    api: str, kept: str, run_config: dict[str, Any]
) -> None:
    ditto, plain = context(**run_config), context(**run_config)
    for number in (1, 2):
        own = {"server_round": number, "strategy": "fedavg"}
        first = fit(api, plain, moved(initial(), number), **own)
        own["strategy"] = "ditto"
        second = fit(api, ditto, moved(initial(), number), personal_weight=0.3, **own, **DITTO)
        assert same_bits(first[0], second[0])
        assert first[1:] == second[1:]


def test_the_personal_model_is_evaluated_where_it_is_kept(api: str, kept: str) -> None:
    where = context(**{"batch-size": 4, "local-epochs": 3})
    for number in (1, 2):
        fit(api, where, server_round=number, personal_weight=0.1, **DITTO)
        if kept == "folder":
            where = context(**where.run_config)
        metrics = evaluate(api, where, **DITTO, **{"server-round": number})
        accuracy, loss = measure(personal(where), "test")
        assert metrics["personal-accuracy"] == accuracy
        assert metrics["personal-loss"] == pytest.approx(loss, rel=1e-6)
        accuracy, loss = measure(initial(), "test")
        assert metrics["accuracy"] == accuracy
        assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["personal-loss"] < metrics["loss"]


def test_before_it_ever_trained_a_personal_model_is_the_received_one(api: str, kept: str) -> None:
    where = context()
    fit(api, where, client_id="1", personal_weight=0.1, **DITTO)  # another client on the same node
    fit(api, where, strategy="other", personal_weight=0.1, **DITTO)  # the same client for another strategy
    metrics = evaluate(api, where, moved(initial()), **DITTO)
    assert (metrics["personal-accuracy"], metrics["personal-loss"]) == (metrics["accuracy"], metrics["loss"])
    accuracy, loss = measure(moved(initial()), "test")
    assert (metrics["accuracy"], metrics["loss"]) == (accuracy, pytest.approx(loss, rel=1e-6))


def test_a_plain_evaluation_reports_nothing_personal(api: str) -> None:
    where = context()
    fit(api, where, personal_weight=0.1, **DITTO)
    assert set(evaluate(api, where)) == {"num-examples", "accuracy", "loss"}


def test_a_plain_message_trains_no_personal_model(api: str) -> None:
    where = context()
    fit(api, where, needs=METRICS)
    assert load_personal(memory_of(where), "4") is None


# ---- DQN-Fed ----


def dense(pairs: list[tuple[torch.Tensor, torch.Tensor]], size: int) -> np.ndarray:
    """The paper's B: rank-two updates of the identity, each from one pair."""
    matrix = np.eye(size)
    for s, y in ((s.double().numpy(), y.double().numpy()) for s, y in pairs):
        moved_s = matrix @ s
        matrix = matrix - np.outer(moved_s, moved_s) / (s @ moved_s) + np.outer(y, y) / (s @ y)
    return matrix


def positive(generator: np.random.Generator, size: int) -> np.ndarray:
    root = generator.standard_normal((size, size))
    return np.eye(size) + 0.3 * root @ root.T


def random_pairs(seed: int, count: int, size: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = np.random.default_rng(seed)
    steps = [generator.standard_normal(size) for _ in range(count)]
    return [(torch.from_numpy(s), torch.from_numpy(positive(generator, size) @ s)) for s in steps]


@pytest.mark.parametrize("count", [1, 2, 5, 10])
@pytest.mark.parametrize("seed", range(5))
def test_the_two_loops_apply_the_inverse_of_the_dense_bfgs_matrix(seed: int, count: int) -> None:
    pairs = random_pairs(seed, count)
    vector = torch.from_numpy(np.random.default_rng(100 + seed).standard_normal(6))
    untouched = [vector.clone(), *(part.clone() for pair in pairs for part in pair)]
    result = inverse_times(deque(pairs), vector)
    assert np.allclose(result.numpy(), np.linalg.solve(dense(pairs, 6), vector.numpy()), rtol=1e-9, atol=1e-9)
    assert np.allclose(inverse_times(pairs, pairs[-1][1]).numpy(), pairs[-1][0].numpy(), rtol=1e-9, atol=1e-9)
    inputs = [vector, *(part for pair in pairs for part in pair)]
    assert all(torch.equal(a, b) for a, b in zip(untouched, inputs, strict=True))


def test_without_pairs_the_direction_is_the_gradient_itself_in_memory_of_its_own() -> None:
    vector = torch.arange(5.0)
    result = inverse_times([], vector)
    assert torch.equal(result, vector)
    result += 1
    assert torch.equal(vector, torch.arange(5.0))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_quadratic_seen_along_all_its_conjugate_directions_gives_newtons_direction(size: int) -> None:
    generator = np.random.default_rng(size)
    hessian, steps = positive(generator, size), []
    for s in generator.standard_normal((size, size)):
        for other in steps:  # BFGS forgets earlier pairs unless the steps are conjugate
            s = s - other * (other @ hessian @ s) / (other @ hessian @ other)
        steps.append(s)
    pairs = [(torch.from_numpy(s), torch.from_numpy(hessian @ s)) for s in steps]
    vector = generator.standard_normal(size)
    result = inverse_times(pairs, torch.from_numpy(vector)).numpy()
    assert np.allclose(result, np.linalg.solve(hessian, vector), rtol=1e-8, atol=1e-10)


class Walk:
    """A tiny classifier in float64, with a plain computation of what the client must report."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(12, 3, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(2, (12,), generator=generator)
        self.model = torch.nn.Linear(3, 2, dtype=torch.float64)
        self.points = [torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(3)]
        self.state = RecordDict()

    def gradient(self, point: torch.Tensor) -> tuple[torch.Tensor, float]:
        point = point.clone().requires_grad_()
        loss = functional.cross_entropy(self.images @ point[:6].view(2, 3).T + point[6:], self.labels)
        return torch.autograd.grad(loss, point)[0], loss.item()

    def client(self, point: torch.Tensor, steps: int, memory: int = 10, name: str = "4") -> Any:
        torch.nn.utils.vector_to_parameters(point.clone(), self.model.parameters())
        return quasi_newton(
            self.model,
            self.images,
            self.labels,
            learning_rate=0.5,
            steps=steps,
            memory=memory,
            state=self.state,
            name=name,
        )

    def expected(self, point: torch.Tensor, steps: int, previous: torch.Tensor | None = None) -> Any:
        iterates = [] if previous is None else [previous]
        iterates.append(point)
        losses = []
        for _ in range(steps):
            slope, loss = self.gradient(iterates[-1])
            losses.append(loss)
            iterates.append(iterates[-1] - 0.5 * slope)
        slopes = [self.gradient(p)[0] for p in iterates]
        pairs = [(b - a, y - x) for a, b, x, y in zip(iterates, iterates[1:], slopes, slopes[1:], strict=False)]
        return slopes[-1], pairs, float(np.mean(losses))


@pytest.mark.parametrize("steps", [1, 3])
def test_the_direction_is_the_dense_one_for_the_clients_own_iterates(steps: int) -> None:
    walk = Walk()
    slope, direction, loss = walk.client(walk.points[0], steps)
    expected, pairs, mean = walk.expected(walk.points[0], steps)
    assert np.allclose(slope, expected, rtol=1e-12)
    assert np.allclose(direction, np.linalg.solve(dense(pairs, 8), expected.numpy()), rtol=1e-8, atol=1e-10)
    assert loss == pytest.approx(mean, rel=1e-12)


def test_the_first_pair_of_a_later_round_comes_from_the_model_received_before() -> None:
    walk = Walk()
    walk.client(walk.points[0], 1)
    before = walk.expected(walk.points[0], 1)[1]
    slope, direction, _ = walk.client(walk.points[1], 2)
    expected, pairs, _ = walk.expected(walk.points[1], 2, previous=walk.points[0])
    assert len(pairs) == 3
    assert torch.allclose(slope, expected, rtol=1e-12)
    seen = [pair for pair in [*before, *pairs] if pair[0] @ pair[1] > 0]
    assert len(seen) == 4  # the loss is convex
    assert np.allclose(direction, np.linalg.solve(dense(seen, 8), expected.numpy()), rtol=1e-7, atol=1e-10)
    _, other, _ = walk.client(walk.points[1], 2, name="a client without a past")
    assert not np.allclose(direction, other, rtol=1e-3)


def test_only_the_last_pairs_are_kept_and_used() -> None:
    walk = Walk()
    walk.client(walk.points[0], 4, memory=10)
    assert len(client_state.load(walk.state, "4")[newton.MEMORY]) == 1 + 2 * 4
    slope, direction, _ = walk.client(walk.points[1], 1, memory=2)
    _, pairs, _ = walk.expected(walk.points[1], 1, previous=walk.points[0])
    assert np.allclose(direction, np.linalg.solve(dense(pairs, 8), slope.numpy()), rtol=1e-7, atol=1e-10)
    record = client_state.load(walk.state, "4")[newton.MEMORY].to_torch_state_dict()
    assert sorted(record) == ["received", "s0", "s1", "y0", "y1"]
    assert torch.equal(record["received"], walk.points[1])
    assert all(np.allclose(record[f"s{i}"], s, rtol=1e-12) for i, (s, _) in enumerate(pairs))


def test_the_same_model_received_twice_adds_no_pair_between_the_rounds() -> None:
    walk = Walk()
    walk.client(walk.points[0], 1)
    _, direction, _ = walk.client(walk.points[0], 1)
    assert torch.isfinite(direction).all()
    assert len(client_state.load(walk.state, "4")[newton.MEMORY]) == 1 + 2 * 2


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_reply_is_one_step_along_the_gradient_at_the_last_local_iterate(api: str, epochs: int) -> None:
    here, losses = initial(), []
    for _ in range(epochs):
        slopes, loss = gradient(here)
        losses.append(loss)
        here = {name: value - np.float32(0.1) * slopes[name] for name, value in here.items()}
    slopes, _ = gradient(here)
    # The batch size has no say: gradients are of all examples.
    trained, metrics, direction = fit(api, context(**{"local-epochs": epochs, "batch-size": 4}), **NEWTON)
    assert close(trained, {name: value - 0.1 * slopes[name] for name, value in initial().items()}, 1e-6)
    assert metrics["train-loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert set(metrics) == PLAIN
    assert [(n, a.shape, a.dtype) for n, a in direction.items()] == [
        (n, a.shape, a.dtype) for n, a in initial().items()
    ]
    assert flat(direction) @ flat(slopes) > 0
    assert not np.allclose(flat(direction), flat(slopes), rtol=1e-2, atol=0)


def test_the_direction_goes_downhill_round_after_round_and_is_bounded_by_the_memory(api: str, kept: str) -> None:
    where, arrays = context(**{"local-epochs": 3}), initial()
    for number in (1, 2, 3):
        start = arrays
        arrays, _, direction = fit(api, where, arrays, server_round=number, newton_memory=4, **NEWTON)
        slope = (flat(start) - flat(arrays)) / 0.1
        assert flat(direction) @ slope > 0
        count = len(client_state.load(memory_of(where), "4")[newton.MEMORY])
        assert count == 1 + 2 * min(4, 3 * number + number - 1)


def test_a_second_round_uses_what_the_client_remembers(api: str) -> None:
    where, received = context(), moved(initial())
    fit(api, where, **NEWTON)
    trained, _, direction = fit(api, where, received, server_round=2, **NEWTON)
    again, _, fresh = fit(api, context(), received, server_round=2, **NEWTON)
    assert same_bits(trained, again)
    assert not close(direction, fresh, 1e-4)
    _, _, other = fit(api, where, received, server_round=2, strategy="other", **NEWTON)
    assert same_bits(other, fresh)


def test_both_apis_send_the_same_direction_and_remember_the_same(kept: str) -> None:
    nodes = {"message": context(), "legacy": context()}
    for number in (1, 2):
        first, second = (
            fit(api, where, moved(initial(), number), server_round=number, strategy=api, **NEWTON)
            for api, where in nodes.items()
        )
        assert same_bits(first[0], second[0])
        assert same_bits(first[2], second[2])
        assert first[1] == second[1]


def test_the_older_api_appends_the_direction_to_the_models_arrays() -> None:
    content = compat.fitins_to_recorddict(FitIns(parameters_of(initial()), {**CONFIG, **NEWTON}), True)
    result = compat.recorddict_to_fitres(call("train", content, context()), True)
    arrays = parameters_to_ndarrays(result.parameters)
    assert [a.shape for a in arrays] == [a.shape for a in initial().values()] * 2


def test_servers_of_both_apis_understand_the_clients_directions_alike() -> None:
    run_config = {"num-clients": 6, "local-epochs": 2}
    options = {"seed": 1, "client_ids": "ask", "code_hash": code_hash(), "local_learning_rate": 0.1}
    rounds: list[Any] = []
    options["on_round"] = rounds.append
    start, names = initial(), list(initial())
    strategy = strategies.METHODS["dqnfed"](fraction_train=1.0, min_train_nodes=1, **options)
    record = ArrayRecord({name: Array(array) for name, array in start.items()})
    result = strategy.start(InProcessGrid(app, 2, run_config), record, num_rounds=2)
    message = {name: array.numpy() for name, array in result.arrays.items()}
    models: dict[int, Arrays] = {}
    older = legacy.METHODS["dqnfed"](
        parameter_names=names,
        initial_parameters=parameters_of(start),
        evaluate_fn=lambda number, arrays, _: models.update({number: dict(zip(names, arrays, strict=True))}),
        fraction_fit=1.0,
        min_fit_clients=1,
        num_rounds=2,
        **options,
    )
    # The older API's messages are those that a ClientApp of that API gets.
    start_grid(grid=InProcessGrid(app, 2, run_config), config=ServerConfig(num_rounds=2), strategy=older)
    assert [len(report.accepted) for report in rounds] == [6] * 4
    assert not any(report.rejections for report in rounds)
    assert same_bits(message, models[2])
    assert not same_bits(message, start)


# ---- the training split, and what is refused ----


@pytest.mark.parametrize("needs", ["", "personal-model", "trial-losses"])
def test_the_training_split_gives_the_loss_on_the_training_examples_and_nothing_personal(api: str, needs: str) -> None:
    where = context()
    fit(api, where, personal_weight=0.1, **DITTO)
    metrics = evaluate(api, where, moved(initial()), split="training", needs=needs)
    loss = metrics.pop("loss-before")
    assert loss == pytest.approx(measure(moved(initial()))[1], rel=1e-6)
    expected = {"num-examples": len(examples()[1])}
    assert metrics == (expected if api == "message" else {**expected, "loss": loss})


def test_the_training_split_is_the_loss_that_training_reports_before_it(api: str) -> None:
    received = moved(initial())
    before = fit(api, context(), received, needs="loss-before")[1]["loss-before"]
    assert evaluate(api, context(), received, split="training")["loss-before"] == before


def test_an_unknown_need_is_refused_by_name() -> None:
    for work in (fit, evaluate):
        with pytest.raises(ValueError, match="does not know the needs 'gradient', 'hessian'"):
            work("message", context(), needs="hessian,loss-before,gradient")


def test_an_unknown_loss_transform_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="loss-transform='cubic'"):
        fit("message", context(), loss_transform="cubic")


@pytest.mark.parametrize("split", ["test", "Training", 1])
def test_an_unknown_split_is_refused_by_name(split: Any) -> None:
    with pytest.raises(ValueError, match=f"split={split!r}"):
        evaluate("message", context(), split=split)


@pytest.mark.parametrize(
    "wrong",
    [
        {"newton-memory": 0},
        {"personal-weight": -0.1},
        {"personal-weight": float("nan")},
        {"personal-weight": float("inf")},
        {"personal-epochs": -1},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    ((key, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{key}={value}"):
        read_needs({"needs": "newton-direction,personal-model", **wrong})


@pytest.mark.parametrize("kind", ["fit", "evaluate"])
def test_the_older_api_refuses_unknown_words_too(kind: str) -> None:
    with pytest.raises(ValueError, match="'hessian'"):
        (fit if kind == "fit" else evaluate)("legacy", context(), needs="hessian")
    with pytest.raises(ValueError, match="split='test'"):
        evaluate("legacy", context(), split="test")
