from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from client_app import STATE_DIR_VARIABLE, client_state

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["context", "folder"])
def state(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordDict:
    if request.param == "folder":
        monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path))
    return RecordDict()


def test_an_unknown_client_has_no_records(state: RecordDict) -> None:
    assert client_state.load(state, "7") == {}


def test_records_of_every_kind_come_back(state: RecordDict) -> None:
    records = {
        "numbers": MetricRecord({"loss": 0.5}),
        "words": ConfigRecord({"name": "site-a"}),
        "model": ArrayRecord({"weight": Array(np.arange(3.0))}),
    }
    client_state.save(state, "site-a", records)
    loaded = client_state.load(state, "site-a")
    assert loaded == records
    assert np.array_equal(loaded["model"]["weight"].numpy(), np.arange(3.0))


def test_saving_replaces_the_clients_records_and_no_others(state: RecordDict) -> None:
    client_state.save(state, "1", {"a": MetricRecord({"x": 1}), "b": MetricRecord({"x": 2})})
    client_state.save(state, "11", {"a": MetricRecord({"x": 3})})
    client_state.save(state, "1", {"c": MetricRecord({"x": 4})})
    assert client_state.load(state, "1") == {"c": MetricRecord({"x": 4})}
    assert client_state.load(state, "11") == {"a": MetricRecord({"x": 3})}


def test_participations_are_counted_per_client(state: RecordDict) -> None:
    counts = [client_state.count_participation(state, client) for client in ("0", "1", "0", "0", "1")]
    assert counts == [1, 1, 2, 3, 2]


def test_counting_keeps_the_clients_other_records(state: RecordDict) -> None:
    client_state.save(state, "1", {"a": MetricRecord({"x": 1})})
    client_state.count_participation(state, "1")
    assert client_state.load(state, "1")["a"] == MetricRecord({"x": 1})


@given(st.lists(st.text(), min_size=2, max_size=5, unique=True))
def test_any_ids_keep_their_records_apart(ids: list[str]) -> None:
    state = RecordDict()
    ids = [identifier for identifier in ids if identifier.isprintable()]
    for number, identifier in enumerate(ids):
        client_state.save(state, identifier, {"n": MetricRecord({"x": number})})
    assert [client_state.load(state, identifier)["n"]["x"] for identifier in ids] == list(range(len(ids)))


def test_an_id_cannot_leave_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(folder))
    client_state.save(RecordDict(), "../outside", {"a": MetricRecord({"x": 1})})
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert client_state.load(RecordDict(), "../outside") == {"a": MetricRecord({"x": 1})}


IMPORT = (
    "import os, sys; sys.argv[0] = sys.argv[1]; import client_app; print(os.getcwd()); "
    "print(os.environ.get(client_app.STATE_DIR_VARIABLE, '-'))"
)


def import_as(program: str, cwd: Path, extra: str = "") -> list[str]:
    command = [sys.executable, "-c", IMPORT + extra, program]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd, env=environment).stdout.split()


@pytest.mark.parametrize("program", ["/venv/bin/flwr-simulation", "flwr-simulation"])
def test_flowers_simulation_process_moves_into_the_apps_folder(tmp_path: Path, program: str) -> None:
    cwd, folder = import_as(program, tmp_path)
    assert Path(cwd) == ROOT
    assert Path(folder).is_absolute()
    assert not Path(folder).exists()  # removed when the process ended


def test_the_state_folder_is_private_while_the_simulation_runs(tmp_path: Path) -> None:
    mode = import_as(
        "flwr-simulation", tmp_path, "; print(os.stat(os.environ[client_app.STATE_DIR_VARIABLE]).st_mode)"
    )[2]
    assert stat.S_IMODE(int(mode)) == 0o700


@pytest.mark.parametrize("program", ["pytest", "/venv/bin/flwr-clientapp", "default_worker.py", "flower-superlink"])
def test_any_other_process_stays_where_it_is(tmp_path: Path, program: str) -> None:
    assert import_as(program, tmp_path) == [str(tmp_path), "-"]


def test_a_forked_child_that_ends_leaves_the_state_folder_to_its_owner(tmp_path: Path) -> None:
    fork = "; pid = os.fork(); pid or sys.exit(); os.waitpid(pid, 0)"
    fork += "; print(os.path.isdir(os.environ[client_app.STATE_DIR_VARIABLE]))"
    assert import_as("flwr-simulation", tmp_path, fork)[-1] == "True"
