"""A file of decoded images, because every message to a deployed client is worked on by a new process."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from logging import WARNING
from pathlib import Path
from typing import Final

import numpy as np
import PIL
import torch
from flwr.common.logger import log
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from client_app.data_sources import Split

_NAMES: Final = ("train-images", "train-labels", "test-images", "test-labels")
_FINGERPRINT: Final = "fingerprint"


def cached(
    cache: Path | None, purpose: str, sources: Iterable[Path], read: Callable[[], tuple[Split, Split]]
) -> tuple[Split, Split]:
    """Return what `read` returns, from a file in `cache` where the sources are those of the last time.

    The file is mapped into memory, so that only the examples which are used are read, and processes share them. It is
    the user's alone, like the images in it. A cache that cannot be used costs time and nothing else.

    Parameters
    ----------
    cache : Path or None
        Folder of such files, made if need be; None to read without a cache.
    purpose : str
        What is read and how: one file is kept for each purpose.
    sources : iterable of Path
        Folders with the files that `read` uses; a change of a name, a size or a modification time is noticed.
    read : callable () -> tuple of Split
        Gives training and test examples.
    """
    if cache is None:
        return read()
    file = cache / f"{hashlib.sha256(purpose.encode()).hexdigest()[:32]}.safetensors"
    fingerprint = _fingerprint(sources)
    if fingerprint is None:
        return read()
    found = _load(file, fingerprint)
    if found is None:
        found = read()
        _save(file, fingerprint, found)
    return found


def _fingerprint(sources: Iterable[Path]) -> str | None:
    """Return a checksum over names, sizes and modification times; None without files, or if one cannot be looked at."""
    # Another release of Pillow may scale images to other pixels.
    digest, empty = hashlib.sha256(PIL.__version__.encode()), True
    for source in sources:
        for folder, folders, files in os.walk(source, followlinks=True):
            folders.sort()
            for name in sorted(files):
                path = os.path.join(folder, name)  # noqa: PTH118  # there may be a hundred thousand
                try:
                    status = os.stat(path)  # noqa: PTH116
                except OSError:  # a dangling link, which `read` names if it matters
                    return None
                digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
                empty = False
            digest.update("\0".join(folders).encode(errors="surrogateescape"))
    return None if empty else digest.hexdigest()


def _load(file: Path, fingerprint: str) -> tuple[Split, Split] | None:
    try:
        with safe_open(file, framework="pt") as content:
            if content.metadata().get(_FINGERPRINT) != fingerprint:
                return None
            arrays = [content.get_tensor(name).numpy() for name in _NAMES]
    except (OSError, SafetensorError):  # not there, or damaged
        return None
    return Split(*arrays[:2]), Split(*arrays[2:])


def _save(file: Path, fingerprint: str, splits: tuple[Split, Split]) -> None:
    """Write by rename, so that processes which do the same at the same time never see half a file."""
    arrays = (array for split in splits for array in (split.images, split.labels))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in zip(_NAMES, arrays, strict=True)}
    temporary: Path | None = None
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        os.close(handle)
        temporary = Path(name)
        save_file(tensors, temporary, {_FINGERPRINT: fingerprint})
        temporary.chmod(0o600)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    except (OSError, SafetensorError) as error:
        log(WARNING, "decoded images cannot be kept in %s (%s): they are decoded for every message", file.parent, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
