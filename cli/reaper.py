"""Ends what a command has started, even if that was killed. Standard library alone: it is also a script."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PATIENCE_SECONDS = 5.0


def watch(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that waits for the end of this one, then ends what is marked with a folder's name and removes it.

    Parameters
    ----------
    folder : Path
        The folder; its name is the mark, see `marked_processes`.

    Returns
    -------
    Popen
        The process. Closing its standard input, as the end of this process does, lets it look and end; it finds
        nothing to do where the folder is gone.
    """
    return subprocess.Popen(
        [sys.executable, "-I", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # neither Ctrl-C nor a closed terminal is meant for it
    )


def end_marked(mark: str) -> None:
    """Kill the processes whose environment contains `mark`, and those that they start meanwhile."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def marked_processes(mark: str) -> list[int]:
    """Ids of the processes whose environment contains `mark`; empty where there is no ``/proc``.

    Ray's processes write their titles over part of their environment, in which variables come in any order: a mark must
    stand in several variables to be found again with certainty.
    """
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
    return found


def _main(folder: Path) -> None:
    sys.stdin.buffer.read()
    if folder.exists():
        end_marked(str(folder))
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
