from __future__ import annotations

import csv
import io
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from safetensors.numpy import load_file

from client_app.app import app as client_app
from client_app.code_hash import code_hash
from client_app.config import TaskConfig
from server_app.app import app as server_app
from server_app.config import ConfigError
from server_app.evaluation import DisagreementError, ServerEvaluation, initial_arrays
from server_app.experiment import ExperimentError, run_experiment
from server_app.progress import clock
from server_app.report import load_run, make_console
from strategies import METHODS, RosterError
from strategies.inprocess import InProcessGrid
from strategies.protocol import ACCURACY, LOSS, METRICS, NUM_EXAMPLES, TRAIN_LOSS

if TYPE_CHECKING:
    from collections.abc import Callable

CLIENTS = 20
ROUNDS = 3


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    run_config = {
        "num-clients": CLIENTS,
        "num-server-rounds": ROUNDS,
        "fraction-train": 0.25,
        "strategy": "fedpcd",
        "compare-with": "fedavg",
        "results-dir": str(folder),
        "run-name": "run",
        "wait-for-nodes": 0.0,
    }
    return run_config | {name.replace("_", "-"): value for name, value in changes.items()}


def run(run_config: dict[str, Any], **grid: Any) -> tuple[list[dict[str, Any]], str]:
    output = io.StringIO()
    summaries = run_experiment(
        InProcessGrid(client_app, run_config=run_config, **grid), run_config, make_console(output)
    )
    return summaries, output.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def client_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_fedavg_and_fedpcd_train_side_by_side(tmp_path: Path) -> None:
    run_config = settings(tmp_path)
    summaries, output = run(run_config)
    folder = tmp_path / "run"

    assert [summary["strategy"] for summary in summaries] == ["fedavg", "fedpcd"]
    assert [summary["folder"] for summary in summaries] == [str(folder / "fedavg"), str(folder / "fedpcd")]
    assert {summary["status"] for summary in summaries} == {"completed"}
    assert sorted(path.name for path in folder.iterdir()) == ["comparison.png", "fedavg", "fedpcd"]

    task = TaskConfig.from_run_config(run_config)
    records = {name: lines(folder / name / "rounds.jsonl") for name in ("fedavg", "fedpcd")}
    for name, rounds in records.items():
        assert [line["round"] for line in rounds] == list(range(ROUNDS + 1))
        assert [len(line["cohort"]) for line in rounds] == [0, 5, 5, 5]
        assert all(line["accepted"] == line["cohort"] for line in rounds)
        assert rounds[-1]["evaluation"]["mean"] > rounds[0]["evaluation"]["mean"]
        assert len(client_rows(folder / name / "clients.csv")) == CLIENTS * (ROUNDS + 1)
        config = json.loads((folder / name / "config.json").read_text())
        assert config["run-config"]["num-clients"] == CLIENTS
        assert (config["code-hash"], config["hosting"], config["divided"]) == (code_hash(), "logical", True)
        # The model on disk is the one that was evaluated last.
        model = load_file(folder / name / "model.safetensors")
        arrays = initial_arrays(task)
        assert {key: array.dtype for key, array in model.items()} == {k: a.numpy().dtype for k, a in arrays.items()}
        state = type(arrays)({key: type(arrays[key])(np.asarray(model[key])) for key in arrays})
        final = {client: values[ACCURACY] for client, values in ServerEvaluation(task)(state).items()}
        assert load_run(folder / name).accuracies == final

    # The comparison is paired: same start, same cohorts.
    assert records["fedavg"][0]["evaluation"] == records["fedpcd"][0]["evaluation"]
    assert [line["cohort"] for line in records["fedavg"]] == [line["cohort"] for line in records["fedpcd"]]
    assert "constraints-active" in records["fedpcd"][1]["diagnostics"]

    for wanted in ("round 1/3  FedAvg", "round 3/3  FedPCD", "worst 10%", "ETA 0:00", f"results  {folder}"):
        assert wanted in output
    assert len(re.findall(r"^round \d/3 ", output, re.MULTILINE)) == 2 * (ROUNDS + 1)
    assert "\x1b" not in output


def test_one_seed_gives_the_same_bits_and_another_one_does_not(tmp_path: Path) -> None:
    models = []
    for name, seed, nodes in (("a", 0, 2), ("b", 0, 3), ("c", 1, 2)):
        run(settings(tmp_path, run_name=name, seed=seed, compare_with=""), num_nodes=nodes)
        models.append((tmp_path / name / "fedpcd" / "model.safetensors").read_bytes())
    assert models[0] == models[1]
    assert models[0] != models[2]


@pytest.mark.parametrize("evaluation", ["federated", "both"])
def test_clients_and_server_evaluate_alike(tmp_path: Path, evaluation: str) -> None:
    run(settings(tmp_path, run_name="server", compare_with="", evaluation="server"))
    run(settings(tmp_path, run_name="other", compare_with="", evaluation=evaluation))
    mine = client_rows(tmp_path / "server" / "fedpcd" / "clients.csv")
    theirs = client_rows(tmp_path / "other" / "fedpcd" / "clients.csv")
    assert len(mine) == len(theirs) == CLIENTS * (ROUNDS + 1)
    for row, other in zip(mine, theirs, strict=True):
        assert {**row, "loss": ""} == {**other, "loss": ""}
        assert float(row["loss"]) == pytest.approx(float(other["loss"]), abs=1e-6)


def test_evaluations_may_be_rarer_than_rounds(tmp_path: Path) -> None:
    for evaluation in ("server", "federated"):
        _, output = run(
            settings(tmp_path, run_name=evaluation, evaluation=evaluation, evaluate_every=2, compare_with="")
        )
        found = lines(tmp_path / evaluation / "fedpcd" / "rounds.jsonl")
        assert [line["round"] for line in found if line["evaluation"]] == [0, 2, 3]
        assert "round 1/3  FedPCD  not evaluated" in output


def test_clients_that_own_their_data_evaluate_themselves(tmp_path: Path) -> None:
    nodes = [{"client-id": f"site-{number}", "partition-id": number} for number in range(3)]
    summaries, _ = run(settings(tmp_path, num_clients=3, fraction_train=1.0), node_configs=nodes)
    config = json.loads((tmp_path / "run" / "fedpcd" / "config.json").read_text())
    assert (config["hosting"], config["evaluation"]) == ("own", "federated")
    assert config["client-ids"] == ["site-0", "site-1", "site-2"]
    assert summaries[0]["fairness"]["clients"] == 3


def test_a_site_lost_in_the_first_strategy_does_not_keep_the_second_from_starting(tmp_path: Path) -> None:
    class Losing(InProcessGrid):
        lost = False

        def get_node_ids(self) -> list[int]:
            nodes = list(self._contexts)
            return nodes[:-1] if self.lost else nodes

    def lose(message: Message, context: Context) -> None:
        if message.metadata.message_type == MessageType.TRAIN:
            grid.lost = True

    run_config = settings(tmp_path, num_clients=3, fraction_train=1.0, min_nodes=3)
    nodes = [{"client-id": f"site-{number}", "partition-id": number} for number in range(3)]
    grid = Losing(client_app, run_config=run_config, node_configs=nodes, intercept=lose)
    summaries = run_experiment(grid, run_config, make_console(io.StringIO()))
    assert [(s["strategy"], s["status"], s["rounds"]) for s in summaries] == [
        ("fedavg", "completed", ROUNDS),
        ("fedpcd", "completed", ROUNDS),
    ]
    assert lines(tmp_path / "run" / "fedpcd" / "rounds.jsonl")[1]["accepted"] == ["site-0", "site-1"]


@pytest.mark.parametrize("evaluation", ["server", "both"])
def test_the_server_cannot_evaluate_clients_that_own_their_data(tmp_path: Path, evaluation: str) -> None:
    nodes = [{"client-id": "0"}, {"client-id": "1"}]
    with pytest.raises(ConfigError, match=f"evaluation='{evaluation}' is not possible"):
        run(settings(tmp_path, evaluation=evaluation), node_configs=nodes)
    assert list(tmp_path.iterdir()) == []


def fails_for(client: str, kind: str = MessageType.TRAIN) -> Callable[[Message, Context], None]:
    def intercept(message: Message, context: Context) -> None:
        if message.metadata.message_type == kind and message.content["config"]["client-id"] == client:
            raise ValueError("boom")

    return intercept


def test_a_client_that_fails_is_named_in_the_results_and_the_run_goes_on(tmp_path: Path) -> None:
    summaries, output = run(settings(tmp_path, fraction_train=1.0), intercept=fails_for("7"))
    for summary in summaries:
        assert summary["rejections"] == {"error": ROUNDS, "invalid": 0, "silent": 0}
        found = lines(Path(summary["folder"]) / "rejections.jsonl")
        assert [(line["round"], line["client_id"], line["kind"]) for line in found] == [
            (server_round, "7", "error") for server_round in range(1, ROUNDS + 1)
        ]
        assert "boom" in found[0]["reason"]
    assert "rejected 1" in output


def test_a_client_that_cannot_evaluate_is_missing_and_named(tmp_path: Path) -> None:
    run_config = settings(tmp_path, evaluation="federated", compare_with="")
    summaries, _ = run(run_config, intercept=fails_for("7", MessageType.EVALUATE))
    assert summaries[0]["fairness"]["missing-clients"] == ["7"]
    assert summaries[0]["fairness"]["clients"] == CLIENTS - 1
    assert summaries[0]["evaluation-rejections"]["error"] == ROUNDS + 1


def test_a_run_in_which_every_reply_is_unusable_fails_with_the_first_reason(tmp_path: Path) -> None:
    def intercept(message: Message, context: Context) -> None:
        if message.metadata.message_type == MessageType.TRAIN:
            raise ValueError("no data here")

    with pytest.raises(
        ExperimentError, match=r"FedAvg received no usable reply in 3 rounds.*in round 1: .*no data here"
    ):
        run(settings(tmp_path), intercept=intercept)
    summary = json.loads((tmp_path / "run" / "fedavg" / "summary.json").read_text())
    assert (summary["status"], summary["skipped-rounds"]) == ("failed", ROUNDS)
    assert summary["rejections"]["error"] == 5 * ROUNDS


def test_an_experiment_that_dies_keeps_what_it_had(tmp_path: Path) -> None:
    def intercept(message: Message, context: Context) -> None:
        if message.metadata.message_type == MessageType.TRAIN and message.content["config"]["server-round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings(tmp_path), intercept=intercept)
    folder = tmp_path / "run" / "fedavg"
    assert [line["round"] for line in lines(folder / "rounds.jsonl")] == [0, 1, 2]
    assert len(client_rows(folder / "clients.csv")) == 3 * CLIENTS
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "KeyboardInterrupt" in summary["error"]
    assert load_file(folder / "model.safetensors").keys()
    assert not (tmp_path / "run" / "fedpcd").exists()


def test_a_disagreement_of_server_and_clients_ends_the_run(tmp_path: Path) -> None:
    def intercept(message: Message, context: Context) -> Message | None:
        if message.metadata.message_type != MessageType.EVALUATE or message.content["config"]["client-id"] != "4":
            return None
        metrics = MetricRecord({ACCURACY: 0.123, LOSS: 1.0, NUM_EXAMPLES: 20})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    with pytest.raises(DisagreementError, match="client 4"):
        run(settings(tmp_path, evaluation="both"), intercept=intercept)


def test_a_strategy_that_lets_no_client_evaluate_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS["fedpcd"], "configure_evaluate", lambda *_: [])
    with pytest.raises(ExperimentError, match="did not have the clients evaluate round 0"):
        run(settings(tmp_path, evaluation="federated", compare_with=""))


def test_an_infeasible_program_shows_in_the_progress(tmp_path: Path) -> None:
    # Two clients that only answer with opposite models: no direction serves both.
    def intercept(message: Message, context: Context) -> Message | None:
        if message.metadata.message_type != MessageType.TRAIN:
            return None
        sign = 1 if message.content["config"]["client-id"] == "0" else -2
        arrays = {name: Array(array.numpy() + np.float32(sign)) for name, array in message.content["arrays"].items()}
        metrics = MetricRecord({NUM_EXAMPLES: 5, TRAIN_LOSS: 1.0})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), METRICS: metrics}), reply_to=message)

    run_config = settings(tmp_path, num_clients=2, fraction_train=1.0, compare_with="", num_server_rounds=1)
    summaries, output = run(run_config, intercept=intercept)
    assert summaries[0]["infeasible-rounds"] == 1
    assert re.search(r"round 1/1  FedPCD .*  infeasible  ", output)
    assert "FedPCD: 1 infeasible round." in output


def test_long_runs_count_hours() -> None:
    assert [clock(seconds) for seconds in (0.4, 65, 3599.6, 7325)] == ["0:00", "1:05", "1:00:00", "2:02:05"]


def test_another_code_hash_ends_the_run_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server_app.experiment.code_hash", lambda: "other")
    with pytest.raises(RosterError, match="other client code"):
        run(settings(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_too_few_nodes_end_the_run_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RosterError, match="1 missing"):
        run(settings(tmp_path), node_configs=[{"partition-id": 0, "num-partitions": 2}])
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    run(settings(tmp_path, compare_with=""))
    before = (tmp_path / "run" / "fedpcd" / "rounds.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="run-name='run'"):
        run(settings(tmp_path, compare_with="", seed=1))
    assert (tmp_path / "run" / "fedpcd" / "rounds.jsonl").read_bytes() == before


def test_without_a_name_the_folder_says_what_ran(tmp_path: Path) -> None:
    run(settings(tmp_path, run_name="", compare_with="", seed=4))
    (folder,) = tmp_path.iterdir()
    assert re.fullmatch(r"digits-fedpcd-seed4-\d{8}T\d{6}Z", folder.name)


def test_flowers_log_holds_no_records_and_loses_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "propagate", True)
    filters = list(logger.filters)
    run(settings(tmp_path, fraction_train=1.0, compare_with=""), intercept=fails_for("7"))
    assert "MetricRecord" not in caplog.text
    assert "[ROUND" not in caplog.text
    assert "Starting FedPCD strategy" in caplog.text
    assert any(record.levelno == logging.WARNING and "boom" in record.getMessage() for record in caplog.records)
    assert logger.filters == filters


def test_the_server_app_runs_the_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_config = settings(tmp_path, compare_with="", num_server_rounds=1)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config)
    server_app(InProcessGrid(client_app, run_config=run_config), context)
    assert "round 1/1  FedPCD" in capsys.readouterr().out
    assert (tmp_path / "run" / "fedpcd" / "summary.json").is_file()


def test_a_wrong_key_makes_the_server_app_raise(tmp_path: Path) -> None:
    run_config = settings(tmp_path, tua=0.1)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config)
    with pytest.raises(ConfigError, match="did you mean 'tau'"):
        server_app(InProcessGrid(client_app, run_config=run_config), context)


def test_flower_finds_the_app_as_a_plain_assignment() -> None:
    source = (Path(__file__).parents[2] / "server_app" / "app.py").read_text()
    assert re.search(r"^app = ServerApp\(\)", source, re.MULTILINE)


def test_what_is_finished_is_reported_even_if_a_later_strategy_dies(tmp_path: Path) -> None:
    rounds = iter(range(1000))

    def intercept(message: Message, context: Context) -> None:
        # 5 clients in 3 rounds are FedAvg's; FedPCD dies in its second round.
        if message.metadata.message_type == MessageType.TRAIN and next(rounds) > 5 * ROUNDS + 5:
            raise KeyboardInterrupt

    console = make_console(io.StringIO())
    config = settings(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(InProcessGrid(client_app, 2, config, intercept=intercept), config, console)
    assert "FedAvg" in console.file.getvalue()
    assert list((tmp_path / "run").glob("*.png"))
    assert load_run(tmp_path / "run" / "fedavg").summary["status"] == "completed"
