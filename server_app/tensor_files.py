"""safetensors files that are written as a stream and mapped into memory, for arrays that may be many gigabytes.

The safetensors library copies all arrays to write them, and again to read them with numpy; the format itself needs
neither (https://github.com/huggingface/safetensors, section Format). Any safetensors reader reads these files.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["TensorFileError", "map_tensors", "write_tensors"]

_DTYPES: Final = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
_NAMES: Final = {np.dtype(code): name for name, code in _DTYPES.items()}
_LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 64
"""The first array begins at a multiple of a cache line."""
_CHUNK: Final = 1 << 24


class TensorFileError(ValueError):
    """A file is no safetensors file, or damaged; the text names it."""


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> tuple[int, str]:
    """Write arrays to a new file; when this returns, they are on the disk.

    Parameters
    ----------
    path : Path
        The file; an old one is replaced.
    tensors : mapping of str to ndarray
        Booleans, integers and floats of 8 to 64 bits, of any shape.

    Returns
    -------
    tuple of (int, str)
        The file's size in bytes, and its sha256.

    Raises
    ------
    TypeError
        If an array has another dtype; names it.
    """
    # Wide elements first, as the library does: every array then begins at a multiple of its elements' size.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def write(content: bytes | memoryview) -> None:
            file.write(content)
            digest.update(content)

        write(_header(ordered))
        for array in ordered.values():
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for start in range(0, flat.size, _CHUNK):
                write(flat[start : start + _CHUNK].data)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def map_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Map a file's arrays into memory: they are read when they are used, and can be dropped by the system meanwhile.

    Parameters
    ----------
    path : Path
        The file; it may be removed while the arrays are in use, but not changed.

    Returns
    -------
    dict of str to ndarray
        Read-only arrays.

    Raises
    ------
    TensorFileError
        If the file is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        content = np.memmap(path, dtype=np.uint8, mode="r")[_LENGTH_BYTES + length :]
        return {name: _view(content, entry) for name, entry in header.items()}
    except (OSError, OverflowError, MemoryError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorFileError(f"{path} is missing or damaged: {error}") from error


def _header(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for name, array in tensors.items():
        if array.dtype not in _NAMES:
            raise TypeError(f"array {name!r} has dtype {array.dtype}, which safetensors cannot hold")
        start, end = end, end + array.nbytes
        entries[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _view(content: NDArray[np.uint8], entry: dict[str, Any]) -> NDArray[Any]:
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop <= content.size:
        raise ValueError("it is too short")
    return np.asarray(content[start:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"]))
