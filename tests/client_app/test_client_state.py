from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app import STATE_DIR_VARIABLE, client_state
from client_app.client_state import FolderState
from client_app.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["context", "folder"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> RecordDict:
    return FolderState(tmp_path / "memory", 1, training=True) if request.param == "folder" else RecordDict()


def number(value: int) -> dict[str, MetricRecord]:
    return {"n": MetricRecord({"x": value})}


def test_an_unknown_client_has_no_records(state: RecordDict) -> None:
    assert client_state.load(state, "7") == {}


def test_records_of_every_kind_come_back(state: RecordDict) -> None:
    records = {
        "numbers": MetricRecord({"loss": 0.1 + 0.2, "rounds": [1, 2], "beyond": float("inf")}),
        "words": ConfigRecord({"name": "site-\u00e4", "on": True}),
        "model": ArrayRecord(
            {
                "weight": Array(np.arange(6.0).reshape(2, 3).T),
                "b": Array(np.asarray(3, dtype=np.int64)),
                "a": Array(np.zeros((0, 2), dtype=np.float32)),
            }
        ),
    }
    client_state.save(state, "site-a", records)
    loaded = client_state.load(state, "site-a")
    assert list(loaded) == list(records)
    assert (loaded["numbers"], loaded["words"]) == (records["numbers"], records["words"])
    assert list(loaded["model"]) == ["weight", "b", "a"]
    for name, array in records["model"].items():
        assert np.array_equal(loaded["model"][name].numpy(), array.numpy())
        assert loaded["model"][name].numpy().dtype == array.numpy().dtype


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


@settings(deadline=None)  # files take as long as the disk wants
@given(st.lists(st.text(max_size=200), min_size=2, max_size=5, unique=True), st.booleans())
def test_any_ids_keep_their_records_apart(ids: list[str], in_folder: bool) -> None:
    ids = [identifier for identifier in ids if identifier.isprintable()]
    with tempfile.TemporaryDirectory() as folder:
        state = FolderState(Path(folder), 1, training=True) if in_folder else RecordDict()
        for value, identifier in enumerate(ids):
            client_state.save(state, identifier, number(value))
        assert [client_state.load(state, identifier)["n"]["x"] for identifier in ids] == list(range(len(ids)))


@pytest.mark.parametrize("identifier", ["../outside", "..", ".", "/etc/passwd", "", "x" * 200, "\u00e4" * 200])
def test_an_id_cannot_leave_the_folder(identifier: str, tmp_path: Path) -> None:
    state = FolderState(tmp_path / "state", 1, training=True)
    client_state.save(state, identifier, number(1))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert client_state.load(state, identifier) == number(1)


# ---- one file per round ----


def remembered(folder: Path, server_round: int, *, training: bool) -> int | None:
    records = client_state.load(FolderState(folder, server_round, training=training), "7")
    return records["n"]["x"] if records else None


def train(folder: Path, server_round: int, value: int, since: int = 0) -> None:
    client_state.save(FolderState(folder, server_round, training=True, needed_since=since), "7", number(value))


def test_a_round_that_is_done_again_starts_from_what_the_client_knew_before_it(tmp_path: Path) -> None:
    for server_round in (2, 5, 6):
        train(tmp_path, server_round, server_round)
    assert [remembered(tmp_path, r, training=True) for r in (2, 3, 5, 6, 7)] == [None, 2, 2, 5, 6]
    assert [remembered(tmp_path, r, training=False) for r in (1, 2, 4, 5, 9)] == [None, 2, 2, 5, 6]
    train(tmp_path, 5, 50)
    assert remembered(tmp_path, 6, training=True) == 50


def test_what_a_message_saved_it_sees_itself(tmp_path: Path) -> None:
    train(tmp_path, 1, 1)
    state = FolderState(tmp_path, 2, training=True)
    client_state.save(state, "7", number(2))
    assert client_state.load(state, "7") == number(2)


def test_memory_that_no_resumption_can_need_is_removed(tmp_path: Path) -> None:
    for server_round in (1, 3, 5, 8):
        train(tmp_path, server_round, server_round, since=4)
    (folder,) = tmp_path.iterdir()
    # Whoever resumes after round 4 needs what the client knew then: that of round 3.
    assert sorted(path.name for path in folder.iterdir()) == [f"{r:06d}.safetensors" for r in (3, 5, 8)]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    train(tmp_path, 1, 1)
    (file,) = tmp_path.glob("*/*")
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"000001\.safetensors, a client's memory, is damaged"):
        remembered(tmp_path, 2, training=True)


def test_the_memory_is_the_users_alone(tmp_path: Path) -> None:
    train(tmp_path / "memory", 1, 1)
    (file,) = (tmp_path / "memory").glob("*/*")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]


# ---- where it lies ----


def place(node: dict[str, str | int], config: dict[str, str | int]) -> Path | None:
    context = Context(1, 1, node, RecordDict(), {})
    state = client_state.of_message(context, "train", {"server-round": 3, **config})
    assert isinstance(state, FolderState) or state is context.state
    return state.folder if isinstance(state, FolderState) else None


SIMULATED: dict[str, str | int] = {"partition-id": 0, "num-partitions": 2}
DEPLOYED: dict[str, str | int] = {"client-id": "site-a", "partition-id": 0}


def test_simulated_clients_use_the_folder_of_the_run_or_of_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STATE_DIR_VARIABLE, raising=False)
    assert place(SIMULATED, {}) is None
    assert place(SIMULATED, {"client-state": str(tmp_path)}) == tmp_path
    assert place(SIMULATED, {"client-state": "/on/another/machine"}) is None
    monkeypatch.setenv(STATE_DIR_VARIABLE, "/shared")
    assert place(SIMULATED, {}) == Path("/shared")
    assert place(SIMULATED, {"client-state": str(tmp_path)}) == tmp_path


def test_a_deployed_client_never_writes_where_the_server_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_DIR_VARIABLE, "/shared")
    told: dict[str, str | int] = {"client-state": str(tmp_path), "experiment": "../../etc"}
    assert place(DEPLOYED, told) is None
    own = place({**DEPLOYED, "state-dir": str(tmp_path / "own")}, told)
    assert own is not None
    assert own.parent == tmp_path / "own"
    assert ".." not in own.parts


def test_runs_do_not_share_a_deployed_clients_memory(tmp_path: Path) -> None:
    node: dict[str, str | int] = {**DEPLOYED, "state-dir": str(tmp_path)}
    assert place(node, {"experiment": "a"}) != place(node, {"experiment": "b"})
    assert place(node, {}) is None


def test_a_relative_state_dir_is_refused() -> None:
    with pytest.raises(ConfigError, match="state-dir='memory' in the node config is relative"):
        place({**DEPLOYED, "state-dir": "memory"}, {"experiment": "a"})


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


def test_what_was_noted_in_rounds_that_a_resumed_run_did_anew_is_forgotten(tmp_path: Path) -> None:
    def at(server_round: int, *resumed_after: int) -> FolderState:
        return FolderState(tmp_path, server_round, training=True, resumed_after=resumed_after)

    client_state.save(at(1), "c", number(1))
    client_state.save(at(3), "c", number(3))
    # The run died in round 4 and was resumed after round 2; this client is in no cohort before round 5.
    assert client_state.load(at(5), "c") == number(3)
    assert client_state.load(at(5, 2), "c") == number(1)
    client_state.save(at(5, 2), "c", number(5))
    assert [file.stem for file in sorted((tmp_path / "c-c").iterdir())] == ["000001", "000005"]
    # Resumed again, after a round that came later than what the client noted: that stays.
    assert client_state.load(at(7, 2, 6), "c") == number(5)
    assert client_state.load(at(6, 2, 4), "c") == number(1)


def test_the_rounds_of_resumptions_come_with_the_message(tmp_path: Path) -> None:
    context = Context(1, 1, {"client-id": "c", "state-dir": str(tmp_path)}, RecordDict(), {})
    config = {"server-round": 4, "experiment": "e", "resumed-after": [2, 3]}
    found = client_state.of_message(context, "train", config)
    assert isinstance(found, FolderState)
    assert found.resumed_after == (2, 3)


def test_a_note_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, sync, rename = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (steps.append("fsync"), sync(handle))[1])
    monkeypatch.setattr(Path, "replace", lambda path, target: (steps.append("rename"), rename(path, target))[1])
    client_state.save(FolderState(tmp_path, 1, training=True), "c", number(1))
    assert steps == ["fsync", "rename"]
