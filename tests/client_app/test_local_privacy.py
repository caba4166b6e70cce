"""Flower's local differential privacy on this app's own clients, as SECURITY.md says to switch it on."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from client_app import app as own
from server_app.app import run_experiment
from strategies.inprocess import InProcessGrid

ROOT = Path(__file__).parents[2]


def private_app(mod: LocalDpMod, *, whole_app: bool = False) -> ClientApp:
    """The app's three functions, with the mod around training alone or around all of them."""
    app = own.DualApiClientApp(mods=[mod] if whole_app else [])
    app.query()(own.query)
    app.train(mods=[] if whole_app else [mod])(own.train)
    app.evaluate()(own.evaluate)
    return app


def run(app: ClientApp, results: Path) -> list[dict]:
    """Three rounds of FedPCD on the digits; what was written about each."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    preset = tomllib.loads((ROOT / "presets" / "digits.toml").read_text())
    config = {**declared, **preset, "num-server-rounds": 3, "compare-with": "", "results-dir": str(results)}
    run_experiment(InProcessGrid(app, 2, config), config)
    (rounds,) = results.rglob("rounds.jsonl")
    return [json.loads(line) for line in rounds.read_text().splitlines()][1:]  # the first is the initial model


def test_clients_with_local_privacy_train_and_none_is_refused(tmp_path: Path) -> None:
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=1e3, delta=1e-5)
    private, plain = run(private_app(mod), tmp_path / "private"), run(own.app, tmp_path / "plain")
    assert len(private) == len(plain) == 3
    for report, other in zip(private, plain, strict=True):
        assert report["cohort"] == other["cohort"]
        assert sorted(report["accepted"]) == sorted(report["cohort"])
        assert report["diagnostics"]["status"] in ("inactive", "solved")


def test_around_the_whole_app_the_mod_answers_for_messages_without_a_model() -> None:
    # Why SECURITY.md tells to put it on training: Flower's mod refuses the roster's question.
    app = private_app(LocalDpMod(1.0, 2.0, 1.0, 1e-5), whole_app=True)
    InProcessGrid(app, 1)
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})
    assert app(Message(RecordDict(), 1, MessageType.QUERY), context).has_error()


def test_the_noise_is_as_large_as_security_md_says() -> None:
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=1.0, delta=1e-5)
    deviation = mod.sensitivity * np.sqrt(2 * np.log(1.25 / mod.delta)) / mod.epsilon
    assert round(float(deviation), 1) == 9.7
