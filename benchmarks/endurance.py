"""What the server's process holds over hundreds of rounds, and what twenty simulations leave behind.

    python -m benchmarks.endurance                             # the app: digits, 20 clients, 300 rounds of FedPCD
    python -m benchmarks.endurance --method fedfv --method fedlf
    python -m benchmarks.endurance --megabytes 4 --rounds 100  # the strategy alone, with rows of 4 MB
    python -m benchmarks.endurance --simulations 20            # one after the other in this process
    python -m benchmarks.endurance --simulations 20 --engine ray

Clients run in the server's process, one after the other (except in Ray), so what they keep counts too. `--json FILE`
writes all samples; `--trace` shows which lines of code hold what grew.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import tempfile
import time
import tracemalloc
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from rich.console import Console
from rich.table import Table

from cli.app_folder import AppFolder
from cli.engines import run_in_process, run_simulation
from cli.reaper import marked_processes
from client_app.app import app as client_app
from server_app.experiment import run_experiment
from server_app.report import make_console
from strategies import METHODS
from strategies.inprocess import InProcessGrid
from strategies.rules.updates import METRIC_NEEDS

ROOT = Path(__file__).parents[1]
CLIENTS, SHARE, WINDOW = 20, 0.25, 10
"""Five of twenty clients per round: the window of ten rounds holds nearly all of them, most from earlier rounds."""
MARKS = ("A_ENDURANCE", "ENDURANCE", "Z_ENDURANCE")
"""Environment variables by which descendants are found; several, see `cli.reaper.marked_processes`."""


@dataclass(frozen=True)
class Sample:
    """The process after a round or a simulation.

    Parameters
    ----------
    number : int
        Rounds or simulations done.
    rss : int
        Resident bytes.
    files, mappings, threads : int
        Open file descriptors, lines of ``/proc/self/maps``, threads.
    seconds : float
        Wall clock of the simulation.
    processes, ports, folders : int
        Living descendants, TCP ports on which they or this process listen, temporary files and folders.
    """

    number: int
    rss: int
    files: int
    mappings: int
    threads: int
    seconds: float = 0.0
    processes: int = 0
    ports: int = 0
    folders: int = 0


def sample(number: int, **more: float) -> Sample:
    """Measure this process, after a collection of garbage."""
    gc.collect()
    own = Path("/proc/self")
    status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
    mappings = (own / "maps").read_text().count("\n")
    files = len(list((own / "fd").iterdir()))
    return Sample(number, int(status["VmRSS"].split()[0]) * 1024, files, mappings, int(status["Threads"]), **more)  # type: ignore[arg-type]


class Sampling(InProcessGrid):
    """A grid that measures before every round of training."""

    def __init__(self, app: ClientApp, rounds: int, nodes: int, run_config: Mapping[str, Any]) -> None:
        super().__init__(app, nodes, run_config)
        self.samples: list[Sample] = []
        self.snapshots: list[tracemalloc.Snapshot] = []
        self._rounds = rounds

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies."""
        sent = list(messages)
        if sent and sent[0].metadata.message_type == MessageType.TRAIN:
            self.samples.append(sample(len(self.samples)))
            if tracemalloc.is_tracing() and len(self.samples) in (3 * WINDOW, self._rounds):
                self.snapshots.append(tracemalloc.take_snapshot())
        return super().send_and_receive(sent, timeout=timeout)


def run_app(method: str, rounds: int, folder: Path) -> Sampling:
    """Run the whole app: training, evaluation, results and checkpoints."""
    settings = {"strategy": method, "compare-with": "", "num-clients": CLIENTS, "num-server-rounds": rounds}
    settings |= {"fraction-train": SHARE, "history-window": WINDOW, "alpha": 0.1, "results-dir": str(folder)}
    settings |= {"run-name": f"{method}-{rounds}", "wait-for-nodes": 0.0}
    grid = Sampling(client_app, rounds, 2, settings)
    run_experiment(grid, settings, make_console(io.StringIO()))
    return grid


def run_strategy(method: str, rounds: int, megabytes: float) -> Sampling:
    """Run the strategy alone, on clients that send a model of this size."""
    app, size = ClientApp(), int(megabytes * 2**18)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        received = message.content.array_records["arrays"]["weight"].numpy()
        step = np.random.default_rng(context.node_id % 2**32).standard_normal(size).astype(np.float32)
        content = {
            "arrays": ArrayRecord({"weight": Array(received - step)}),
            "metrics": MetricRecord({"num-examples": 5, **dict.fromkeys(METRIC_NEEDS, 0.5)}),
        }
        return Message(RecordDict(content), reply_to=message)

    grid = Sampling(app, rounds, CLIENTS, {})
    window = {"history_window": WINDOW} if hasattr(METHODS[method].rule_class, "history_window") else {}
    strategy = METHODS[method](fraction_train=SHARE, fraction_evaluate=0.0, **window)
    strategy.start(grid, ArrayRecord({"weight": Array(np.zeros(size, np.float32))}), num_rounds=rounds)
    return grid


def growth(samples: list[Sample]) -> float:
    """By which share the resident memory grew from the first full window to the end, medians over a window's rounds."""
    full, end = samples[2 * WINDOW : 3 * WINDOW], samples[-WINDOW:]
    return float(np.median([s.rss for s in end]) / np.median([s.rss for s in full]) - 1.0)


def slope(samples: list[Sample]) -> float:
    """Bytes per round, fitted from the first full window on."""
    later = samples[2 * WINDOW :]
    return float(np.polyfit([s.number for s in later], [s.rss for s in later], 1)[0])


def simulations(engine: str, count: int, folder: Path) -> list[Sample]:
    """Run simulations one after the other; sample 0 is from before the first."""
    app, mark = AppFolder.at(ROOT), uuid.uuid4().hex
    os.environ |= dict.fromkeys(MARKS, mark)
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    made: list[Path] = []
    make_folder = tempfile.mkdtemp

    def noted(*arguments: str | None, **keywords: str | None) -> str:
        made.append(Path(make_folder(*arguments, **keywords)))
        return str(made[-1])

    tempfile.mkdtemp = noted  # type: ignore[assignment]  # our command's own folder lies in /tmp whatever TMPDIR says
    found = [sample(0)]
    for number in range(1, count + 1):
        changes = {"num-server-rounds": 3, "num-clients": CLIENTS, "fraction-train": SHARE}
        changes |= {"results-dir": str(folder / "results"), "run-name": str(number)}
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            if engine == "ray":
                run_simulation(app, changes, nodes=None, cpus_per_client=1)
            else:
                run_in_process(app, changes, nodes=None)
        seconds, left = time.perf_counter() - start, marked_processes(mark)
        ports, folders = listening([os.getpid(), *left]), {*temporary.iterdir(), *filter(Path.exists, made)}
        folders -= {*temporary.glob("torchinductor_*")}  # PyTorch's cache: one, for all processes of a user
        more = {"seconds": seconds, "processes": len(left), "ports": len(ports), "folders": len(folders)}
        found.append(sample(number, **more))
    tempfile.mkdtemp = make_folder
    assert engine != "ray" or len(made) >= count
    return found


def listening(processes: Iterable[int]) -> set[int]:
    """TCP ports on which any of these processes listens."""
    sockets = set()
    for process in processes:
        for file in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(str(file.readlink()))
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def show(console: Console, title: str, columns: dict[str, str], samples: list[Sample], every: int) -> None:
    """Print every so many samples."""
    table = Table(title=title)
    for heading in columns:
        table.add_column(heading, justify="right")
    for found in [*samples[:-1:every], samples[-1]]:
        row = {**asdict(found), "rss": f"{found.rss / 2**20:.1f}", "seconds": f"{found.seconds:.1f}"}
        table.add_row(*(str(row[name]) for name in columns.values()))
    console.print(table)


def show_growth(console: Console, grid: Sampling) -> None:
    """Print how much the memory grew, and where, if allocations were traced."""
    grew, per_round = growth(grid.samples), slope(grid.samples)
    console.print(f"from the full window to the end: {grew:+.2%}; fitted: {per_round / 1024:+.2f} KiB per round")
    if grid.snapshots:
        first, last = grid.snapshots
        for difference in last.compare_to(first, "traceback")[:12]:
            where = "\n".join(difference.traceback.format(limit=4))
            console.print(f"{difference.size_diff / 1024:+.1f} KiB\n{where}", markup=False, highlight=False)


def main() -> None:
    """Parse the arguments and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=[*METHODS], action="append", help="repeatable; default: fedpcd")
    parser.add_argument("--rounds", type=int, default=300, help="default 300")
    parser.add_argument("--megabytes", type=float, default=0.0, help="size of a model for the strategy alone")
    parser.add_argument("--simulations", type=int, default=0, help="run so many simulations instead")
    parser.add_argument("--engine", choices=["in-process", "ray"], default="in-process", help="of --simulations")
    parser.add_argument("--every", type=int, default=20, help="rounds between lines (default 20)")
    parser.add_argument("--json", type=Path, help="file for all samples, by method or engine")
    parser.add_argument("--trace", action="store_true", help="trace allocations (slow, and memory of its own)")
    arguments = parser.parse_args()
    if arguments.rounds < 4 * WINDOW:
        parser.error(f"--rounds must be at least {4 * WINDOW}: the growth is measured once the window is full")
    if arguments.trace:
        tracemalloc.start(8)
    gc.freeze()  # what was imported need not be searched for garbage before every sample
    console, found = Console(width=140), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = {"RSS MiB": "rss", "files": "files", "mappings": "mappings", "threads": "threads"}
        if arguments.simulations:
            samples = simulations(arguments.engine, arguments.simulations, folder)
            left = {"seconds": "seconds", "processes": "processes", "ports": "ports", "temporary": "folders"}
            show(console, arguments.engine, {"simulation": "number", **left, **process}, samples, 1)
            found[arguments.engine] = samples
        for method in [] if arguments.simulations else arguments.method or ["fedpcd"]:
            own = arguments.megabytes > 0.0
            grid = (
                run_strategy(method, arguments.rounds, arguments.megabytes)
                if own
                else run_app(method, arguments.rounds, folder)
            )
            show(console, f"{method}, {CLIENTS} clients", {"round": "number", **process}, grid.samples, arguments.every)
            show_growth(console, grid)
            found[method] = grid.samples
    if arguments.json is not None:
        text = json.dumps({name: [asdict(one) for one in samples] for name, samples in found.items()})
        arguments.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
