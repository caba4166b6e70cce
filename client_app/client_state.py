"""What a client keeps between rounds, by client id.

A simulated node serves several clients, so every record's name carries the client's id. The records live in Flower's
``context.state``, except under Ray: there messages to one node may be worked on at the same time, each on its own copy
of the node's state, and the copy that comes back last would erase what the others noted. The workers of a simulation
therefore keep one file per client in a folder of that simulation (see ``client_app/__init__.py``).
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from client_app import STATE_DIR_VARIABLE

Record = ArrayRecord | ConfigRecord | MetricRecord

PARTICIPATIONS: Final = "participations"
"""Metric key (int): rounds in which the client has trained, this one included."""

_TRAINING: Final = "training"


def load(state: RecordDict, client_id: str) -> dict[str, Record]:
    """Return a client's records.

    Parameters
    ----------
    state : RecordDict
        The node's ``context.state``.
    client_id : str
        The client.

    Returns
    -------
    dict
        Record name -> record; empty for a client that has saved nothing.
    """
    folder = os.environ.get(STATE_DIR_VARIABLE)
    if folder is not None:
        return _load_file(_file(folder, client_id))
    prefix = _prefix(client_id)
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


def save(state: RecordDict, client_id: str, records: Mapping[str, Record]) -> None:
    """Replace a client's records; other clients' records stay.

    Parameters
    ----------
    state : RecordDict
        The node's ``context.state``.
    client_id : str
        The client.
    records : Mapping
        Record name -> record.
    """
    folder = os.environ.get(STATE_DIR_VARIABLE)
    if folder is not None:
        _save_file(_file(folder, client_id), dict(records))
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


def _file(folder: str, client_id: str) -> Path:
    return Path(folder) / f"client-{quote(client_id, safe='')}.pickle"


def _load_file(path: Path) -> dict[str, Record]:
    """Read what `_save_file` wrote; the folder is private to the user, so unpickling it is as safe as Ray itself."""
    if not path.exists():
        return {}
    records: dict[str, Record] = pickle.loads(path.read_bytes())
    return records


def _save_file(path: Path, records: dict[str, Record]) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(pickle.dumps(records))
    Path(file.name).replace(path)
