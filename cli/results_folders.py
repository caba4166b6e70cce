"""Folders of results: those that a report was asked for, and those that an interrupted run leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = "config.json"
"""File in the folder of each strategy of a run."""


def runs_in(folders: Iterable[Path]) -> list[Path]:
    """Replace folders that hold runs, such as ``results``, by those runs in the order of their names.

    Parameters
    ----------
    folders : iterable of Path
        Folders of a strategy, of a run or of runs.

    Returns
    -------
    list of Path
        Absolute paths; a folder without results stays as it is.
    """
    found = []
    for folder in map(Path.resolve, folders):
        runs = sorted({file.parent.parent for file in folder.glob(f"*/*/{CONFIG}")})
        deeper = runs and not (folder / CONFIG).is_file() and not any(folder.glob(f"*/{CONFIG}"))
        found += runs if deeper else [folder]
    return found


@contextmanager
def new_runs(results_dir: Path) -> Iterator[None]:
    """Have Ctrl-C tell which folders a run has made by then: they hold its results so far.

    Raises
    ------
    KeyboardInterrupt
        With that remark, if there are such folders.
    """
    before = _subfolders(results_dir)
    try:
        yield
    except KeyboardInterrupt as error:
        made = sorted(_subfolders(results_dir) - before)
        so_far = " ".join(map(str, made))
        remark = f"; results so far: {so_far} (to go on: fedpcd run . --resume {made[-1]})" if made else ""
        raise KeyboardInterrupt(remark) from error


def _subfolders(folder: Path) -> set[Path]:
    folder = folder.expanduser()
    return {child for child in folder.iterdir() if child.is_dir()} if folder.is_dir() else set()
