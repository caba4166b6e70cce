"""What a checkpoint costs beside the round that it saves: time and bytes per round, size on disk, time to resume.

Rounds are FedPCD's with a full history window: 10 of 100 clients, random updates of the model's size. Times are medians
over the rounds in which the window is full; the last column is time of the checkpoint over time of the aggregation.

    python -m benchmarks.checkpoints --model resnet18
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from client_app.config import TaskConfig
from client_app.models import build_model
from server_app.checkpoint import Checkpoint, CheckpointStore
from strategies.cohort import draw
from strategies.engine import Memory
from strategies.rules import FedPCD, Updates

CLIENTS, COHORT, WINDOW = 100, 10, 10
MODELS = {"mlp": "fashion-mnist", "cnn": "cifar10", "resnet18": "cifar100"}


def measure(model: str, rounds: int, folder: Path) -> dict[str, float]:
    """Run rounds, save each, and load the last one."""
    arrays = {
        name: value.numpy() for name, value in build_model(TaskConfig(dataset=MODELS[model])).state_dict().items()
    }
    size = sum(array.size for array in arrays.values())
    (folder / "rounds.jsonl").write_bytes(b"")
    store = CheckpointStore(folder / "checkpoints", folder)
    rule, state = FedPCD(history_window=WINDOW), {}
    generator = np.random.default_rng(0)
    aggregation, saving, sizes = [], [], []
    for number in range(1, WINDOW + 2 + rounds):
        clients = draw([str(c) for c in range(CLIENTS)], COHORT, 0, number)
        rows = tuple(generator.standard_normal(size, dtype=np.float32) for _ in clients)
        start = time.perf_counter()
        _, state = rule.aggregate(Updates(number, clients, rows, np.ones(len(clients)), 0.1), state)
        middle = time.perf_counter()
        store.save(Checkpoint(number, "", arrays, Memory(state), {"rounds.jsonl": 0}, 0.0))
        aggregation.append(middle - start)
        saving.append(time.perf_counter() - middle)
        sizes.append(max(path.stat().st_size for path in store.folder.glob(f"round-{number:06d}.*")))
    start = time.perf_counter()
    checkpoint, _ = CheckpointStore(store.folder, folder).load("")
    assert checkpoint is not None
    loading = time.perf_counter() - start
    history = sum(value.nbytes for value in state.values() if isinstance(value, np.ndarray))
    full = slice(WINDOW, None)
    return {
        "parameters": size,
        "history MiB": history / 2**20,
        "written MiB": statistics.median(sizes[full]) / 2**20,
        "on disk MiB": store.size / 2**20,
        "aggregate s": statistics.median(aggregation[full]),
        "save s": statistics.median(saving[full]),
        "load s": loading,
        "save / aggregate": statistics.median(saving[full]) / statistics.median(aggregation[full]),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=8, help="rounds with a full window")
    options = parser.parse_args()
    table: Any = None
    for model in MODELS if options.model == "all" else [options.model]:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # a real disk: /tmp may be memory
            found = measure(model, options.rounds, Path(folder))
        if table is None:
            table = Table("model", *found)
        table.add_row(model, *(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in found.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
