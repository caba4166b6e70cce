"""The files of a results folder: their names and version, and how they are written."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from safetensors.numpy import save as save_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from flwr.app import ArrayRecord

__all__ = [
    "CLIENTS",
    "CONFIG",
    "MODEL",
    "REJECTIONS",
    "ROUNDS",
    "SCHEMA_VERSION",
    "SUMMARY",
    "csv_line",
    "json_line",
    "write_json",
    "write_model",
]

SCHEMA_VERSION: Final = 1
"""Version of the format; a change that breaks a reader raises it."""

CONFIG: Final = "config.json"
ROUNDS: Final = "rounds.jsonl"
CLIENTS: Final = "clients.csv"
REJECTIONS: Final = "rejections.jsonl"
MODEL: Final = "model.safetensors"
SUMMARY: Final = "summary.json"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file at once: a reader sees the old file or the whole new one.

    Parameters
    ----------
    path : Path
        The file.
    content : mapping
        JSON-able; numbers that JSON cannot hold (NaN, infinities) become null.
    """
    text = json.dumps(_jsonable(content), indent=2, ensure_ascii=False, allow_nan=False)
    _write_atomically(path, text.encode() + b"\n")


def write_model(path: Path, arrays: ArrayRecord) -> None:
    """Write a model as safetensors; names, shapes (0-dimensional ones too) and dtypes stay as they are.

    Parameters
    ----------
    path : Path
        The file.
    arrays : ArrayRecord
        The model. safetensors keeps no order, so the order of the names goes into the metadata, ``order``.
    """
    tensors = {name: np.asarray(array.numpy(), order="C") for name, array in arrays.items()}
    metadata = {"order": json.dumps(list(tensors))}
    _write_atomically(path, save_safetensors(tensors, metadata=metadata))


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def json_line(content: Mapping[str, Any]) -> bytes:
    """One line of a ``.jsonl`` file; numbers that JSON cannot hold become null."""
    # Clients' words may hold what UTF-8 cannot; it becomes JSON's own escape.
    return json.dumps(_jsonable(content), ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n"


def _jsonable(value: Any) -> Any:
    """Copy with JSON's types only; NaN and infinities become null. Other types fail in `json.dumps`."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


def csv_line(values: Iterable[object]) -> bytes:
    """One line of a CSV file."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(values)
    return buffer.getvalue().encode()
