"""Methods with more than one model: each is evaluated under its own name, and never mixed with the global one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from client_app.app import app as client_app
from server_app.experiment import run_experiment
from server_app.report import compare, make_console
from strategies.inprocess import InProcessGrid
from strategies.rules import RULES
from tests.support import assert_same_bits

SMALL = {"num-clients": 10, "fraction-train": 0.5, "num-server-rounds": 4, "local-learning-rate": 0.5}


def run(folder: Path, **changes: Any) -> Path:
    config = {**SMALL, "results-dir": str(folder), "run-name": "run"}
    config |= {key.replace("_", "-"): value for key, value in changes.items()}
    run_experiment(InProcessGrid(client_app, 2, config), config)
    return folder / "run"


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["evaluation"] for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_dittos_global_model_is_fedavgs_and_its_personal_models_are_reported_apart(tmp_path: Path) -> None:
    folder = run(tmp_path, strategy="ditto", compare_with="fedavg", personal_epochs=5)
    assert_same_bits(load_file(folder / "ditto/model.safetensors"), load_file(folder / "fedavg/model.safetensors"))
    ditto, fedavg = evaluations(folder / "ditto"), evaluations(folder / "fedavg")
    for ours, theirs in zip(ditto, fedavg, strict=True):
        assert ours["mean"] == theirs["mean"]
        assert "variants" not in theirs
    assert ditto[0]["variants"]["personal"]["mean"] == ditto[0]["mean"]
    assert ditto[-1]["variants"]["personal"]["mean"] > ditto[-1]["mean"]


def test_a_client_that_never_took_part_evaluates_with_the_global_model(tmp_path: Path) -> None:
    folder = run(tmp_path, strategy="ditto", fraction_train=0.1, num_server_rounds=1, evaluation="both")
    first = evaluations(folder / "ditto")[-1]
    assert first["variants"]["personal"]["clients"] == 10
    assert first["missing-clients"] == []


def test_afls_result_is_the_average_of_its_iterates_and_the_last_one_is_reported_apart(tmp_path: Path) -> None:
    folder = run(tmp_path, strategy="afl", multiplier_step=0.1)
    last = run(tmp_path / "other", strategy="afl", multiplier_step=0.1, afl_output="last")
    average, iterate = evaluations(folder / "afl"), evaluations(last / "afl")
    for ours, theirs in zip(average[1:], iterate[1:], strict=True):
        assert ours["variants"]["last-iterate"]["mean"] == theirs["mean"]
    models = [load_file(place / "afl/model.safetensors") for place in (folder, last)]
    assert any(models[0][name].tobytes() != models[1][name].tobytes() for name in models[0])


def test_afls_output_is_the_running_mean_with_the_initial_model(tmp_path: Path) -> None:
    iterates = []
    for rounds in range(1, 4):
        place = run(tmp_path / str(rounds), strategy="afl", afl_output="last", num_server_rounds=rounds)
        iterates.append(load_file(place / "afl/model.safetensors"))
    start = run(tmp_path / "start", strategy="fedavg", server_learning_rate=1e-30, num_server_rounds=1)
    iterates.append(load_file(start / "fedavg/model.safetensors"))
    average = load_file(run(tmp_path / "average", strategy="afl", num_server_rounds=3) / "afl/model.safetensors")
    for name, array in average.items():
        expected = np.mean([iterate[name].astype(np.float64) for iterate in iterates], axis=0)
        np.testing.assert_allclose(array, expected, atol=1e-6)


def test_the_report_names_the_other_models_in_its_notes(tmp_path: Path) -> None:
    table, _ = compare([run(tmp_path, strategy="ditto", compare_with="afl")])
    text = io.StringIO()
    make_console(text).print(table)
    assert "Ditto, the clients' personal models (not in the table): mean" in " ".join(text.getvalue().split())
    assert "AFL, the last iterate instead of the average" in " ".join(text.getvalue().split())


def test_strategy_list_prints_every_method_and_trains_nothing(tmp_path: Path) -> None:
    text = io.StringIO()
    config = {"strategy": "list", "results-dir": str(tmp_path / "none")}
    assert run_experiment(InProcessGrid(client_app, 1, config), config, make_console(text)) == []
    assert not (tmp_path / "none").exists()
    assert all(f"{name}: " in text.getvalue() for name in RULES)


@pytest.mark.parametrize("method", ["fedmdfg"])
def test_the_line_search_asks_the_cohort_and_reports_how_often(tmp_path: Path, method: str) -> None:
    folder = run(tmp_path, strategy=method)
    lines = [json.loads(line) for line in (folder / method / "rounds.jsonl").read_text().splitlines()]
    searched = [line["diagnostics"] for line in lines[1:]]
    assert all(d["status"] in ("solved", "line-search-failed") for d in searched)
    assert all(d["trial-evaluations"] >= 1 and d["accepted-step"] > 0 for d in searched)
