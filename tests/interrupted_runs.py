"""Runs of the app that are interrupted, and what must be equal to a run that was not."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from client_app.app import app as client_app
from server_app.experiment import run_experiment
from server_app.report import make_console
from strategies.inprocess import InProcessGrid

ROUNDS = 6
SETTINGS: dict[str, Any] = {
    "num-clients": 20,
    "num-server-rounds": ROUNDS,
    "fraction-train": 0.25,
    "tau": 0.1,
    "history-window": 3,
    "local-learning-rate-decay": 0.9,
    "wait-for-nodes": 0.0,
}
"""A small run in which absent clients constrain, rows leave the window and the learning rate changes."""

Intercept = Callable[[Message, Context], object]


def settings(results: Path, name: str, **changes: Any) -> dict[str, Any]:
    """The run config of a new run."""
    places = {"results-dir": str(results), "run-name": name}
    return SETTINGS | places | {key.replace("_", "-"): value for key, value in changes.items()}


def run(run_config: dict[str, Any], intercept: Intercept | None = None, **grid: Any) -> str:
    """Run the app in this process; returns what it printed."""
    output = io.StringIO()
    run_experiment(
        InProcessGrid(client_app, run_config=run_config, intercept=intercept, **grid), run_config, make_console(output)
    )
    return output.getvalue()


def at_message(number: int, act: Callable[[], object], kind: str = "train") -> Intercept:
    """Act when the clients get their `number`-th message of a kind, counted from 1."""
    seen = 0

    def intercept(message: Message, context: Context) -> None:
        nonlocal seen
        seen += message.metadata.message_type == kind
        if seen == number and message.metadata.message_type == kind:
            act()

    return intercept


def interrupt() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that a strategy's folder holds and that does not depend on the clock or on where it lies."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds")
        line["diagnostics"] = {k: v for k, v in line["diagnostics"].items() if not k.startswith("seconds")}
    summary = json.loads((folder / "summary.json").read_text())
    files = {name: (folder / name).read_bytes() for name in ("model.safetensors", "clients.csv", "rejections.jsonl")}
    timeless = {key: value for key, value in summary.items() if key not in ("seconds", "checkpoint-bytes")}
    return {**files, "rounds": lines, "summary": timeless, "files": sorted(path.name for path in folder.iterdir())}
