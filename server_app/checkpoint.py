"""Checkpoints of a run: model, the strategy's memory and how far the results were, written at once or not at all.

A checkpoint is a manifest, ``round-000012.json``, and the arrays that it names. Arrays that the memory has kept since
an earlier checkpoint, such as the updates in FedPCD's history, are not written again: the manifest names the file in
which they lie. The manifest comes last, by rename, so a checkpoint exists completely or not at all; it holds the
checksums of all files, of the results so far and of itself, so that whatever was cut off or edited is found.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from server_app.tensor_files import TensorFileError, map_tensors, write_tensors
from strategies.engine import Memory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["FORMAT_VERSION", "Checkpoint", "CheckpointError", "CheckpointStore", "settings_hash"]

FORMAT_VERSION: Final = 1
"""Version of the format; a change that an older version would misread raises it."""

_MANIFEST: Final = re.compile(r"round-(\d{6,})\.json")
_SHARED_FROM: Final = 4096
"""Bytes from which an array is worth a reference to an earlier file."""

_CHUNK: Final = 1 << 24

Tensors = dict[str, NDArray[Any]]
_Known = tuple[NDArray[Any], str, str]
"""An array on disk: the array, its file and its name there. Holding the array keeps its id from being used again."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the text says which file and why."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """All that a run needs to go on after a round as if it had never stopped.

    The cohorts need no state: they follow from the seed and the number of the round (``strategies/cohort.py``).

    Parameters
    ----------
    round : int
        The last round that is complete.
    settings : str
        `settings_hash` of the run.
    model : dict of str to ndarray
        The model that training continues from, in the order of its state dict.
    memory : Memory
        What the strategy knows.
    results : dict of str to int
        Size in bytes of each results file at the end of the round.
    seconds : float
        Wall-clock seconds that the strategy had run.
    """

    round: int
    settings: str
    model: Tensors
    memory: Memory
    results: dict[str, int]
    seconds: float

    @property
    def arrays(self) -> ArrayRecord:
        """The model as Flower carries it."""
        return ArrayRecord({name: Array(array) for name, array in self.model.items()})


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Return the sha256 of settings, whatever their order."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()


@dataclass
class CheckpointStore:
    """The checkpoints of one strategy's run.

    Parameters
    ----------
    folder : Path
        Made, for the user alone, when the first one is written: checkpoints hold single clients' updates.
    results : Path
        Folder of the results files.
    keep : int
        The newest so many are kept, >= 1.
    """

    folder: Path
    results: Path
    keep: int = 2
    _known: dict[int, _Known] = field(default_factory=dict)
    _files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def rounds(self) -> list[int]:
        """Rounds with a checkpoint, usable or not, in increasing order."""
        found = (_MANIFEST.fullmatch(path.name) for path in self.folder.glob("round-*.json"))
        return sorted(int(match[1]) for match in found if match)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.folder.glob("round-*"))

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove those that are too many.

        When this returns, the checkpoint is on the disk.

        Parameters
        ----------
        checkpoint : Checkpoint
            Of a round later than all others.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        memory, places = checkpoint.memory, _Places(f"{_stem(checkpoint.round)}.safetensors", self._known)
        manifest: dict[str, Any] = {
            "format-version": FORMAT_VERSION,
            "round": checkpoint.round,
            "settings-hash": checkpoint.settings,
            "seconds": checkpoint.seconds,
            "model": [[name, places.new(array)] for name, array in checkpoint.model.items()],
            "state": {key: places.described(value) for key, value in memory.state.items()},
            "output": None if memory.output is None else [[n, places.new(a)] for n, a in memory.output.items()],
            "flags": {"individual": memory.individual, "delivered": memory.delivered, "searched": memory.searched},
            "lengths": list(memory.lengths),
            "results": {name: self._result(name, size) for name, size in checkpoint.results.items()},
        }
        written = _entry(*write_tensors(self.folder / places.file, places.tensors))
        manifest["files"] = {name: self._files.get(name, written) for name in sorted(places.files)}
        self._commit(checkpoint.round, manifest)
        self._known, self._files = places.shared, manifest["files"]
        self._prune()

    def load(self, settings: str) -> tuple[Checkpoint | None, list[str]]:
        """Load the newest checkpoint that is whole.

        Parameters
        ----------
        settings : str
            `settings_hash` of the run that wants to go on.

        Returns
        -------
        checkpoint : Checkpoint or None
            None if there is none. Its arrays are mapped from the files, not read.
        problems : list of str
            Newer checkpoints that could not be used, with the reason.
        """
        problems: list[str] = []
        for server_round in reversed(self.rounds):
            try:
                return self._load(server_round, settings), problems
            except CheckpointError as error:
                problems.append(str(error))
        return None, problems

    def drop_after(self, server_round: int) -> None:
        """Remove the checkpoints of later rounds: the run goes on before them, and will write them anew."""
        for later in self.rounds:
            if later > server_round:
                self._manifest(later).unlink()
        self._remove_unused()

    def clear(self) -> None:
        """Remove all checkpoints."""
        for path in self.folder.glob("*"):
            _remove(path)
        with suppress(OSError):
            self.folder.rmdir()

    def _load(self, server_round: int, settings: str) -> Checkpoint:
        path = self._manifest(server_round)
        manifest = _read_manifest(path)
        if manifest["settings-hash"] != settings:
            raise CheckpointError(f"{path} belongs to a run with other settings than config.json beside it says")
        for name, expected in manifest["files"].items():
            _check(self.folder / name, expected, whole=True)
        for name, expected in manifest["results"].items():
            _check(self.results / name, expected, whole=False)
        try:
            mapped = {name: map_tensors(self.folder / name) for name in manifest["files"]}
        except TensorFileError as error:
            raise CheckpointError(str(error)) from error

        def find(place: list[str]) -> NDArray[Any]:
            return mapped[place[0]][place[1]]

        def restored(entry: dict[str, Any]) -> Any:
            return find(entry["array"]) if "array" in entry else entry["value"]

        output = manifest["output"]
        state = {key: restored(entry) for key, entry in manifest["state"].items()}
        self._files = manifest["files"]
        self._known = {
            id(state[key]): (state[key], *entry["array"])
            for key, entry in manifest["state"].items()
            if "array" in entry and state[key].nbytes >= _SHARED_FROM
        }
        return Checkpoint(
            round=manifest["round"],
            settings=settings,
            model={name: find(place) for name, place in manifest["model"]},
            memory=Memory(
                state=state,
                output=None if output is None else {name: find(place) for name, place in output},
                lengths=tuple(manifest["lengths"]),
                **manifest["flags"],
            ),
            results={name: entry["bytes"] for name, entry in manifest["results"].items()},
            seconds=manifest["seconds"],
        )

    def _commit(self, server_round: int, manifest: dict[str, Any]) -> None:
        manifest["checksum"] = hashlib.sha256(_encode(manifest)).hexdigest()
        temporary = self.folder / f".{_stem(server_round)}.json"
        with temporary.open("wb") as file:
            file.write(_encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._manifest(server_round))
        _sync_folder(self.folder)

    def _prune(self) -> None:
        for server_round in self.rounds[: -self.keep]:
            self._manifest(server_round).unlink()
        self._remove_unused()

    def _remove_unused(self) -> None:
        """Remove what no manifest names, half-written files included."""
        used: set[str] = set()
        for server_round in self.rounds:
            path = self._manifest(server_round)
            used.add(path.name)
            try:
                used |= _read_manifest(path)["files"].keys()
            except CheckpointError:  # damaged: it names nothing that can be relied on
                continue
        for path in self.folder.iterdir():
            if path.name not in used:
                _remove(path)

    def _manifest(self, server_round: int) -> Path:
        return self.folder / f"{_stem(server_round)}.json"

    def _result(self, name: str, size: int) -> dict[str, Any]:
        path = self.results / name
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return _entry(size, _digest(path, size))


@dataclass
class _Places:
    """Where the arrays of one checkpoint lie: in its own file, or still in one of an earlier checkpoint."""

    file: str
    earlier: Mapping[int, _Known]
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    shared: dict[int, _Known] = field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        return {self.file, *(file for _, file, _ in self.shared.values())}

    def new(self, array: NDArray[Any]) -> list[str]:
        name = str(len(self.tensors))
        self.tensors[name] = array
        return [self.file, name]

    def described(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, np.ndarray):
            return {"value": value}
        # Rules never change an array of their state, so the same object is the same content (a test sees to it).
        known = self.earlier.get(id(value))
        place = self.new(value) if known is None else [known[1], known[2]]
        if value.nbytes >= _SHARED_FROM:
            self.shared[id(value)] = (value, place[0], place[1])
        return {"array": place}


def _stem(server_round: int) -> str:
    return f"round-{server_round:06d}"


def _entry(size: int, digest: str) -> dict[str, Any]:
    return {"bytes": size, "sha256": digest}


def _encode(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()


def _digest(path: Path, size: int) -> str:
    """The sha256 of a file's first bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (chunk := file.read(min(size, _CHUNK))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()


def _check(path: Path, expected: Mapping[str, Any], *, whole: bool) -> None:
    """Raise unless a file is there with the expected content, or, unless `whole`, begins with it."""
    size = path.stat().st_size if path.is_file() else -1
    if size < expected["bytes"] or (whole and size > expected["bytes"]):
        found = "is missing" if size < 0 else f"has {size} bytes instead of {expected['bytes']}"
        raise CheckpointError(f"{path} {found}")
    if _digest(path, expected["bytes"]) != expected["sha256"]:
        raise CheckpointError(f"{path} was changed after the checkpoint was written (another sha256)")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        checksum, version = manifest.pop("checksum"), manifest["format-version"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {version!r}; this version reads {FORMAT_VERSION}")
    if hashlib.sha256(_encode(manifest)).hexdigest() != checksum:
        raise CheckpointError(f"{path} was changed after the checkpoint was written (another checksum)")
    return manifest


def _remove(path: Path) -> None:
    """Remove a file if that is possible: NFS keeps one that is mapped, under another name, until it no longer is."""
    with suppress(OSError):
        path.unlink()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
