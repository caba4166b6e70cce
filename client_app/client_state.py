"""What a client keeps between rounds, by client id.

A simulated node serves several clients, so every record's name carries the client's id. Where the records live:

- in a folder, one file per client and round, if there is one: in the results of a simulation that can be resumed (the
  server names it), in the ``state-dir`` of a deployed node, or where the workers of a Ray simulation share them (two of
  them may work on messages to one node at the same time, each on its own copy of ``context.state``, and the copy that
  came back last would erase what the other noted);
- else in Flower's ``context.state``, which lasts as long as the run.

A file per round lets a resumed run continue from what a client knew in *that* round, whatever it did until it died.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MessageType, MetricRecord, RecordDict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from client_app import STATE_DIR_VARIABLE
from client_app.config import ConfigError
from client_app.hosting import CLIENT_ID
from strategies import protocol

Record = ArrayRecord | ConfigRecord | MetricRecord

PARTICIPATIONS: Final = "participations"
"""Metric key (int): rounds in which the client has trained, this one included."""
STATE_DIR: Final = "state-dir"
"""Node-config key (str): folder, absolute or starting with ``~``, in which a deployed client keeps its memory."""

_TRAINING: Final = "training"
_RESUMPTIONS: Final = "resumptions"
_LONGEST_NAME: Final = 150
_KINDS: Final[dict[str, type[Record]]] = {"a": ArrayRecord, "c": ConfigRecord, "m": MetricRecord}


class FolderState(RecordDict):
    """Stands for ``context.state`` where the records live in a folder, one file per client and round.

    Parameters
    ----------
    folder : Path
        The folder; made when something is saved, for the user alone.
    server_round : int
        The round of the message that is worked on.
    training : bool
        A client that trains continues from earlier rounds, one that evaluates knows this round's training too.
    needed_since : int
        Oldest round at which the server may still resume: what is only of use before it is removed.
    resumed_after : sequence of int
        Rounds after which the run was resumed so far; what was noted after them until then is removed.
    """

    def __init__(
        self,
        folder: Path,
        server_round: int,
        *,
        training: bool,
        needed_since: int = 0,
        resumed_after: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.folder = folder
        self.server_round = server_round
        self.newest = server_round - 1 if training else server_round
        self.needed_since = needed_since
        self.resumed_after = tuple(resumed_after)

    def read(self, client_id: str) -> dict[str, Record]:
        """Return a client's records as of this message."""
        for number in reversed(self._rounds(client_id)):
            if number <= self.newest and self._counts(client_id, number):
                return _read_file(self._file(client_id, number))
        return {}

    def write(self, client_id: str, records: Mapping[str, Record]) -> None:
        """Note a client's records as those of this round, which this message sees from now on."""
        target = self._file(client_id, self.server_round)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_file(target, records, len(self.resumed_after))
        self.newest = self.server_round
        rounds = self._rounds(client_id)
        abandoned = [number for number in rounds if not self._counts(client_id, number)]
        before = [number for number in rounds if number <= self.needed_since and number not in abandoned]
        for number in (*abandoned, *before[:-1]):
            self._file(client_id, number).unlink(missing_ok=True)

    def _counts(self, client_id: str, number: int) -> bool:
        """Whether a note of that round is part of the run: it was not resumed from before that round since then."""
        if not self.resumed_after:
            return True
        later = self.resumed_after[_resumptions(self._file(client_id, number)) :]
        return all(number <= resumed for resumed in later)

    def _rounds(self, client_id: str) -> list[int]:
        folder = self._file(client_id, 0).parent
        return sorted(int(file.stem) for file in folder.glob("*.safetensors") if file.stem.isdecimal())

    def _file(self, client_id: str, server_round: int) -> Path:
        return self.folder / _file_name(client_id) / f"{server_round:06d}.safetensors"


def of_message(context: Context, message_type: str, config: Mapping[str, Any] | ConfigRecord) -> RecordDict:
    """Return what stands for ``context.state`` while a message is worked on.

    Parameters
    ----------
    context : Context
        The node's context.
    message_type : str
        Flower's type of the message.
    config : Mapping
        The message's config.

    Returns
    -------
    RecordDict
        ``context.state`` itself where there is no folder.

    Raises
    ------
    ConfigError
        If the node's ``state-dir`` is relative.
    """
    server_round, since = config.get(protocol.SERVER_ROUND), config.get(protocol.RESUMABLE_SINCE)
    resumed = config.get(protocol.RESUMED_AFTER)
    folder = _folder(context, config)
    if folder is None or not isinstance(server_round, int):
        return context.state
    return FolderState(
        folder,
        server_round,
        training=message_type.partition(".")[0] == MessageType.TRAIN,
        needed_since=since if isinstance(since, int) else 0,
        resumed_after=[number for number in resumed if isinstance(number, int)] if isinstance(resumed, list) else (),
    )


def _folder(context: Context, config: Mapping[str, Any]) -> Path | None:
    if CLIENT_ID not in context.node_config:
        # Only a simulated node follows the server to a folder, and only where that is on the same machine.
        shared = config.get(protocol.CLIENT_STATE)
        if isinstance(shared, str) and Path(shared).parent.is_dir():
            return Path(shared)
        simulation = os.environ.get(STATE_DIR_VARIABLE)
        return Path(simulation) if simulation else None
    own, experiment = context.node_config.get(STATE_DIR), config.get(protocol.EXPERIMENT)
    if own is None or not isinstance(experiment, str):
        return None
    place = Path(str(own)).expanduser()
    if not place.is_absolute():
        raise ConfigError(f"{STATE_DIR}={own!r} in the node config is relative: use an absolute path or one with ~/")
    return place / _file_name(experiment)


def load(state: RecordDict, client_id: str) -> dict[str, Record]:
    """Return a client's records.

    Parameters
    ----------
    state : RecordDict
        What `of_message` returned.
    client_id : str
        The client.

    Returns
    -------
    dict
        Record name -> record; empty for a client that has saved nothing.
    """
    if isinstance(state, FolderState):
        return state.read(client_id)
    prefix = _prefix(client_id)
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


def save(state: RecordDict, client_id: str, records: Mapping[str, Record]) -> None:
    """Replace a client's records; other clients' records stay.

    Parameters
    ----------
    state : RecordDict
        What `of_message` returned.
    client_id : str
        The client.
    records : Mapping
        Record name -> record.
    """
    if isinstance(state, FolderState):
        state.write(client_id, records)
        return
    prefix = _prefix(client_id)
    for name in [name for name in state if name.startswith(prefix)]:
        del state[name]
    for name, record in records.items():
        state[prefix + name] = record


def count_participation(state: RecordDict, client_id: str) -> int:
    """Note that a client trains in this round, and return how often it has trained, this round included."""
    records = load(state, client_id)
    training = records.get(_TRAINING)
    before = training[PARTICIPATIONS] if isinstance(training, MetricRecord) else 0
    if not isinstance(before, int):
        raise TypeError(f"the state of client {client_id!r} is damaged: {PARTICIPATIONS}={before!r}")
    save(state, client_id, {**records, _TRAINING: MetricRecord({PARTICIPATIONS: before + 1})})
    return before + 1


def _prefix(client_id: str) -> str:
    return f"client/{quote(client_id, safe='')}/"


def _file_name(identifier: str) -> str:
    """A name of its own for every identifier, which cannot lead out of the folder."""
    name = quote(identifier, safe="")
    return f"c-{name}" if len(name) <= _LONGEST_NAME else f"h-{hashlib.sha256(identifier.encode()).hexdigest()}"


def _write_file(path: Path, records: Mapping[str, Record], resumptions: int) -> None:
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    entries: list[tuple[str, str, Any]] = []
    for name, record in records.items():
        kind = next(kind for kind, record_type in _KINDS.items() if isinstance(record, record_type))
        content: Any = dict(record)
        if isinstance(record, ArrayRecord):
            content = {key: f"{len(entries)}/{number}" for number, key in enumerate(record)}
            tensors |= {content[key]: np.asarray(array.numpy(), order="C") for key, array in record.items()}
        entries.append((name, kind, content))
    encoded = to_safetensors(tensors, metadata={"records": json.dumps(entries), _RESUMPTIONS: str(resumptions)})
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def _resumptions(path: Path) -> int:
    """How often the run had been resumed when a file was written."""
    try:
        with safe_open(path, framework="numpy") as file:
            return int(file.metadata().get(_RESUMPTIONS, 0))
    except (SafetensorError, AttributeError, ValueError):
        return 0  # damaged, which shows when it is read


def _read_file(path: Path) -> dict[str, Record]:
    try:
        with safe_open(path, framework="numpy") as file:
            entries = json.loads(file.metadata()["records"])
            return {name: _record(kind, content, file) for name, kind, content in entries}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}, a client's memory, is damaged ({error}): remove it") from error


def _record(kind: str, content: dict[str, Any], file: Any) -> Record:
    if kind == "a":
        return ArrayRecord({key: Array(np.asarray(file.get_tensor(name))) for key, name in content.items()})
    return _KINDS[kind](content)
