"""Every run-config key arrives where it acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.app import app as client_app
from server_app.experiment import run_experiment
from strategies.inprocess import InProcessGrid
from strategies.message import MessageStrategy

CHANGED: dict[str, Any] = {
    "num-clients": 20,
    "seed": 5,
    "local-learning-rate": 0.3,
    "local-learning-rate-decay": 0.5,
    "num-server-rounds": 4,
    "fraction-train": 0.35,
    "evaluate-every": 3,
    "round-timeout": 77.0,
    "min-nodes": 3,
    "wait-for-nodes": 8.0,
    "norm-screen": 6.0,
    "examples-screen": 50.0,
    "min-replies": 2,
    "multiplier-cap": 40.0,
    "tau": 0.07,
    "history-window": 4,
    "normalization": "ema",
    "ema-beta": 0.6,
    "on-infeasible": "relax",
    "solver": "quadprog",
    "server-learning-rate": 0.2,
}


class StopError(Exception):
    """The strategy was started; nothing more to see."""


def started(monkeypatch: pytest.MonkeyPatch, folder: Path, **config: Any) -> tuple[MessageStrategy, dict[str, Any]]:
    """The strategy as the experiment starts it, and what it passes to `start`."""
    seen: list[tuple[MessageStrategy, dict[str, Any]]] = []

    def start(self: MessageStrategy, **keywords: Any) -> None:
        seen.append((self, keywords))
        raise StopError

    monkeypatch.setattr(MessageStrategy, "start", start)
    config = {**CHANGED, **config, "results-dir": str(folder), "run-name": "x"}
    with pytest.raises(StopError):
        run_experiment(InProcessGrid(client_app, 3, config), config)
    return seen[-1]


def test_strategy_options_and_loop_get_the_configured_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    strategy, loop = started(monkeypatch, tmp_path)
    options, rule = strategy.engine.options, strategy.rule
    assert (options.seed, options.evaluate_every, options.wait_timeout, options.norm_screen) == (5, 3, 8.0, 6.0)
    assert [options.learning_rate(r) for r in (1, 2, 3)] == pytest.approx([0.3, 0.15, 0.075])
    assert (strategy.fraction_train, strategy.min_available_nodes) == (0.35, 3)
    assert (loop["num_rounds"], loop["timeout"]) == (4, 77.0)
    assert vars(rule) == {
        "tau": 0.07,
        "history_window": 4,
        "normalization": "ema",
        "ema_beta": 0.6,
        "primary": True,
        "on_infeasible": "relax",
        "solver": "quadprog",
        "multiplier_cap": 40.0,
        "server_learning_rate": 0.2,
    }
    assert (options.min_replies, options.examples_screen) == (2, 50.0)


@pytest.mark.parametrize(("evaluation", "fraction"), [("server", 0.0), ("federated", 1.0), ("both", 1.0)])
def test_clients_evaluate_only_where_they_are_asked_to(
    evaluation: str, fraction: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert started(monkeypatch, tmp_path, evaluation=evaluation)[0].fraction_evaluate == fraction


def test_the_learning_rate_that_clients_use_decays(tmp_path: Path) -> None:
    rates = []

    def look(message: Any, context: Any) -> None:
        if message.metadata.message_type == "train":
            rates.append(message.content["config"]["local-learning-rate"])

    config = {**CHANGED, "results-dir": str(tmp_path), "run-name": "x"}
    run_experiment(InProcessGrid(client_app, 3, config, intercept=look), config)
    assert np.unique(rates)[::-1].tolist() == pytest.approx([0.3, 0.15, 0.075, 0.0375])
