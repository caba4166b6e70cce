"""Runs of the small federation in both of Flower's APIs, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig
from flwr.server.compat import start_grid
from flwr.serverapp import Grid

import strategies
from strategies import legacy
from strategies.engine import Memory
from strategies.inprocess import InProcessGrid
from strategies.reports import EvaluationReport, RoundReport
from tests.support import HASH, Tamper, arrays_of, initial_model, legacy_client, message_client, record

OURS = {"seed": 1, "client_ids": "ask", "code_hash": HASH, "local_learning_rate": 0.1, "wait_timeout": 1.0}
"""Options of the app's own federations, where clients have stable ids."""


class Run:
    """A finished run: the final model and the reports of its rounds."""

    def __init__(self) -> None:
        self.model: dict[str, np.ndarray] = {}
        self.rounds: list[RoundReport] = []
        self.evaluations: list[EvaluationReport] = []
        self.result: Any = None
        self.memory = Memory()
        self.iterate: dict[str, np.ndarray] = {}

    def hooks(self) -> dict[str, Any]:
        """Keyword arguments that make a strategy report here."""
        return {"on_round": self.rounds.append, "on_evaluation": self.evaluations.append}


def run_message(
    name: str,
    rounds: int = 3,
    nodes: int = 3,
    tamper: Tamper | None = None,
    grid: InProcessGrid | None = None,
    after: Run | None = None,
    **kw: Any,
) -> Run:
    """Run a strategy of the Message API, from the start or `after` another run's rounds."""
    run = Run()
    grid = grid or InProcessGrid(message_client(tamper), nodes)
    keywords = {"fraction_train": 0.5, "min_train_nodes": 1, **OURS, **run.hooks(), **kw}
    strategy = strategies.METHODS[name](**keywords)
    before = {} if after is None else {"rounds_before": len(after.rounds), "memory": after.memory}
    start = initial_model() if after is None else after.iterate
    run.result = strategy.start(grid, record(start), num_rounds=rounds, **before)
    run.model, run.memory = arrays_of(run.result.arrays), strategy.engine.memory
    run.iterate = run.model if strategy.last_iterate is None else arrays_of(strategy.last_iterate)
    return run


def run_legacy(
    name: str, rounds: int = 3, nodes: int = 3, tamper: Tamper | None = None, grid: Grid | None = None, **kw: Any
) -> Run:
    """Run the same strategy of the older API."""
    run, names = Run(), list(initial_model())
    models: dict[int, list[np.ndarray]] = {}
    grid = grid or InProcessGrid(legacy_client(names, tamper), nodes)
    # On a busy machine Flower's threads take longer than a second to hand over a node's answer.
    patient = {**OURS, "wait_timeout": 20.0}
    keywords = {"fraction_fit": 0.5, "min_fit_clients": 1, "num_rounds": rounds, **patient, **run.hooks(), **kw}
    # Flower's own thread registers the nodes one by one: without this a first round may begin with two of three.
    keywords.setdefault("min_available_clients", max(2, nodes))
    strategy = legacy.METHODS[name](
        parameter_names=names,
        initial_parameters=ndarrays_to_parameters(list(initial_model().values())),
        evaluate_fn=lambda server_round, arrays, _: models.update({server_round: arrays}),
        **keywords,
    )
    run.result = start_grid(grid=grid, config=ServerConfig(num_rounds=rounds), strategy=strategy)
    run.model = dict(zip(names, models[rounds], strict=True))
    return run
