"""A hash of the app's source, by which server and clients make sure that they run the same code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import strategies

_TEST_FILES = ("test_*.py", "*_test.py")


@lru_cache(maxsize=1)
def code_hash() -> str:
    """Return the hash of the source that this process imported.

    It covers the ``.py`` files of ``client_app`` and ``server_app`` beside this file and of the imported
    ``strategies``; test files are left out because Flower's app bundle leaves them out.

    Returns
    -------
    str
        64 hexadecimal digits: the same for a checkout and for the bundle made of it.
    """
    root = Path(__file__).resolve().parent.parent
    return hash_packages([root / "client_app", root / "server_app", Path(strategies.__path__[0]).resolve()])


def hash_packages(folders: list[Path]) -> str:
    """Return the sha256 over names and contents of the ``.py`` files of packages.

    Parameters
    ----------
    folders : list of pathlib.Path
        The packages' folders; their own names are part of the hash, the places where they lie are not.

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for folder in folders:
        for name, path in sorted(_sources(folder)):
            content = path.read_bytes()
            # The length keeps two different lists of files from running into the same bytes.
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*.py"):
        if not any(path.match(pattern) for pattern in _TEST_FILES) and "__pycache__" not in path.parts:
            yield f"{folder.name}/{path.relative_to(folder).as_posix()}", path
