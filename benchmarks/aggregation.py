"""Time and memory of one server step, as ratios to Flower's own FedAvg on the same replies in the same process.

    python benchmarks/aggregation.py                 # the paper's MLP and CNN, 10 clients, history of 10 rounds
    python benchmarks/aggregation.py --model resnet18 --repeat 3

Prints three tables: whole steps (replies in, new model out), the parts of FedPCD's step, and programs that have no
solution. CPU seconds of this process, medians over rounds; the ratio is what to quote, the seconds are this machine's.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from rich.console import Console
from rich.table import Table

from strategies.engine import Engine, Options
from strategies.replies import Reply
from strategies.rules import RULES, FedPCD, Updates

# Shapes in the order of the models' state dicts: parameters of the paper's MLP and CNN, and ResNet-18's size in layers.
MODELS: dict[str, list[tuple[int, ...]]] = {
    "mlp": [(256, 784), (256,), (128, 256), (128,), (10, 128), (10,)],
    "cnn": [(32, 3, 3, 3), (64, 32, 3, 3), (128, 64, 3, 3), (256, 2048), (256,), (10, 256), (10,)],
    "resnet18": [(64, 3, 3, 3), *[(64, 64, 3, 3)] * 4, *[(128, 128, 3, 3)] * 4, *[(256, 256, 3, 3)] * 4,
                 *[(512, 512, 3, 3)] * 3, (512, 256, 3, 3), (100, 512), (100,)],
}  # fmt: skip
CLIENTS, COHORT, WARM_UP = 100, 10, 11


def rounds(shapes: list[tuple[int, ...]], count: int) -> Iterator[tuple[int, dict[str, np.ndarray], list[Reply]]]:
    """Yield rounds of a made-up federation: ten groups of clients whose updates partly conflict."""
    generator = np.random.default_rng(0)
    groups = [[generator.standard_normal(s).astype(np.float32) for s in shapes] for _ in range(10)]
    theta = {f"layer{i}": np.zeros(s, np.float32) for i, s in enumerate(shapes)}
    for server_round in range(1, count + 1):
        chosen = sorted(generator.choice(CLIENTS, COHORT, replace=False).tolist())
        replies = []
        for client in chosen:
            noise = generator.standard_normal(1000).astype(np.float32)
            arrays = {
                n: a - np.resize(noise, a.shape) - groups[client % 10][i] for i, (n, a) in enumerate(theta.items())
            }
            replies.append(Reply(str(client), arrays, 100 + client))
        yield server_round, theta, replies


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def peak_bytes(work: Callable[[], object]) -> int:
    """Largest memory that one call holds beyond what was there before."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def flower_step(replies: list[Reply]) -> Callable[[], object]:
    """Flower's own aggregation of the same replies, as its FedAvg calls it."""
    contents = [
        RecordDict(
            {
                "arrays": ArrayRecord({n: Array(a) for n, a in (reply.arrays or {}).items()}),
                "metrics": MetricRecord({"num-examples": int(str(reply.num_examples))}),
            }
        )
        for reply in replies
    ]
    return lambda: aggregate_arrayrecords(contents, "num-examples")


def rule_step(
    engine: Engine,
    server_round: int,
    theta: dict[str, np.ndarray],
    replies: list[Reply],
    cohort: list[str],
    parts: dict[str, list[float]],
) -> None:
    """One whole step of a rule, replies in, new model out; collects what it says about itself."""
    _, report = engine.aggregate(server_round, engine.model(theta), replies, cohort, 0.0)
    for key, value in report.diagnostics.items():
        if key.startswith(("seconds", "constraints")):
            parts.setdefault(key, []).append(value)


def whole_steps(console: Console, name: str, repeat: int) -> None:
    """Print every rule's step against Flower's."""
    engines = {method: Engine(rule(), Options()) for method, rule in RULES.items()}
    seconds: dict[str, list[float]] = {method: [] for method in ("flower", *engines)}
    peaks: dict[str, int] = {}
    parts: dict[str, list[float]] = {}
    for server_round, theta, replies in rounds(MODELS[name], WARM_UP + repeat):
        measured = server_round > WARM_UP
        plain = flower_step(replies)
        if measured:
            seconds["flower"].append(cpu_seconds(plain))
            peaks["flower"] = peak_bytes(plain) if server_round == WARM_UP + repeat else 0
        for method, engine in engines.items():
            cohort = [reply.client_id for reply in replies]
            step = partial(rule_step, engine, server_round, theta, replies, cohort, parts)
            if not measured:
                parts.clear()
            if server_round == WARM_UP + repeat:
                peaks[method] = peak_bytes(step)
            elif measured:
                seconds[method].append(cpu_seconds(step))
            else:
                step()
    size = sum(int(np.prod(s)) for s in MODELS[name])
    table = Table(title=f"{name}: {size:,} parameters, {COHORT} replies, history of 10 rounds")
    for column in ("step", "CPU ms", "ratio to Flower", "peak MiB", "ratio"):
        table.add_column(column, justify="left" if column == "step" else "right")
    base = statistics.median(seconds["flower"])
    for method, values in seconds.items():
        middle = statistics.median(values)
        table.add_row(
            "Flower's aggregate" if method == "flower" else method,
            f"{middle * 1e3:.1f}", f"{middle / base:.1f}", f"{peaks[method] / 2**20:.0f}",
            f"{peaks[method] / max(peaks['flower'], 1):.1f}",
        )  # fmt: skip
    console.print(table)
    middles = {key: statistics.median(values) for key, values in sorted(parts.items())}
    console.print({k: round(v * 1e3, 2) if k.startswith("seconds") else v for k, v in middles.items()}, "(ms)")


def infeasible_programs(console: Console) -> None:
    """Print how long a hundred constraints without a common direction take."""
    generator = np.random.default_rng(0)
    cases = {
        "100 rows in 20 dimensions": generator.standard_normal((100, 20)),
        "50 opposite pairs": np.kron([[1.0], [-1.0]], generator.standard_normal((50, 500))),
        "100 rows in the plane": generator.standard_normal((100, 2)),
    }
    table = Table(title="programs of 100 constraints that have no solution")
    for column in ("rows", "policy", "wall ms"):
        table.add_column(column, justify="right" if column == "wall ms" else "left")
    for name, rows in cases.items():
        ids = tuple(str(i) for i in range(100))
        batch = Updates(1, ids, tuple(rows), np.arange(1.0, 101.0))
        for policy in ("primary", "relax", "zero"):
            start = time.perf_counter()
            aggregate, _ = FedPCD(tau=0.1, on_infeasible=policy).aggregate(batch, {})
            assert aggregate.diagnostics["status"] == "infeasible"
            table.add_row(name, policy, f"{(time.perf_counter() - start) * 1e3:.0f}")
    console.print(table)


def main() -> None:
    """Parse the arguments and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS], action="append", help="repeatable; default: mlp and cnn")
    parser.add_argument("--repeat", type=int, default=7, help="measured rounds (default 7)")
    arguments = parser.parse_args()
    console = Console(width=100)
    for name in arguments.model or ["mlp", "cnn"]:
        whole_steps(console, name, arguments.repeat)
    infeasible_programs(console)


if __name__ == "__main__":
    main()
