"""kill -9 at any moment, a checkpoint's writing included: what is finished is kept, the run goes on bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.interrupted_runs import ROUNDS, outcome, run, settings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COHORT, CLIENTS = 5, 20
METHOD = "ditto"
"""Its clients remember too, and evaluate their own models, so that every kind of state is at stake."""
OPTIONS = {"strategy": METHOD, "evaluation": "both", "checkpoint_keep": 2}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


DRIVER = """
import os, sys, traceback
from pathlib import Path
import client_app.app, server_app.checkpoint, server_app.tensor_files
from tests.end_to_end.test_killed_servers import OPTIONS, die
from tests.interrupted_runs import at_message, run, settings

def counted(function, number, *, halfway=False):
    left = number
    def wrapper(*arguments, **keywords):
        nonlocal left
        left -= 1
        if left == 0 and not halfway:
            die()
        result = function(*arguments, **keywords)
        if left == 0:
            os.truncate(arguments[0], arguments[0].stat().st_size // 2)
            die()
        return result
    return wrapper

def work(kind, number, results, resumed):
    intercept = at_message(number, die, kind) if kind in ("train", "evaluate") else None
    if kind == "fsync":
        os.fsync = counted(os.fsync, number)
    elif kind == "rename":
        Path.replace = counted(Path.replace, number)
    elif kind == "unlink":
        Path.unlink = counted(Path.unlink, number)
    elif kind == "half":
        server_app.checkpoint.write_tensors = counted(server_app.tensor_files.write_tensors, number, halfway=True)
    new = settings(results, "run", **OPTIONS)
    run({"resume": str(results / "run"), "wait-for-nodes": 0.0} if resumed else new, intercept)

for line in sys.stdin:
    kind, number, results, start = line.split()
    child = os.fork()
    if child == 0:
        try:
            work(kind, int(number), Path(results), start == "resume")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Starts a process per line of its input, by fork: importing torch thirty times would take longer than all runs."""


class Server:
    """Starts the app's server again and again."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", DRIVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def lives(self, results: Path, kind: str, number: int, *, resumed: bool = False) -> bool:
        """Start or resume a run that kills itself at that point; returns whether it came to its end before."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(kind, number, results, "resume" if resumed else "new", file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        assert code in (0, -signal.SIGKILL)
        return code == 0

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("whole")
    run(settings(folder, "run", **OPTIONS))
    return outcome(folder / "run" / METHOD)


def points() -> list[tuple[str, int]]:
    """Ten points drawn at random: in training and evaluation, before a file is synced, renamed, removed, or amid it."""
    generator = np.random.default_rng(20261130)
    drawn = [("train", int(n)) for n in generator.choice(ROUNDS * COHORT, 3, replace=False) + 1]
    drawn += [("evaluate", int(n)) for n in generator.choice(ROUNDS * CLIENTS, 2, replace=False) + 1]
    drawn += [("fsync", int(generator.integers(7, 30))), ("rename", int(generator.integers(20, 60)))]
    drawn += [("unlink", int(generator.integers(2, 6))), ("half", int(generator.integers(2, ROUNDS)))]
    return [*drawn, ("half", 1)]


def finished_rounds(results: Path) -> int:
    """Rounds whose line is complete, as a reader would count them after the kill."""
    path = results / "run" / METHOD / "rounds.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return sum(b'"evaluation": {' in line for line in lines)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "number"), points())
def test_a_killed_run_goes_on_bit_for_bit(
    kind: str, number: int, expected: object, server: Server, tmp_path: Path
) -> None:
    assert not server.lives(tmp_path, kind, number), "it was to die"
    finished = finished_rounds(tmp_path)
    # The next one dies too, a little later, before the third comes to the end.
    server.lives(tmp_path, "train", COHORT + 2, resumed=True)
    assert finished_rounds(tmp_path) >= finished  # nothing that was finished is lost
    server.lives(tmp_path, "never", 0, resumed=True)
    assert outcome(tmp_path / "run" / METHOD) == expected
