"""The command's surface: exit codes, error texts, what it hands to the engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import engines, main
from cli.app_folder import AppFolder
from cli.errors import RunError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fedpcd():
    return lambda *arguments: CliRunner().invoke(main.app, [str(argument) for argument in arguments])


@pytest.fixture
def simulation(monkeypatch):
    """Record what the simulation engine would be started with."""
    calls = []
    monkeypatch.setattr(main, "run_simulation", lambda app, changes, **size: calls.append((app, changes, size)))
    return calls


def test_the_simulation_gets_all_values_and_an_absolute_results_folder(fedpcd, simulation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = fedpcd("run", ROOT, "-c", "tau=0.5 seed=1", "-c", "seed=2", "--compare-with", "fedavg", "--nodes", 4)
    assert done.exit_code == 0, done.output
    [(app, changes, size)] = simulation
    assert app.path == ROOT.resolve()
    assert changes == {
        "tau": 0.5,
        "seed": 2,
        "compare-with": "fedavg",
        "results-dir": str(tmp_path.resolve() / "results"),
    }
    assert size == {"nodes": 4, "cpus_per_client": 1}


def test_a_relative_results_folder_is_meant_from_where_the_command_is_typed(fedpcd, simulation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fedpcd("run", ROOT, "--results-dir", "here")
    assert simulation[0][1]["results-dir"] == str(tmp_path.resolve() / "here")


def test_a_results_folder_from_the_run_config_is_kept(fedpcd, simulation):
    fedpcd("run", ROOT, "-c", "results-dir=/elsewhere")
    assert simulation[0][1]["results-dir"] == "/elsewhere"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", ROOT, "-c", "tua=1"], "did you mean 'tau'"),
        (["run", ROOT, "--preset", "nope"], "fashion-mnist"),
        (["run", "/nowhere"], "no pyproject.toml"),
        (["report", "/nowhere"], "no such results folder: /nowhere"),
    ],
)
def test_wrong_input_exits_with_2_and_one_clear_line(fedpcd, simulation, arguments, words):
    done = fedpcd(*arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert simulation == []


def test_a_failed_run_exits_with_1_and_its_reason(fedpcd, monkeypatch):
    def fail(*arguments, **size):
        raise RunError("finished:failed: told to fail")

    monkeypatch.setattr(main, "run_simulation", fail)
    done = fedpcd("run", ROOT)
    assert done.exit_code == 1
    assert "told to fail" in done.stderr


def test_ctrl_c_exits_with_130(fedpcd, monkeypatch):
    def interrupt(*arguments, **size):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run_simulation", interrupt)
    assert fedpcd("run", ROOT).exit_code == 130


@pytest.mark.parametrize(("status", "fails"), [("finished:completed", False), ("finished:stopped", True)])
def test_only_a_completed_run_is_a_success(monkeypatch, status, fails):
    seen = {}

    class SuperLink:
        def __init__(self, folder): ...
        def __enter__(self):
            return self

        def __exit__(self, *error): ...
        def submit(self, changes, **size):
            seen.update(size)
            return 1

        def stream(self, run_id): ...
        def outcome(self, run_id):
            return status, "details"

    monkeypatch.setattr(engines, "LocalSuperLink", SuperLink)
    app = AppFolder.at(ROOT)
    if fails:
        with pytest.raises(RunError, match="finished:stopped: details"):
            engines.run_simulation(app, {}, nodes=None, cpus_per_client=1)
    else:
        engines.run_simulation(app, {}, nodes=None, cpus_per_client=1)
    assert seen["nodes"] == 10  # one per client of a cohort: 10 % of 100


@pytest.mark.parametrize(
    ("fraction", "clients", "minimum", "nodes"),
    [(0.1, 100, 2, 10), (0.05, 10, 2, 2), (0.25, 10, 2, 3), (1.0, 3, 8, 8)],
)
def test_there_is_a_node_for_each_client_of_a_cohort(fraction, clients, minimum, nodes):
    run_config = {"fraction-train": fraction, "num-clients": clients, "min-nodes": minimum}
    assert engines.default_nodes(run_config) == nodes


def test_a_wrong_value_reaches_the_app_and_comes_back_without_a_traceback(fedpcd, tmp_path):
    done = fedpcd("run", ROOT, "--engine", "in-process", "-c", "dataset=nope", "--results-dir", tmp_path)
    assert done.exit_code == 1
    assert "nope" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unforeseen_error_keeps_its_traceback(fedpcd, monkeypatch):
    monkeypatch.setattr(main, "run_simulation", lambda *arguments, **size: 1 / 0)
    done = fedpcd("run", ROOT)
    assert done.exit_code == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_run_in_this_process_trains_reports_and_can_be_reported_again(fedpcd, tmp_path):
    done = fedpcd(
        *("run", ROOT, "--engine", "in-process", "--compare-with", "fedavg", "--results-dir", tmp_path),
        *("-c", "num-server-rounds=2 num-clients=10 fraction-train=0.3 alpha=1 run-name=short"),
    )
    assert done.exit_code == 0, done.output + done.stderr
    assert "FedAvg" in done.stdout
    assert "FedPCD" in done.stdout
    assert (tmp_path / "short" / "comparison.png").is_file()
    config = json.loads((tmp_path / "short" / "fedpcd" / "config.json").read_text())
    assert config["run-config"]["num-clients"] == 10

    again = fedpcd("report", tmp_path / "short", "--app", ROOT)
    assert again.exit_code == 0, again.output + again.stderr
    assert "FedAvg" in again.stdout
    assert "comparison.png" in again.stdout


def test_methods_lists_every_method_with_its_defaults(fedpcd):
    from strategies import METHODS

    done = fedpcd("methods")
    assert done.exit_code == 0, done.output
    assert all(name in done.stdout for name in METHODS)
    assert "tau=0.02" in done.stdout


@pytest.mark.parametrize("command", ["run", "report", "methods"])
def test_help_teaches(fedpcd, command):
    done = fedpcd(command, "--help")
    assert done.exit_code == 0
    assert command == "methods" or f"fedpcd {command} " in done.stdout
