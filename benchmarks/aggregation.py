"""Time and memory of one server step, as ratios to Flower's own FedAvg on the same replies in the same process.

    python -m benchmarks.aggregation                 # the paper's MLP and CNN, 10 clients, history of 10 rounds
    python -m benchmarks.aggregation --model resnet18 --repeat 3
    python -m benchmarks.aggregation --method craft --method fedfv

Prints a table of whole steps per method (replies in, new model out), what each step says of its parts, and programs
that have no solution. Methods with a history are measured when it is full. CPU seconds of this process, medians over
rounds; the ratio is what to quote, the seconds are this machine's.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from rich.console import Console
from rich.table import Table

from strategies.engine import Engine, Options
from strategies.replies import Reply
from strategies.rules import RULES, FedPCD, Updates
from strategies.rules.updates import METRIC_NEEDS, NEWTON_DIRECTION

# Shapes in the order of the models' state dicts: parameters of the paper's MLP and CNN, and ResNet-18's size in layers.
MODELS: dict[str, list[tuple[int, ...]]] = {
    "mlp": [(256, 784), (256,), (128, 256), (128,), (10, 128), (10,)],
    "cnn": [(32, 3, 3, 3), (64, 32, 3, 3), (128, 64, 3, 3), (256, 2048), (256,), (10, 256), (10,)],
    "resnet18": [(64, 3, 3, 3), *[(64, 64, 3, 3)] * 4, *[(128, 128, 3, 3)] * 4, *[(256, 256, 3, 3)] * 4,
                 *[(512, 512, 3, 3)] * 3, (512, 256, 3, 3), (100, 512), (100,)],
}  # fmt: skip
CLIENTS, COHORT, WARM_UP = 100, 10, 11


def rounds(
    shapes: list[tuple[int, ...]], count: int, newton: bool
) -> Iterator[tuple[int, dict[str, np.ndarray], list[Reply]]]:
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
            metrics = dict.fromkeys(METRIC_NEEDS, 0.5 + client % 10 / 20)
            direction = {n: theta[n] - a for n, a in arrays.items()} if newton else None
            replies.append(Reply(str(client), arrays, 100 + client, metrics, newton_direction=direction))
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
    engine: Engine, server_round: int, theta: dict[str, np.ndarray], replies: list[Reply]
) -> dict[str, float]:
    """One whole step of a rule, replies in, new model out; returns what it says about its parts."""
    cohort, population = [reply.client_id for reply in replies], tuple(str(c) for c in range(CLIENTS))
    _, report = engine.aggregate(server_round, engine.model(theta), replies, cohort, 0.0, population, trial_losses)
    assert not report.skipped, report
    return {k: v for k, v in report.diagnostics.items() if k.startswith(("seconds", "constraints"))}


def trial_losses(arrays: Mapping[str, np.ndarray], clients: tuple[str, ...]) -> dict[str, float]:
    """Losses that let a line search end at its second trial; what the clients compute is not the server's time."""
    moved = float(np.abs(next(iter(arrays.values())).ravel()[:100]).mean())
    return dict.fromkeys(clients, 0.4 + 0.1 * (moved > 1.0))


def measure(method: str, name: str, repeat: int) -> tuple[list[float], list[float], int, int, dict[str, float]]:
    """CPU seconds of Flower's and of the method's step on the same replies, their peak bytes, and the parts."""
    rule = RULES[method]()
    engine = Engine(rule, Options())
    warm_up = WARM_UP if hasattr(rule, "history_window") else 2
    flower: list[float] = []
    own: list[float] = []
    peaks, parts = (0, 0), {}
    for server_round, theta, replies in rounds(MODELS[name], warm_up + repeat + 1, NEWTON_DIRECTION in rule.needs):
        plain, step = flower_step(replies), partial(rule_step, engine, server_round, theta, replies)
        if server_round == warm_up + repeat + 1:
            peaks = (peak_bytes(plain), peak_bytes(step))
        elif server_round > warm_up:
            flower.append(cpu_seconds(plain))
            start = time.process_time()
            parts = step()
            own.append(time.process_time() - start)
        else:
            step()
    return flower, own, *peaks, parts


def whole_steps(console: Console, name: str, methods: list[str], repeat: int) -> None:
    """Print every rule's step against Flower's."""
    size = sum(int(np.prod(s)) for s in MODELS[name])
    table = Table(title=f"{name}: {size:,} parameters, {COHORT} replies, full history")
    for column in ("step", "CPU ms", "ratio to Flower", "peak MiB", "ratio", "parts"):
        table.add_column(column, justify="left" if column in ("step", "parts") else "right")
    for method in methods:
        flower, own, flower_peak, peak, parts = measure(method, name, repeat)
        middle = statistics.median(own)
        told = " ".join(f"{k}={v * 1e3:.0f}ms" if k.startswith("seconds") else f"{k}={v}" for k, v in parts.items())
        table.add_row(
            method, f"{middle * 1e3:.1f}", f"{middle / statistics.median(flower):.1f}", f"{peak / 2**20:.0f}",
            f"{peak / max(flower_peak, 1):.1f}", told,
        )  # fmt: skip
        console.print(f"{name} {method}: {middle / statistics.median(flower):.2f}", style="dim")
    console.print(table)


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
    parser.add_argument("--method", choices=[*RULES], action="append", help="repeatable; default: all")
    parser.add_argument("--repeat", type=int, default=7, help="measured rounds (default 7)")
    arguments = parser.parse_args()
    console = Console(width=140)
    for name in arguments.model or ["mlp", "cnn"]:
        whole_steps(console, name, arguments.method or [*RULES], arguments.repeat)
    infeasible_programs(console)


if __name__ == "__main__":
    main()
