"""Checkpoints on disk: complete or absent, incremental, mapped, and damage is found."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from server_app.checkpoint import Checkpoint, CheckpointStore, settings_hash
from server_app.tensor_files import TensorFileError, map_tensors, write_tensors
from strategies.engine import Memory
from tests.support import assert_same_bits

SETTINGS = settings_hash({"tau": 0.1})
ROW = 4096
"""Numbers in a row: 32 KiB, which is worth sharing."""


def row(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(ROW)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "rounds.jsonl").write_bytes(b'{"round": 0}\n{"round": 1}\n')
    return CheckpointStore(tmp_path / "checkpoints", tmp_path)


def checkpoint(server_round: int, state: dict[str, Any], model: Any = None, size: int = 13) -> Checkpoint:
    arrays = {"w": np.full(3, server_round, dtype=np.float32)} if model is None else model
    return Checkpoint(server_round, SETTINGS, arrays, Memory(state), {"rounds.jsonl": size}, 1.5)


def reopened(store: CheckpointStore) -> CheckpointStore:
    return CheckpointStore(store.folder, store.results, store.keep)


def loaded(store: CheckpointStore) -> Checkpoint:
    found, problems = reopened(store).load(SETTINGS)
    assert problems == []
    assert found is not None
    return found


def test_everything_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    model = {
        "b": np.asarray(1.5, dtype=np.float32),
        "a": np.arange(6, dtype=np.float16).reshape(2, 3).T,
        "none": np.zeros((0, 4), dtype=np.float64),
        "count": np.asarray(7, dtype=np.int64),
        "mask": np.array([True, False]),
    }
    state = {
        "row": row(1),
        "small": np.array([np.nan, -0.0, np.inf, 5e-324]),
        "float": 0.1 + 0.2,
        "huge": 1e308,
        "not a number": float("nan"),
        "clients": ["1", "ä", 'quote"'],
        "flag": True,
        "nothing": None,
    }
    memory = Memory(state, {"b": row(2), "a": row(3)}, individual=True, searched=True, lengths=(0.1, 2.5))
    store.save(Checkpoint(12, SETTINGS, model, memory, {"rounds.jsonl": 26}, 1.5))
    found = loaded(store)
    assert (found.round, found.results, found.seconds) == (12, {"rounds.jsonl": 26}, 1.5)
    assert_same_bits(found.model, model)
    assert found.memory.output is not None
    assert_same_bits(found.memory.output, memory.output or {})
    assert (found.memory.individual, found.memory.delivered, found.memory.searched) == (True, False, True)
    assert found.memory.lengths == (0.1, 2.5)
    assert list(found.memory.state) == list(state)
    arrays = {key: value for key, value in state.items() if isinstance(value, np.ndarray)}
    assert_same_bits({key: found.memory.state[key] for key in arrays}, arrays)
    rest = {key: value for key, value in found.memory.state.items() if key not in arrays}
    assert repr(rest) == repr({key: value for key, value in state.items() if key not in arrays})


def test_large_arrays_are_mapped_and_not_read(store: CheckpointStore) -> None:
    store.save(checkpoint(1, {"row": row(1)}))
    array = loaded(store).memory.state["row"]
    base = array
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not array.flags.writeable


def test_arrays_that_stay_are_written_once(store: CheckpointStore) -> None:
    rows = {f"row{i}": row(i) for i in range(10)}
    store.save(checkpoint(1, rows))
    first = store.size
    store.save(checkpoint(2, {**rows, "row10": row(10)}))
    assert store.size - first < 2 * row(0).nbytes
    assert_same_bits(loaded(store).memory.state, {**rows, "row10": row(10)})


def test_a_resumed_run_does_not_write_them_again_either(store: CheckpointStore) -> None:
    store.save(checkpoint(1, {f"row{i}": row(i) for i in range(10)}))
    again = reopened(store)
    found, _ = again.load(SETTINGS)
    assert found is not None
    before = again.size
    again.save(checkpoint(2, {**found.memory.state, "row10": row(10)}))
    assert again.size - before < 2 * row(0).nbytes
    assert len(loaded(again).memory.state) == 11


def test_an_array_that_took_a_freed_ones_place_in_memory_is_not_mistaken_for_it(store: CheckpointStore) -> None:
    for server_round in range(1, 30):  # CPython gives a new array the id of one that has just been freed
        store.save(checkpoint(server_round, {"row": row(server_round)}))
        assert np.array_equal(loaded(store).memory.state["row"], row(server_round))


def test_files_that_no_checkpoint_needs_are_removed(store: CheckpointStore) -> None:
    kept = row(0)
    for server_round in range(1, 8):
        store.save(checkpoint(server_round, {"kept": kept, "new": row(server_round)}))
    assert store.rounds == [6, 7]
    names = sorted(path.name for path in store.folder.iterdir())
    assert names == [
        "round-000001.safetensors",  # holds what was kept
        "round-000006.json",
        "round-000006.safetensors",
        "round-000007.json",
        "round-000007.safetensors",
    ]


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_are_kept_as_wanted(store: CheckpointStore, keep: int) -> None:
    store.keep = keep
    for server_round in range(2, 11, 2):
        store.save(checkpoint(server_round, {}))
    assert store.rounds == [2, 4, 6, 8, 10][-keep:]


def test_leftovers_of_a_killed_process_are_no_checkpoint_and_vanish(store: CheckpointStore) -> None:
    store.save(checkpoint(1, {"row": row(1)}))
    (store.folder / "round-000002.safetensors").write_bytes(b"half a file")
    (store.folder / ".round-000002.json").write_bytes(b'{"round": 2')
    assert loaded(store).round == 1
    again = reopened(store)
    again.load(SETTINGS)
    again.save(checkpoint(2, {"row": row(2)}))
    assert {path.name for path in store.folder.iterdir()} == {
        f"round-00000{r}.{kind}" for r in (1, 2) for kind in ("json", "safetensors")
    }


def test_checkpoints_are_the_users_alone(store: CheckpointStore) -> None:
    store.save(checkpoint(1, {}))
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_later_checkpoints_can_be_dropped(store: CheckpointStore) -> None:
    store.keep = 5
    for server_round in (1, 2, 3):
        store.save(checkpoint(server_round, {"row": row(server_round)}))
    store.drop_after(1)
    assert store.rounds == [1]
    assert len(list(store.folder.iterdir())) == 2


def test_every_single_changed_byte_is_found(store: CheckpointStore) -> None:
    store.save(checkpoint(1, {"a": np.arange(3.0)}))
    store.save(checkpoint(2, {"a": np.arange(4.0)}))
    found = 0
    for name in ("round-000002.json", "round-000002.safetensors"):
        path = store.folder / name
        content = path.read_bytes()
        for position in range(len(content)):
            path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
            newest, problems = reopened(store).load(SETTINGS)
            assert newest is not None
            assert newest.round == 1, (name, position)
            assert str(path) in problems[0]
            found += 1
        path.write_bytes(content)
    assert found > 1000
    assert loaded(store).round == 2


def test_every_truncation_is_found(store: CheckpointStore) -> None:
    store.save(checkpoint(1, {"a": np.arange(3.0)}))
    store.save(checkpoint(2, {"a": np.arange(4.0)}))
    for name in ("round-000002.json", "round-000002.safetensors"):
        path = store.folder / name
        content = path.read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            newest, _ = reopened(store).load(SETTINGS)
            assert newest is not None
            assert newest.round == 1, (name, length)
        path.write_bytes(content)


def test_results_may_go_on_but_not_change(store: CheckpointStore) -> None:
    store.save(checkpoint(1, {}))
    results = store.results / "rounds.jsonl"
    results.write_bytes(results.read_bytes() + b'{"round": 2}\n')
    assert loaded(store).round == 1
    results.write_bytes(b'{"round": 9}\n')
    assert reopened(store).load(SETTINGS)[0] is None
    results.write_bytes(b'{"round"')
    newest, problems = reopened(store).load(SETTINGS)
    assert newest is None
    assert "has 8 bytes instead of 13" in problems[0]


def test_a_checkpoint_of_other_settings_is_not_loaded(store: CheckpointStore) -> None:
    store.save(checkpoint(1, {}))
    newest, problems = store.load(settings_hash({"tau": 0.2}))
    assert newest is None
    assert "other settings" in problems[0]


def test_the_order_of_settings_does_not_matter() -> None:
    assert settings_hash({"a": 1, "b": 2.5}) == settings_hash({"b": 2.5, "a": 1}) != settings_hash({"a": 1, "b": 2.0})


# ---- the files ----

ARRAYS = hnp.arrays(
    dtype=st.sampled_from([np.bool_, np.uint8, np.int16, np.float16, np.float32, np.int64, np.float64]),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)


@settings(deadline=None)
@given(tensors=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=10), ARRAYS, max_size=6))
def test_any_arrays_are_read_by_us_and_by_the_library(tmp_path_factory: Any, tensors: dict[str, np.ndarray]) -> None:
    tensors = {name: array for name, array in tensors.items() if name != "__metadata__"}
    path = tmp_path_factory.mktemp("tensors") / "file.safetensors"
    size, _ = write_tensors(path, tensors)
    assert size == path.stat().st_size
    ours, theirs = map_tensors(path), load_file(path)
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, array in tensors.items():
        assert ours[name].tobytes() == theirs[name].tobytes() == array.tobytes()
        assert ours[name].shape == theirs[name].shape == array.shape
        assert ours[name].dtype == array.dtype
        assert ours[name].flags.aligned


def test_arrays_that_are_not_contiguous_are_written_as_they_look(tmp_path: Path) -> None:
    array = np.arange(24.0).reshape(4, 6)[::2, ::-1].T
    write_tensors(tmp_path / "f", {"a": array})
    assert np.array_equal(map_tensors(tmp_path / "f")["a"], array)


def test_a_dtype_that_cannot_be_held_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'w' has dtype complex128"):
        write_tensors(tmp_path / "f", {"w": np.zeros(2, dtype=complex)})


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x05" + b"\0" * 7 + b"[1,2]", os.urandom(200)])
def test_what_is_no_tensor_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(TensorFileError, match=str(tmp_path / "f")):
        map_tensors(tmp_path / "f")


def test_a_file_that_cannot_be_removed_does_not_end_the_run(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # NFS keeps a mapped file that was removed, as .nfs..., and refuses to remove that.
    store.save(checkpoint(1, {}))
    (store.folder / ".nfs0001").touch()
    remove = Path.unlink

    def busy(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith(".nfs"):
            raise OSError(16, "Device or resource busy")
        remove(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", busy)
    store.save(checkpoint(2, {}))
    assert store.rounds == [1, 2]
    store.clear()
    assert [path.name for path in store.folder.iterdir()] == [".nfs0001"]
