"""The command's surface: exit codes, error texts, what it hands to the engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import engines, main
from cli.app_folder import AppFolder
from cli.errors import RunError
from tests.interrupted_runs import at_message
from tests.interrupted_runs import interrupt as interrupt_run
from tests.interrupted_runs import run as run_app
from tests.interrupted_runs import settings as settings_of_a_small_run

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
    assert size == {"nodes": 4, "cpus_per_client": 1, "gpus_per_client": 0.0}


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
        (["run", ROOT, "-c", "strategy=fedpdc"], "did you mean 'fedpcd'?"),
        (["run", ROOT, "--engine", "in-process", "-c", "dataset=nope"], "dataset='nope' is not allowed"),
        (["run", ROOT, "-c", "results-dir=mine"], "use --results-dir mine"),
        (["report", "/nowhere"], "no such results folder: /nowhere"),
        (["report", ROOT / "docs", "--app", ROOT], "holds no results"),
        (["report", ROOT / "docs", "--app", ROOT, "--output", "a.jpg"], ".png"),
        (["report", ROOT / "docs", "--app", ROOT, "--output", "/nowhere/a.png"], "there is no folder /nowhere"),
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
        raise RunError("told to fail")

    monkeypatch.setattr(main, "run_simulation", fail)
    done = fedpcd("run", ROOT)
    assert done.exit_code == 1
    assert done.stderr == "fedpcd: the run failed: told to fail\n"


def test_ctrl_c_exits_with_130_and_says_where_results_are(fedpcd, monkeypatch, tmp_path):
    (tmp_path / "earlier").mkdir()

    def interrupt(app, changes, **size):
        (Path(changes["results-dir"]) / "this").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run_simulation", interrupt)
    done = fedpcd("run", ROOT, "--results-dir", tmp_path)
    assert done.exit_code == 130
    made = tmp_path.resolve() / "this"
    assert done.stderr == f"fedpcd: interrupted; results so far: {made} (to go on: fedpcd run . --resume {made})\n"


def test_resume_takes_the_settings_of_the_run(fedpcd, simulation, tmp_path):
    folder = tmp_path / "run"
    settings = settings_of_a_small_run(tmp_path, "run")
    with pytest.raises(KeyboardInterrupt):
        run_app(settings, at_message(12, interrupt_run))
    done = fedpcd("run", ROOT, "--resume", folder, "--results-dir", tmp_path)
    assert done.exit_code == 0, done.output
    [(_, changes, size)] = simulation
    assert changes == {"resume": str(folder.resolve()), "results-dir": str(tmp_path.resolve())}
    assert size["nodes"] == 5  # a quarter of that run's 20 clients
    done = fedpcd("run", ROOT, "--resume", folder, "--engine", "in-process")
    assert done.exit_code == 0, done.output
    assert "fedpcd goes on after round 2" in done.output


def test_a_complete_run_has_nothing_to_resume_and_nothing_is_started(fedpcd, simulation, tmp_path):
    run_app(settings_of_a_small_run(tmp_path, "run"))
    (tmp_path / "run" / "fedpcd" / "checkpoints").mkdir()  # it died before it had cleaned up
    done = fedpcd("run", ROOT, "--resume", tmp_path / "run")
    assert not (tmp_path / "run" / "fedpcd" / "checkpoints").exists()
    assert done.exit_code == 2
    assert "this run is complete, there is nothing to do" in done.stderr
    done = fedpcd("run", ROOT, "--resume", tmp_path / "run", "-c", "tau=0.9")
    assert done.exit_code == 2
    assert "tau=0.9 (the run has " in done.stderr
    assert simulation == []


def test_resume_names_a_folder_that_holds_no_run_before_anything_is_started(fedpcd, simulation, tmp_path):
    done = fedpcd("run", ROOT, "--resume", tmp_path / "typo")
    assert done.exit_code == 2
    assert "typo' does not exist" in done.stderr
    assert simulation == []


def test_ctrl_c_before_there_are_results_says_no_more(fedpcd, monkeypatch, tmp_path):
    def interrupt(*arguments, **size):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run_simulation", interrupt)
    assert fedpcd("run", ROOT, "--results-dir", tmp_path / "none").stderr == "fedpcd: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_unwinds_once_however_often_it_is_sent(fedpcd, monkeypatch, number):
    unwound = []

    def wait(*arguments, **size):
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            unwound.append(number)

    monkeypatch.setattr(main, "run_simulation", wait)
    before = signal.getsignal(number)
    assert fedpcd("run", ROOT).exit_code == 128 + number
    assert unwound == [number]
    assert signal.getsignal(number) == before


def test_a_closed_terminal_does_not_end_a_run_under_nohup(fedpcd, monkeypatch):
    monkeypatch.setattr(main, "run_simulation", lambda *arguments, **size: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert fedpcd("run", ROOT).exit_code == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("names", "noted"), [("fedavg,fedpcd", True), ("fedavg", False), ("", False)])
def test_a_comparison_of_the_strategy_with_itself_is_said_to_be_left_out(fedpcd, simulation, names, noted):
    done = fedpcd("run", ROOT, "--compare-with", names)
    assert done.exit_code == 0, done.stderr
    assert ("fedpcd is the strategy of this run already" in done.stdout) == noted


def test_the_version_is_that_of_the_installed_package(fedpcd, monkeypatch):
    monkeypatch.setattr(main, "version", lambda name: {"fedpcd": "1.2.3"}[name])
    done = fedpcd("--version")
    assert (done.exit_code, done.stdout) == (0, "fedpcd 1.2.3\n")


def test_without_an_installed_package_there_is_no_version(fedpcd, monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(main, "version", version)
    done = fedpcd("--version")
    assert done.exit_code == 0
    assert "not installed" in done.stdout


@pytest.mark.parametrize(("status", "fails"), [("finished:completed", False), ("finished:stopped", True)])
def test_only_a_completed_run_is_a_success(monkeypatch, status, fails):
    seen = {}

    class SuperLink:
        def __init__(self, folder): ...
        def __enter__(self):
            return self

        def __exit__(self, *error): ...
        def submit(self, changes, federation):
            seen["federation"] = federation
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
    assert seen["federation"].startswith("num-supernodes=10 ")  # one per client of a cohort: 10 % of 100


@pytest.mark.parametrize(
    ("details", "text"),
    [
        ("Simulation failed with exception: tau=2.0 is not allowed", "tau=2.0 is not allowed"),
        ("ServerApp failed with exception: it failed with exception: x", "it failed with exception: x"),
        ("told to fail", "told to fail"),
        ("", "finished:failed"),
    ],
)
def test_a_failed_run_is_told_in_the_words_of_its_exception(details, text):
    assert engines._reason("finished:failed", details) == text


@pytest.mark.parametrize(
    ("fraction", "clients", "minimum", "nodes"),
    [(0.1, 100, 2, 10), (0.05, 10, 2, 2), (0.25, 10, 2, 3), (1.0, 3, 8, 8)],
)
def test_there_is_a_node_for_each_client_of_a_cohort(fraction, clients, minimum, nodes):
    run_config = {"fraction-train": fraction, "num-clients": clients, "min-nodes": minimum}
    assert engines.default_nodes(run_config) == nodes


def test_an_error_of_the_app_during_the_run_comes_back_without_a_traceback(fedpcd, tmp_path):
    (tmp_path / "file").touch()
    done = fedpcd("run", ROOT, "--engine", "in-process", "--results-dir", tmp_path / "file")
    assert done.exit_code == 1
    assert "is a file" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unforeseen_error_keeps_its_traceback(fedpcd, monkeypatch):
    monkeypatch.setattr(main, "run_simulation", lambda *arguments, **size: 1 / 0)
    done = fedpcd("run", ROOT)
    assert done.exit_code == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    program = (
        "from cli.reporting import reported_errors\nwith reported_errors():\n    print('x' * 10**6)\n    print('y')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_run_in_this_process_trains_reports_and_can_be_reported_again(fedpcd, tmp_path):
    done = fedpcd(
        *("run", ROOT, "--engine", "in-process", "--compare-with", "fedavg", "--results-dir", tmp_path),
        *("-c", "num-server-rounds=2 num-clients=10 fraction-train=0.3 alpha=1 run-name=short"),
    )
    assert done.exit_code == 0, done.output + done.stderr
    assert "FedAvg" in done.stdout
    assert "FedPCD" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""  # Flower's log is in its place between the progress lines
    assert done.stdout.index("Rule: FedAvg(") < done.stdout.index("round 0/2") < done.stdout.index("Rule: FedPCD(")
    assert "(empty!)" not in done.stdout
    assert "evaluate (" not in done.stdout
    run, picture = tmp_path / "short", tmp_path / "short" / "comparison.png"
    assert done.stdout.splitlines()[-2:] == [f"picture  {picture}", f"results  {run}"]
    assert (tmp_path / "short" / "comparison.png").is_file()
    config = json.loads((tmp_path / "short" / "fedpcd" / "config.json").read_text())
    assert config["run-config"]["num-clients"] == 10

    again = fedpcd("report", tmp_path, "--app", ROOT, "--output", tmp_path / "other.png")  # the folder of all runs
    assert again.exit_code == 0, again.output + again.stderr
    assert "FedAvg" in again.stdout
    assert again.stdout.splitlines()[-1] == f"picture  {tmp_path / 'other.png'}"
    assert (tmp_path / "other.png").is_file()


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
