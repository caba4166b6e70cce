"""Folders of runs: their names, and whose they are while a run writes there."""

from __future__ import annotations

import fcntl
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from client_app.config import ConfigError
from server_app.result_files import ROUNDS

if TYPE_CHECKING:
    import io
    from pathlib import Path

__all__ = ["default_run_name", "lock", "new_run_folder", "require_unused"]

_RUN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def default_run_name(dataset: str, strategy: str, seed: int) -> str:
    """Name a run after what it runs and when.

    Parameters
    ----------
    dataset, strategy : str
        Names as in the run config.
    seed : int
        The run's seed.

    Returns
    -------
    str
        ``<dataset>-<strategy>-seed<seed>-<UTC time>``, e.g. ``digits-fedpcd-seed0-20260131T154500Z``.
    """
    return f"{dataset}-{strategy}-seed{seed}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def new_run_folder(results_dir: Path, run_name: str, *, automatic: bool = False) -> Path:
    """Create the folder of one run; an existing one is never touched.

    Parameters
    ----------
    results_dir : Path
        Absolute folder of all runs; created if missing.
    run_name : str
        Name of the new folder in it.
    automatic : bool
        True when the name was made by `default_run_name`: two runs in one second then get ``-2``, ``-3``, ...

    Returns
    -------
    Path
        The new, empty folder.

    Raises
    ------
    ConfigError
        If the name is no plain folder name, is taken, or the folder cannot be created; names the run-config
        key.
    """
    if not _RUN_NAME.fullmatch(run_name):
        raise ConfigError(
            f"run-name={run_name!r} is no folder name: use letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    try:
        results_dir.mkdir(parents=True, exist_ok=True)
        return _new_folder(results_dir, run_name, automatic=automatic)
    except FileExistsError as error:
        if not results_dir.is_dir():
            raise ConfigError(f"results-dir={str(results_dir)!r} is a file: give a folder") from error
        raise ConfigError(
            f"run-name={run_name!r} is taken: {results_dir / run_name} exists and results are never "
            "overwritten; choose another run-name, or leave it empty for a name with the time"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"results-dir={str(results_dir)!r} is unusable: {error}; give a folder that this process may write to"
        ) from error


def _new_folder(results_dir: Path, name: str, *, automatic: bool) -> Path:
    """Create the folder; a taken name that the clock made gets a number."""
    for candidate in (name, *(f"{name}-{number}" for number in range(2, 100) if automatic)):
        with suppress(FileExistsError):
            (results_dir / candidate).mkdir()
            return results_dir / candidate
    raise FileExistsError(name)


def require_unused(folder: Path) -> None:
    """Make sure that no other process is writing to a strategy's folder.

    Parameters
    ----------
    folder : Path
        The folder; it may lack files.

    Raises
    ------
    ConfigError
        If one is.
    """
    with suppress(FileNotFoundError), (folder / ROUNDS).open("rb") as file:
        lock(file, folder)


def lock(file: io.BufferedIOBase, folder: Path) -> None:
    """Hold a folder until the file is closed, which the end of the process does too."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{folder} is in use: the run there is still going on, or was resumed already") from None
    except OSError:  # A file system without locks is no reason not to run.
        return
