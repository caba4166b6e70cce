"""Clients that raise, lie, send rubbish or never answer cost only their own updates, and each is named."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import array_record_from_proto, array_record_to_proto
from safetensors.numpy import load_file

from cli.superlink import LocalSuperLink
from client_app.app import app as client_app
from server_app.config import ConfigError
from server_app.experiment import ExperimentError, run_experiment
from server_app.report import make_console
from strategies.inprocess import InProcessGrid
from strategies.protocol import ARRAYS, CLIENT_ID, CONFIG, METRICS, SERVER_ROUND
from tests.end_to_end.faulty_client import REJECTIONS, FaultyClientApp, Plan
from tests.support import assert_same_bits

ROOT = Path(__file__).parents[2]
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
CLIENTS, ROUNDS = 50, 30
BOTH = ("fedavg", "fedpcd")

Intercept = Callable[[Message, Context], object]


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run config; both methods, and no waiting."""
    own = {"num-clients": CLIENTS, "num-server-rounds": ROUNDS, "fraction-train": 0.4, "compare-with": "fedavg"}
    own |= {"results-dir": str(folder), "run-name": "run", "wait-for-nodes": 0.0, "evaluate-every": ROUNDS}
    return {**own, **{name.replace("_", "-"): value for name, value in changes.items()}}


def run(
    settings: dict[str, Any], app: ClientApp = client_app, grid: InProcessGrid | None = None, **keywords: Any
) -> Path:
    """Run the experiment on the in-process grid; returns the folder of the run."""
    grid = grid or InProcessGrid(app, run_config=settings, **keywords)
    run_experiment(grid, settings, make_console(io.StringIO()))
    return Path(settings["results-dir"]) / settings["run-name"]


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; a line feed inside a line would make it invalid."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of the training rounds."""
    return [line for line in lines(folder / "rounds.jsonl") if line["round"] > 0]


def model_of(folder: Path) -> dict[str, np.ndarray]:
    """The final model of a results folder."""
    arrays: dict[str, np.ndarray] = load_file(folder / "model.safetensors")
    return dict(sorted(arrays.items()))


def accuracy_of(folder: Path, clients: set[str]) -> float:
    """Final mean accuracy of some clients."""
    with (folder / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {row["client_id"]: float(row["accuracy"]) for row in rows if int(row["round"]) == ROUNDS}
    return float(np.mean([found[client] for client in clients]))


def silence(plan: Plan, *faults: str) -> Intercept:
    """Let clients never answer where the plan has a fault; only these faults, if some are named."""

    def intercept(message: Message, context: Context) -> object:
        fault = plan.of(message)
        return InProcessGrid.SILENT if fault is not None and (not faults or fault in faults) else None

    return intercept


def assert_rejected_as_planned(folder: Path, plan: Plan) -> None:
    """Fail unless exactly the planned faults were rejected, each with its kind and reason, and all others accepted."""
    planned = [
        (line["round"], client, fault)
        for line in rounds_of(folder)
        for client in line["cohort"]
        if (fault := plan.fault(client, line["round"])) is not None
    ]
    rejections = lines(folder / "rejections.jsonl")
    assert [(line["round"], line["client_id"]) for line in rejections] == [fault[:2] for fault in planned]
    for line, (_, _, fault) in zip(rejections, planned, strict=True):
        kind, reason = REJECTIONS[fault]
        assert line["phase"] == "train"
        assert (line["kind"], bool(re.search(reason, line["reason"]))) == (kind, True), (fault, line)
    for line in rounds_of(folder):
        honest = [client for client in line["cohort"] if plan.fault(client, line["round"]) is None]
        assert (line["accepted"], line["rejected"]) == (honest, len(line["cohort"]) - len(honest))


def assert_bad_clients_cost_nothing(tmp_path: Path, plan: Plan, least: float, **changes: Any) -> None:
    """Run with the bad clients, and with them silent so that the honest part of every cohort is the same; compare."""
    settings = {"seed": plan.seed, **changes}
    app = FaultyClientApp(lambda context: plan)
    attacked = run(config(tmp_path, run_name="attacked", **settings), app, intercept=silence(plan, "silent"))
    without = run(config(tmp_path, run_name="without", **settings), intercept=silence(plan))
    for method in BOTH:
        assert_rejected_as_planned(attacked / method, plan)
        skipped = [[line["skipped"] for line in rounds_of(folder / method)] for folder in (attacked, without)]
        assert skipped[0] == skipped[1]  # a small cohort may have no honest client at all
        assert len(skipped[0]) == ROUNDS
        ours, theirs = (accuracy_of(folder / method, plan.honest) for folder in (attacked, without))
        print(f"{method}: {ours:.4f} with the bad clients, {theirs:.4f} without, {len(plan.honest)} honest clients")
        assert abs(ours - theirs) <= 0.02
        assert theirs > least
        # Whoever is rejected leaves no trace at all: not in the model, not in the history of later rounds.
        assert_same_bits(model_of(attacked / method), model_of(without / method))


@pytest.mark.parametrize("seed", [0, 1])
def test_thirty_rounds_with_three_of_five_clients_bad_equal_those_without_them(seed: int, tmp_path: Path) -> None:
    plan = Plan(CLIENTS, seed)
    assert len(plan.honest) == 20
    assert_bad_clients_cost_nothing(tmp_path, plan, least=0.6)


@pytest.mark.parametrize("seed", [2])
def test_clients_that_fail_now_and_then_and_each_time_otherwise_cost_only_those_rounds(
    seed: int, tmp_path: Path
) -> None:
    assert_bad_clients_cost_nothing(tmp_path, Plan(CLIENTS, seed, reliability=0.3), least=0.6)


@pytest.mark.slow
@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_thirty_rounds_on_fashion_mnist_with_bad_clients_equal_those_without_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = str(tmp_path / "data")
    assert_bad_clients_cost_nothing(tmp_path, Plan(CLIENTS, 0), least=0.5, dataset="fashion-mnist", data_dir=data)


def test_full_participation_with_bad_clients_equals_that_without_them(tmp_path: Path) -> None:
    assert_bad_clients_cost_nothing(tmp_path, Plan(CLIENTS, 3), least=0.6, fraction_train=1.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bad_clients_in_rays_simulation_cost_what_they_cost_in_process(tmp_path: Path) -> None:
    # Seed 47: all kinds of faults, but only round 2 has to wait for a client, which then answers in round 3.
    app = tmp_path / "app"
    for name in ("client_app", "server_app", "strategies"):
        shutil.copytree(ROOT / name, app / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, app)
    shutil.copy(Path(__file__).with_name("faulty_client.py"), app / "client_app")
    project = (ROOT / "pyproject.toml").read_text()
    assert "client_app.app:app" in project
    (app / "pyproject.toml").write_text(project.replace("client_app.app:app", "client_app.faulty_client:app"))
    changes = {"num-server-rounds": 3, "fraction-train": 0.2, "round-timeout": 40.0, "wait-for-nodes": 120.0}
    settings = config(tmp_path, run_name="ray", seed=47, **changes)
    with LocalSuperLink(app) as superlink:
        size = "num-supernodes=10 client-resources-num-cpus=1 init-args-num-cpus=4"
        number = superlink.submit(settings, size)
        superlink.stream(number)
        status, details = superlink.outcome(number)
    assert status == "finished:completed", details
    plan = Plan(CLIENTS, 47)
    settings["run-name"] = "here"
    here = run(settings, FaultyClientApp(lambda context: plan), intercept=silence(plan, "silent"))
    for method in BOTH:
        ray = tmp_path / "ray" / method
        assert_rejected_as_planned(ray, plan)
        asked = [(client, line["round"]) for line in rounds_of(ray) for client in line["cohort"]]
        assert {plan.fault(*one) for one in asked} == {None, *REJECTIONS}
        assert_same_bits(model_of(ray), model_of(here / method))


# ---- replies that no client of ours would send ----


def arrays_by(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[RecordDict], None]:
    """A spoiler that changes every array of a reply."""

    def spoil(content: RecordDict) -> None:
        arrays = content.array_records[ARRAYS]
        content[ARRAYS] = ArrayRecord({name: Array(np.asarray(change(a.numpy()))) for name, a in arrays.items()})

    return spoil


def bytes_by(change: Callable[[bytes], bytes]) -> Callable[[RecordDict], None]:
    """A spoiler that changes the bytes of one array."""

    def spoil(content: RecordDict) -> None:
        array = content.array_records[ARRAYS]["1.weight"]
        array.data = change(array.data)

    return spoil


def metrics_by(**changes: Any) -> Callable[[RecordDict], None]:
    """A spoiler that changes metrics; None removes one."""

    def spoil(content: RecordDict) -> None:
        metrics = {**content.metric_records[METRICS], **{k.replace("_", "-"): v for k, v in changes.items()}}
        content[METRICS] = MetricRecord({key: value for key, value in metrics.items() if value is not None})

    return spoil


def raising(error: Exception) -> Callable[[RecordDict], None]:
    """A spoiler that raises."""

    def spoil(content: RecordDict) -> None:
        raise error

    return spoil


def without(name: str) -> Callable[[RecordDict], None]:
    """A spoiler that leaves a record out."""
    return lambda content: content.pop(name)


def more_arrays(content: RecordDict) -> None:
    """Send the model twice in one reply."""
    content["again"] = content[ARRAYS]


def doubled_name(content: RecordDict) -> None:
    """Name an array twice, as only the wire format can; the second has another shape."""
    proto = array_record_to_proto(content.array_records[ARRAYS])
    wrong = array_record_to_proto(ArrayRecord({"1.bias": Array(np.zeros(3, dtype=np.float32))}))
    proto.items.extend(wrong.items)
    content[ARRAYS] = array_record_from_proto(proto)


def long_names(content: RecordDict) -> None:
    """Name arrays with a megabyte each."""
    content[ARRAYS] = ArrayRecord({letter * 10**6: Array(np.zeros(1, dtype=np.float32)) for letter in "abc"})


def odd_names(content: RecordDict) -> None:
    """Name an array with what UTF-8 cannot hold."""
    arrays = dict(content.array_records[ARRAYS])
    content[ARRAYS] = ArrayRecord({**arrays, "caf\udce9\x00\x1b[31m\u2028": Array(np.zeros(1, dtype=np.float32))})


def npz(data: bytes) -> bytes:
    """A valid zip archive of arrays where one array is due."""
    buffer = io.BytesIO()
    np.savez(buffer, a=np.load(io.BytesIO(data)))
    return buffer.getvalue()


def pickled(data: bytes) -> bytes:
    """An array of objects, which only unpickling could read."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def giant(data: bytes) -> bytes:
    """A header that promises 4 TB."""
    buffer = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (2**40,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue() + bytes(64)


NASTY: dict[str, tuple[Callable[[RecordDict], None], str, str]] = {
    "megabyte of text": (raising(ValueError("x" * 10**6)), "error", "xxx"),
    "megabyte of lines": (raising(ValueError("line\n" * 200_000 + "the end")), "error", "the end"),
    "text that UTF-8 cannot hold": (raising(ValueError("no file caf\udce9.png")), "error", "no file caf"),
    "control characters": (raising(ValueError("a\x00\x1b[31m\r\u2028\x85last\x00'>")), "error", "last"),
    "no text": (raising(ValueError()), "error", "ValueError"),
    "Flower's wrapper in the text": (raising(ValueError("Exception A occurred. Message: " * 3 + "b'>")), "error", "b"),
    "minus infinity": (arrays_by(lambda a: np.full_like(a, -np.inf)), "invalid", "NaN or infinity"),
    "0-dimensional arrays": (arrays_by(lambda a: a.ravel()[0]), "invalid", "has shape"),
    "empty arrays": (arrays_by(lambda a: a[:0]), "invalid", "has shape"),
    "integers": (arrays_by(lambda a: a.astype(np.int32)), "invalid", "dtype int32"),
    "booleans": (arrays_by(lambda a: a > 0), "invalid", "dtype bool"),
    "complex numbers": (arrays_by(lambda a: a.astype(np.complex64)), "invalid", "has dtype"),
    "strings": (arrays_by(lambda a: a.astype("U8")), "invalid", "array"),
    "float64 out of range": (arrays_by(lambda a: a.astype(np.float64) * 1e300), "invalid", "NaN or infinity"),
    "no metrics": (without(METRICS), "invalid", "num-examples must be a number > 0, got None"),
    "no arrays": (without(ARRAYS), "invalid", "sent no arrays"),
    "nothing": (RecordDict.clear, "invalid", "num-examples"),
    "no arrays in the record": (lambda c: c.update({ARRAYS: ArrayRecord({})}), "invalid", "array names differ"),
    "no count": (metrics_by(num_examples=None), "invalid", "num-examples must be a number"),
    "count nan": (metrics_by(num_examples=float("nan")), "invalid", "num-examples must be > 0"),
    "count infinite": (metrics_by(num_examples=float("inf")), "invalid", "num-examples must be > 0"),
    "count negative": (metrics_by(num_examples=-5), "invalid", "num-examples must be > 0"),
    "count zero": (metrics_by(num_examples=0), "invalid", "num-examples must be > 0"),
    "count huge": (metrics_by(num_examples=2**63 - 1), "invalid", "num-examples must be > 0"),
    "count beyond floats": (metrics_by(num_examples=10**400), "invalid", "num-examples must be > 0"),
    "count a list": (metrics_by(num_examples=[1, 2]), "invalid", "num-examples must be a number"),
    "a metric with a long name": (metrics_by(**{"m" * 10**6: 1.0}), "invalid", "metric"),
    "many metrics": (metrics_by(**{f"metric {i}": i for i in range(20_000)}), "invalid", "metrics"),
    "a name twice": (doubled_name, "invalid", "has shape"),
    "the model twice": (more_arrays, "invalid", "array"),
    "long names": (long_names, "invalid", "array names differ"),
    "odd names": (odd_names, "invalid", "array names differ"),
    "cut off": (bytes_by(lambda data: data[:-1]), "invalid", "1.weight"),
    "no bytes": (bytes_by(lambda data: b""), "invalid", "1.weight"),
    "random bytes": (bytes_by(lambda data: data[::-1]), "invalid", "1.weight"),
    "pickled": (bytes_by(pickled), "invalid", "1.weight"),
    "npz": (bytes_by(npz), "invalid", "1.weight"),
    "giant header": (bytes_by(giant), "invalid", "1.weight"),
}
"""What a reply is made into, the kind of its rejection, and what its reason says."""

HARMLESS: dict[str, Callable[[RecordDict], None]] = {
    "a record more": lambda c: c.update({"more": ConfigRecord({"a": "b"}), "numbers": MetricRecord({"c": 1.0})}),
    "metrics nan": metrics_by(train_loss=float("nan")),
    "metric a list": metrics_by(train_loss=[1.0, 2.0]),
    "metric near the end of the range": metrics_by(train_loss=1.7e308),
    "another near the end of the range": metrics_by(train_loss=1.7e308),
    "metric beyond floats": metrics_by(train_loss=10**400),
    "metric name that UTF-8 cannot hold": metrics_by(**{"caf\udce9": 1.0}),
    "other precision": arrays_by(lambda a: a.astype(np.float64)),
    "other byte order": arrays_by(lambda a: a.astype(">f4")),
    "other order in memory": arrays_by(np.asfortranarray),
}
"""Replies that are odd and count all the same: the arrays and the number of examples are right."""


def spoiling(spoilers: dict[str, Callable[[RecordDict], None]]) -> Intercept:
    """Let clients train and spoil their replies."""

    def intercept(message: Message, context: Context) -> object:
        spoil = spoilers.get(trains(message) or "")
        if spoil is None:
            return None
        reply = client_app(message, context)
        spoil(reply.content)
        return reply

    return intercept


def trains(message: Message) -> str | None:
    """The client that a message asks to train."""
    if message.metadata.message_type != MessageType.TRAIN:
        return None
    return str(message.content.config_records[CONFIG][CLIENT_ID])


def spoilt_run(tmp_path: Path, spoilers: dict[str, Callable[[RecordDict], None]]) -> Path:
    """Run with spoilt replies, and check that the results stay small."""
    settings = config(tmp_path, num_clients=len(spoilers) + 5, fraction_train=1.0, num_server_rounds=2)
    folder = run(settings, intercept=spoiling(spoilers))
    for method in BOTH:
        assert (folder / method / "rounds.jsonl").stat().st_size < 300_000
        assert all(len(line["reason"]) <= 1000 for line in lines(folder / method / "rejections.jsonl"))
    return folder


def silenced_run(tmp_path: Path, bad: Iterable[str], clients: int) -> Path:
    """The same run, in which these clients never answer."""
    names = set(bad)
    settings = config(tmp_path, num_clients=clients, fraction_train=1.0, num_server_rounds=2, run_name="without")
    return run(settings, intercept=lambda m, c: InProcessGrid.SILENT if trains(m) in names else None)


def test_nasty_replies_together_are_each_rejected_for_their_own_reason(tmp_path: Path) -> None:
    spoilers = {str(number): spoil for number, (spoil, _, _) in enumerate(NASTY.values())}
    folder, without_them = spoilt_run(tmp_path, spoilers), silenced_run(tmp_path, spoilers, len(spoilers) + 5)
    for method in BOTH:
        found = {(line["round"], line["client_id"]): line for line in lines(folder / method / "rejections.jsonl")}
        assert found.keys() == {(server_round, client) for server_round in (1, 2) for client in spoilers}
        for (_, client), line in found.items():
            name, (_, kind, reason) = list(NASTY.items())[int(client)]
            assert (line["kind"], reason in line["reason"]) == (kind, True), (name, line)
        assert_same_bits(model_of(folder / method), model_of(without_them / method))


@pytest.mark.parametrize("name", NASTY)
def test_one_nasty_reply_is_rejected_and_its_sender_named(name: str, tmp_path: Path) -> None:
    spoil, kind, reason = NASTY[name]
    folder = spoilt_run(tmp_path, {"3": spoil})
    for method in BOTH:
        found = lines(folder / method / "rejections.jsonl")
        assert [(line["round"], line["client_id"], line["kind"]) for line in found] == [(r, "3", kind) for r in (1, 2)]
        assert all(reason in line["reason"] for line in found), found[0]["reason"][:300]


@pytest.mark.parametrize("name", HARMLESS)
def test_an_odd_reply_whose_update_is_right_counts(name: str, tmp_path: Path) -> None:
    folder = spoilt_run(tmp_path, {"3": HARMLESS[name], "4": HARMLESS[name]})
    settings = config(tmp_path, num_clients=7, fraction_train=1.0, num_server_rounds=2, run_name="plain")
    plain = run(settings)
    for method in BOTH:
        assert lines(folder / method / "rejections.jsonl") == []
        assert_same_bits(model_of(folder / method), model_of(plain / method))


@pytest.mark.parametrize(("seed", "share"), [(2, 0.1), (3, 0.2)])
def test_huge_updates_are_refused_where_chance_makes_them_the_majority_of_a_cohort(
    seed: int, share: float, tmp_path: Path
) -> None:
    # 5 of 50 send huge updates, 25 send nothing usable: in cohorts of 5 a third of all runs meets such a round.
    assert_bad_clients_cost_nothing(
        tmp_path, Plan(CLIENTS, seed), least=0.4, fraction_train=share, max_skipped_rounds=9
    )


# ---- replies that come twice, evaluations that are nonsense ----


class Echo(InProcessGrid):
    """Delivers the training replies of one client twice."""

    def __init__(self, *arguments: Any, client: str, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.client = client

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        replies = list(super().send_and_receive(sent, timeout=timeout))
        questions = {m.metadata.message_id for m in sent if trains(m) == self.client}
        return [*replies, *(reply for reply in replies if reply.metadata.reply_to_message_id in questions)]


def test_a_client_that_answers_twice_does_not_count(tmp_path: Path) -> None:
    settings = config(tmp_path, num_clients=10, fraction_train=1.0, num_server_rounds=2)
    folder = run(settings, grid=Echo(client_app, run_config=settings, client="3"))
    quiet = run(
        {**settings, "run-name": "without"}, intercept=lambda m, c: InProcessGrid.SILENT if trains(m) == "3" else None
    )
    for method in BOTH:
        found = lines(folder / method / "rejections.jsonl")
        assert [(line["client_id"], line["kind"]) for line in found] == [("3", "invalid")] * 2
        assert all("more than once" in line["reason"] for line in found)
        assert_same_bits(model_of(folder / method), model_of(quiet / method))


EVALUATIONS: dict[str, tuple[Callable[[RecordDict], None], int]] = {
    "megabyte of text": (raising(ValueError("x" * 10**6)), 1),
    "text that UTF-8 cannot hold": (raising(ValueError("no file caf\udce9.png")), 1),
    "nothing": (RecordDict.clear, 1),
    "no accuracy": (metrics_by(accuracy=None), 1),
    "accuracy nan": (metrics_by(accuracy=float("nan")), 1),
    "accuracy two": (metrics_by(accuracy=2.0), 1),
    "accuracy a list": (metrics_by(accuracy=[0.5]), 1),
    "loss nan": (metrics_by(loss=float("nan")), 0),
    "loss beyond floats": (metrics_by(loss=10**400), 0),
    "count negative": (metrics_by(num_examples=-1), 1),
    "loss near the end of the range": (metrics_by(loss=1.7e308), 0),
    "metric name that UTF-8 cannot hold": (metrics_by(**{"caf\udce9": 1.0}), 0),
    "long names": (metrics_by(**{"m" * 10**6: 1.0}), 1),
}
"""What an evaluation is made into, and whether its sender is rejected for it."""


@pytest.mark.parametrize("name", EVALUATIONS)
def test_nonsense_in_evaluations_costs_only_its_sender_the_place_in_the_table(name: str, tmp_path: Path) -> None:
    spoil, rejected = EVALUATIONS[name]

    def intercept(message: Message, context: Context) -> object:
        if message.metadata.message_type != MessageType.EVALUATE:
            return None
        if str(message.content.config_records[CONFIG][CLIENT_ID]) not in ("3", "4"):
            return None
        reply = client_app(message, context)
        spoil(reply.content)
        return reply

    settings = config(
        tmp_path, num_clients=8, fraction_train=1.0, num_server_rounds=2, evaluation="federated", evaluate_every=1
    )
    folder = run(settings, intercept=intercept)
    for method in BOTH:
        found = lines(folder / method / "rejections.jsonl")
        expected = [(r, "evaluate", c) for r in (0, 1, 2) for c in ("3", "4")] if rejected else []
        assert [(line["round"], line["phase"], line["client_id"]) for line in found] == expected
        assert all(len(line["reason"]) <= 1000 for line in found)
        evaluated = [line["evaluation"] for line in lines(folder / method / "rounds.jsonl")]
        assert [e["missing-clients"] for e in evaluated] == [["3", "4"] if rejected else []] * 3
        assert (folder / method / "rounds.jsonl").stat().st_size < 100_000


# ---- rounds without (enough) replies ----


def test_a_round_in_which_all_clients_are_bad_leaves_the_model_bit_for_bit(tmp_path: Path) -> None:
    everyone = {str(number): spoil for number, (spoil, _, _) in enumerate(NASTY.values()) if number % 4 == 0}

    def intercept(message: Message, context: Context) -> object:
        bad = trains(message) is not None and message.content.config_records[CONFIG][SERVER_ROUND] == 3
        return spoiling(everyone)(message, context) if bad else None

    settings = config(tmp_path, num_clients=len(everyone), fraction_train=1.0, num_server_rounds=3, evaluate_every=1)
    everyone = dict(zip(map(str, range(len(everyone))), everyone.values(), strict=True))
    folder = run(settings, intercept=intercept)
    earlier = run({**settings, "num-server-rounds": 2, "run-name": "two"})
    for method in BOTH:
        assert [line["skipped"] for line in rounds_of(folder / method)] == [False, False, True]
        assert rounds_of(folder / method)[2]["rejected"] == len(everyone)
        assert_same_bits(model_of(folder / method), model_of(earlier / method))
        summary = json.loads((folder / method / "summary.json").read_text())
        assert (summary["status"], summary["skipped-rounds"]) == ("completed", 1)


def failing_in(rounds: Iterable[int], clients: int, of: int = 10) -> Intercept:
    """Let so many of the clients fail in these rounds."""
    bad, failing = set(rounds), {str(client) for client in range(of - clients, of)}

    def intercept(message: Message, context: Context) -> object:
        client = trains(message)
        if client in failing and message.content.config_records[CONFIG][SERVER_ROUND] in bad:
            raise OSError("the disk of this site is full")
        return None

    return intercept


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    """Ten clients that all take part."""
    own = {"num_clients": 10, "fraction_train": 1.0, "num_server_rounds": 6, "compare_with": "", "evaluate_every": 1}
    return config(folder, **{**own, **changes})


@pytest.mark.parametrize("method", BOTH)
def test_below_min_replies_the_model_stays_and_the_round_is_marked(method: str, tmp_path: Path) -> None:
    # Rounds 2 and 6 have 3 usable replies, one too few; round 4 has just enough.
    def intercept(message: Message, context: Context) -> object:
        failing_in([2, 6], 7)(message, context)
        return failing_in([4], 6)(message, context)

    settings = small(tmp_path, strategy=method, min_replies=4)
    folder = run(settings, intercept=intercept) / method
    found = rounds_of(folder)
    assert [line["skipped"] for line in found] == [False, True, False, False, False, True]
    for number in (2, 6):
        line = found[number - 1]
        assert line["diagnostics"]["status"] == "too-few-replies"
        assert line["accepted"] == []
        assert line["evaluation"] == found[number - 2]["evaluation"]
    assert all(line["diagnostics"].get("status") != "too-few-replies" for line in found if not line["skipped"])
    assert len(found[3]["accepted"]) == 4
    earlier = run({**settings, "num-server-rounds": 5, "run-name": "five"}, intercept=intercept) / method
    assert_same_bits(model_of(folder), model_of(earlier))
    rejected = [(line["round"], line["client_id"]) for line in lines(folder / "rejections.jsonl")]
    assert rejected == [(r, str(c)) for r, low in ((2, 3), (4, 4), (6, 3)) for c in range(low, 10)]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["skipped-rounds"]) == ("completed", 2)


def test_replies_of_a_round_that_had_too_few_enter_no_history(tmp_path: Path) -> None:
    settings = small(tmp_path, min_replies=4, tau=0.1)
    folder = run(settings, intercept=failing_in([2], 7)) / "fedpcd"
    settings["run-name"] = "silent"
    silent = run(settings, intercept=failing_in([2], 10)) / "fedpcd"
    assert_same_bits(model_of(folder), model_of(silent))


@pytest.mark.parametrize("method", BOTH)
def test_so_many_skipped_rounds_in_a_row_end_the_run_and_it_can_be_resumed(method: str, tmp_path: Path) -> None:
    # Two in a row are survived, rounds 2 and 3; of 5, 6 and 7 the third is one too many.
    settings = small(tmp_path, strategy=method, num_server_rounds=9, max_skipped_rounds=3)
    with pytest.raises(ExperimentError, match=r"3 rounds in a row") as caught:
        run(settings, intercept=failing_in([2, 3, 5, 6, 7, 8], 10))
    for word in ("round 7", "max-skipped-rounds=3", "the disk of this site is full", "resume="):
        assert word in str(caught.value)
    assert str(tmp_path / "run") in str(caught.value)
    folder = tmp_path / "run" / method
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["skipped-rounds"]) == ("failed", 7, 5)
    assert [line["skipped"] for line in rounds_of(folder)] == [False, True, True, False, True, True, True]

    run_experiment(
        InProcessGrid(client_app, run_config=settings),
        {"resume": str(tmp_path / "run"), "wait-for-nodes": 0.0},
        make_console(io.StringIO()),
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("completed", 9)


def test_a_run_survives_any_number_of_skipped_rounds_that_are_not_in_a_row(tmp_path: Path) -> None:
    settings = small(tmp_path, num_server_rounds=10, max_skipped_rounds=2)
    folder = run(settings, intercept=failing_in([1, 3, 5, 7, 9], 10)) / "fedpcd"
    assert sum(line["skipped"] for line in rounds_of(folder)) == 5


def test_a_run_whose_every_round_has_too_few_replies_says_so(tmp_path: Path) -> None:
    silent = lambda message, context: InProcessGrid.SILENT if trains(message) == "1" else None  # noqa: E731
    with pytest.raises(ExperimentError, match=r"too-few-replies.*min-replies=10"):
        run(small(tmp_path, min_replies=10), intercept=silent)
    summary = json.loads((tmp_path / "run" / "fedpcd" / "summary.json").read_text())
    assert (summary["status"], summary["skipped-rounds"]) == ("failed", 3)


def test_more_replies_than_a_cohort_has_clients_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="min-replies=11 is not allowed: a cohort has 10 of the 10 clients"):
        run(small(tmp_path, min_replies=11))
    assert not (tmp_path / "run").exists()


# ---- nodes that leave, come back and join ----


class ComingAndGoing(InProcessGrid):
    """A grid whose nodes leave and come back, as `events` says: after so many rounds of training were sent out.

    Parameters
    ----------
    events : mapping of int to callable (ComingAndGoing) -> None
        By the number of get_node_ids calls that came before.
    """

    def __init__(self, *arguments: Any, events: dict[int, Callable[[ComingAndGoing], None]], **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.events = events
        self.calls = 0
        self.away: dict[int, Context] = {}

    def get_node_ids(self) -> Iterable[int]:
        self.events.get(self.calls, lambda grid: None)(self)
        self.calls += 1
        return super().get_node_ids()

    def leave(self, *sites: str) -> None:
        """Let the nodes of some sites leave; all, if none is named."""
        for node, context in list(self._contexts.items()):
            if not sites or context.node_config["client-id"] in sites:
                self.away[node] = self._contexts.pop(node)

    def come_back(self) -> None:
        """Let all nodes return as they were, as nodes with a key do."""
        self._contexts |= self.away
        self.away = {}

    def come_back_anew(self) -> None:
        """Let all nodes return with other ids and without memory, as nodes without a key do."""
        for node, old in self.away.items():
            fresh = Context(old.run_id, node ^ 1, old.node_config, RecordDict(), old.run_config)
            self._contexts[node ^ 1] = fresh
        self.away = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Answer for absent nodes as the SuperLink does."""
        sent = list(messages)
        here = [message for message in sent if message.metadata.dst_node_id in self._contexts]
        replies = list(super().send_and_receive(here, timeout=timeout))
        gone = [message for message in sent if message.metadata.dst_node_id not in self._contexts]
        return [*replies, *(Message(Error(code=3, reason="Node Unavailable"), reply_to=message) for message in gone)]


def sites(folder: Path, events: dict[int, Callable[[ComingAndGoing], None]], **changes: Any) -> list[dict[str, Any]]:
    """Run four sites that own their data for eight rounds, evaluated at the end; returns the lines of the rounds.

    The experiment itself, and every round, asks once which nodes there are.
    """
    settings = small(folder, num_clients=4, num_server_rounds=8, evaluate_every=8, **changes)
    nodes = [{"client-id": f"site-{letter}", "partition-id": i} for i, letter in enumerate("abcd")]
    grid = ComingAndGoing(client_app, run_config=settings, node_configs=nodes, events=events)
    return rounds_of(run(settings, grid=grid) / "fedpcd")


EVERYONE = [f"site-{letter}" for letter in "abcd"]


@pytest.mark.parametrize("come_back", [ComingAndGoing.come_back, ComingAndGoing.come_back_anew])
def test_a_run_goes_on_when_all_nodes_left_and_came_back(
    come_back: Callable[[ComingAndGoing], None], tmp_path: Path
) -> None:
    # Calls: the experiment, the strategy before round 0, then one per round: call 4 is that of round 3.
    found = sites(tmp_path, {4: ComingAndGoing.leave, 6: come_back})
    assert [line["skipped"] for line in found] == [False, False, True, True, False, False, False, False]
    assert [line["cohort"] for line in found] == [EVERYONE] * 2 + [[]] * 2 + [EVERYONE] * 4
    assert [line["accepted"] for line in found] == [line["cohort"] for line in found]


def test_a_round_waits_for_nodes_that_are_away_for_a_moment(tmp_path: Path) -> None:
    found = sites(tmp_path, {4: ComingAndGoing.leave, 6: ComingAndGoing.come_back_anew}, wait_for_nodes=30.0)
    assert [line["accepted"] for line in found] == [EVERYONE] * 8


def test_nodes_that_never_come_back_end_the_run_with_the_way_to_resume_it(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"3 rounds in a row were skipped.*resume="):
        sites(tmp_path, {4: ComingAndGoing.leave})
    assert json.loads((tmp_path / "run" / "fedpcd" / "summary.json").read_text())["rounds"] == 5


def test_some_nodes_leave_and_return_under_new_ids_and_keep_their_names(tmp_path: Path) -> None:
    found = sites(tmp_path, {4: lambda grid: grid.leave("site-a", "site-c"), 7: ComingAndGoing.come_back_anew})
    assert [line["accepted"] for line in found] == [EVERYONE] * 2 + [["site-b", "site-d"]] * 3 + [EVERYONE] * 3
    assert not any(line["skipped"] or line["rejected"] for line in found)


def test_a_node_that_joins_late_takes_part_from_then_on(tmp_path: Path) -> None:
    def before(grid: ComingAndGoing) -> None:
        grid.leave("site-d")

    found = sites(tmp_path, {0: before, 5: ComingAndGoing.come_back})
    assert [line["accepted"] for line in found] == [EVERYONE[:3]] * 3 + [EVERYONE] * 5


def test_nodes_that_leave_while_they_train_are_named_and_asked_again_when_they_are_back(tmp_path: Path) -> None:
    class LeavingInRound(ComingAndGoing):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            sent = list(messages)
            if any(trains(m) and m.content.config_records[CONFIG][SERVER_ROUND] == 3 for m in sent):
                self.leave("site-b")
            return super().send_and_receive(sent, timeout=timeout)

    settings = small(tmp_path, num_clients=4, num_server_rounds=6, evaluate_every=6)
    nodes = [{"client-id": name, "partition-id": i} for i, name in enumerate(EVERYONE)]
    grid = LeavingInRound(client_app, run_config=settings, node_configs=nodes, events={6: ComingAndGoing.come_back})
    folder = run(settings, grid=grid) / "fedpcd"
    others = [name for name in EVERYONE if name != "site-b"]
    assert [line["accepted"] for line in rounds_of(folder)] == [EVERYONE] * 2 + [others] * 2 + [EVERYONE] * 2
    assert [(line["round"], line["client_id"], line["reason"]) for line in lines(folder / "rejections.jsonl")] == [
        (3, "site-b", "Node Unavailable")
    ]
