from __future__ import annotations

import csv
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from safetensors import safe_open
from safetensors.numpy import load_file

from server_app.config import ConfigError
from server_app.result_files import write_json
from server_app.results import ResultsWriter, versions
from server_app.run_folder import default_run_name, new_run_folder
from strategies.protocol import ACCURACY, LOSS, NUM_EXAMPLES, TRAIN_LOSS
from strategies.reports import Rejection, RoundReport

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {"strategy": "fedpcd", "client-ids": ["0", "1", "10"], "run-config": {"tau": 0.02}}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def report(server_round: int, **changes: Any) -> RoundReport:
    content: dict[str, Any] = {
        "round": server_round,
        "cohort": ("0", "1", "10"),
        "accepted": ("0", "1"),
        "rejections": (Rejection("10", "error", "boom"),),
        "skipped": False,
        "diagnostics": {"status": "solved", "direction-norm": 1.5, "multipliers": {"1": 0.3}},
        "train_metrics": {
            "0": {NUM_EXAMPLES: 10.0, TRAIN_LOSS: 2.0},
            "1": {NUM_EXAMPLES: 30.0, TRAIN_LOSS: 1.0},
        },
        "seconds": {"total": 0.1},
    }
    return RoundReport(**{**content, **changes})


def evaluation(*accuracies: float, loss: float = 0.5) -> dict[str, dict[str, float]]:
    return {
        client: {ACCURACY: accuracy, LOSS: loss, NUM_EXAMPLES: 20}
        for client, accuracy in zip(("10", "1", "0"), accuracies, strict=False)
    }


MODEL = ArrayRecord({"w": Array(np.eye(2, dtype=np.float32))})


def test_a_round_is_on_disk_before_it_is_evaluated(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        writer.record_round(report(1))
        (line,) = lines(writer.folder / "rounds.jsonl")
        (rejection,) = lines(writer.folder / "rejections.jsonl")
        writer.finish(MODEL)
    assert line["round"] == 1
    assert line["cohort"] == ["0", "1", "10"]
    assert line["accepted"] == ["0", "1"]
    assert (line["rejected"], line["skipped"], line["evaluation"]) == (1, False, None)
    assert line["diagnostics"]["multipliers"] == {"1": 0.3}
    assert line["train"] == {NUM_EXAMPLES: 40, TRAIN_LOSS: {"mean": 1.5, "min": 1.0, "max": 2.0}}
    assert rejection == {"round": 1, "phase": "train", "client_id": "10", "kind": "error", "reason": "boom"}


def test_an_evaluation_completes_the_line_of_its_round(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        writer.record_evaluation(0, evaluation(0.1, 0.1, 0.1))
        for server_round in (1, 2):
            writer.record_round(report(server_round))
            writer.record_evaluation(server_round, evaluation(0.25 * server_round, 0.5, 1.0))
        writer.finish(MODEL)
    found = lines(tmp_path / "run" / "rounds.jsonl")
    assert [line["round"] for line in found] == [0, 1, 2]
    assert [line["evaluation"]["worst-10"] for line in found] == [0.1, 0.25, 0.5]
    assert found[0]["cohort"] == []
    assert found[1]["evaluation"]["worst-client"] == "10"
    assert found[1]["evaluation"]["mean-loss"] == 0.5
    assert found[1]["diagnostics"]["status"] == "solved"
    assert {frozenset(line) for line in found} == {frozenset(found[0])}


def test_an_earlier_round_cannot_be_rewritten(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        writer.record_round(report(1))
        writer.record_round(report(2))
        with pytest.raises(ValueError, match="round 1 is over"):
            writer.record_evaluation(1, evaluation(0.5, 0.5, 0.5))
        writer.finish(MODEL)


def test_clients_are_listed_in_numerical_order_with_exact_values(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        writer.record_evaluation(0, evaluation(0.1, 1 / 3, 1.0, loss=math.pi))
        writer.finish(MODEL)
    found = rows(tmp_path / "run" / "clients.csv")
    assert [row["client_id"] for row in found] == ["0", "1", "10"]
    assert float(found[1]["accuracy"]) == 1 / 3
    assert float(found[1]["loss"]) == math.pi
    assert found[1]["num_examples"] == "20"
    assert list(found[0]) == ["round", "client_id", "accuracy", "loss", "num_examples"]


def test_clients_that_did_not_evaluate_are_named(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        writer.record_round(report(1))
        writer.record_rejections(1, "evaluate", [Rejection("0", "silent", "no answer in 5 s")])
        result = writer.record_evaluation(1, evaluation(0.25, 0.75))
        summary = writer.finish(MODEL)
    assert result is not None
    assert (result.clients, result.mean) == (2, 0.5)
    assert lines(tmp_path / "run" / "rounds.jsonl")[0]["evaluation"]["missing-clients"] == ["0"]
    assert summary["rejections"] == {"error": 1, "invalid": 0, "silent": 0}
    assert summary["evaluation-rejections"] == {"error": 0, "invalid": 0, "silent": 1}


def test_an_evaluation_without_any_client_is_null(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        writer.record_round(report(1))
        assert writer.record_evaluation(1, {}) is None
        summary = writer.finish(MODEL)
    assert lines(tmp_path / "run" / "rounds.jsonl")[0]["evaluation"] is None
    assert summary["fairness"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan"), np.float32("inf")])
def test_numbers_that_json_lacks_become_null(tmp_path: Path, value: float) -> None:
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        writer.record_round(report(1, diagnostics={"kkt-residual": value, "nested": [{"x": value}]}))
        writer.record_evaluation(1, evaluation(0.5, 0.5, 0.5, loss=float(value)))
        writer.finish(MODEL)
    (line,) = lines(tmp_path / "run" / "rounds.jsonl")
    assert line["diagnostics"] == {"kkt-residual": None, "nested": [{"x": None}]}
    assert line["evaluation"]["mean-loss"] is None
    assert "NaN" not in (tmp_path / "run" / "summary.json").read_text()


def test_numpy_values_are_written_as_numbers(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": np.float64(0.5), "b": np.arange(2), "c": np.bool_(True), "d": (1, 2)})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 0.5, "b": [0, 1], "c": True, "d": [1, 2]}


def test_the_summary_counts_what_happened(tmp_path: Path) -> None:
    statuses = ["solved", "infeasible", "uncertified", "inactive", "infeasible"]
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        for server_round, status in enumerate(statuses, start=1):
            writer.record_round(report(server_round, diagnostics={"status": status}))
            writer.record_evaluation(server_round, evaluation(0.1 * server_round, 0.8, 0.9))
        writer.record_round(report(6, skipped=True, accepted=(), diagnostics={}, train_metrics={}, rejections=()))
        summary = writer.finish(MODEL)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"], summary["strategy"]) == ("completed", None, "fedpcd")
    assert (summary["rounds"], summary["skipped-rounds"], summary["clients"]) == (6, 1, 3)
    assert (summary["infeasible-rounds"], summary["uncertified-rounds"]) == (2, 1)
    assert summary["programs"] == {"inactive": 1, "infeasible": 2, "solved": 1, "uncertified": 1}
    assert summary["rejections"] == {"error": 5, "invalid": 0, "silent": 0}
    assert (summary["evaluated-round"], summary["fairness"]["worst-accuracy"]) == (5, 0.5)
    assert summary["fairness-last-evaluations"]["evaluations"] == 5
    assert summary["fairness-last-evaluations"]["worst-10"] == pytest.approx(0.3)
    assert summary["seconds"] > 0


def test_a_run_that_dies_keeps_its_rounds_and_says_why(tmp_path: Path) -> None:
    writer = ResultsWriter(tmp_path / "run", CONFIG)

    def die() -> None:
        with writer:
            writer.record_round(report(1))
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        die()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "RuntimeError: power cut")
    assert summary["rounds"] == 1
    assert len(lines(tmp_path / "run" / "rounds.jsonl")) == 1
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_the_model_keeps_names_order_shapes_and_dtypes(tmp_path: Path) -> None:
    arrays = {
        "z.weight": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "a.count": np.array(7, dtype=np.int64),
        "half": np.array([1.5], dtype=np.float16),
        "mask": np.array([True, False]),
        "empty": np.zeros((0, 3)),
    }
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        writer.finish(ArrayRecord({name: Array(array) for name, array in arrays.items()}))
    path = tmp_path / "run" / "model.safetensors"
    loaded = load_file(path)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        np.testing.assert_array_equal(loaded[name], array)
    with safe_open(path, framework="numpy") as file:
        assert json.loads(file.metadata()["order"]) == list(arrays)


def test_config_holds_versions_and_what_was_given(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        writer.finish(MODEL)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["schema-version"] == 1
    assert config["run-config"] == {"tau": 0.02}
    assert config["versions"] == versions()
    assert {"fedpcd", "flwr", "torch", "numpy", "proxsuite", "python"} == set(config["versions"])
    assert config["versions"]["numpy"] == np.__version__
    assert config["started"].endswith("+00:00")


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"old": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(tmp_path / "x.json", {"new": object()})
    assert json.loads((tmp_path / "x.json").read_text()) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_no_temporary_file_remains(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "run", CONFIG) as writer:
        writer.finish(MODEL)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "clients.csv",
        "config.json",
        "model.safetensors",
        "rejections.jsonl",
        "rounds.jsonl",
        "summary.json",
    ]


def test_an_existing_run_is_never_overwritten(tmp_path: Path) -> None:
    folder = new_run_folder(tmp_path / "all", "mine")
    (folder / "precious").write_text("data")
    with pytest.raises(ConfigError, match=r"run-name='mine'.*never overwritten"):
        new_run_folder(tmp_path / "all", "mine")
    assert (folder / "precious").read_text() == "data"


def test_runs_named_by_the_clock_get_a_number_in_the_same_second(tmp_path: Path) -> None:
    names = [new_run_folder(tmp_path, "digits-t", automatic=True).name for _ in range(3)]
    assert names == ["digits-t", "digits-t-2", "digits-t-3"]


def test_the_default_name_says_what_runs() -> None:
    assert default_run_name("digits", "fedpcd", 7).startswith("digits-fedpcd-seed7-20")


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "with space", "ümlaut", "-x", "a\n"])
def test_a_run_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="run-name"):
        new_run_folder(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_results_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="results-dir"):
        new_run_folder(tmp_path / "file" / "below", "run")


def test_a_results_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="results-dir"):
        new_run_folder(tmp_path / "file", "run")
