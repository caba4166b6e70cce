"""One seed, one model: every engine, API and number of workers gives the same bits; an inactive FedPCD is FedAvg."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig as LegacyServerConfig
from flwr.server.compat import start_grid
from safetensors.numpy import load_file

from client_app.app import app as client_app
from client_app.code_hash import code_hash
from client_app.config import TaskConfig
from server_app.evaluation import initial_arrays
from server_app.experiment import run_experiment
from strategies import legacy
from strategies.inprocess import InProcessGrid
from strategies.rules import RULES
from tests.support import assert_same_bits

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
SMALL = {"num-server-rounds": 3, "num-clients": 30, "fraction-train": 0.2, "tau": 0.1}
METHODS = pytest.mark.parametrize("method", sorted(RULES))


def in_process(folder: Path, method: str, nodes: int = 2, **changes: Any) -> Path:
    """Run the app on the in-process grid; returns the strategy's results folder."""
    config = {**DECLARED, **SMALL, "strategy": method, "results-dir": str(folder), "run-name": f"{method}-{nodes}"}
    config |= {key.replace("_", "-"): value for key, value in changes.items()}
    summaries = run_experiment(InProcessGrid(client_app, nodes, config), config)
    return Path(summaries[-1]["folder"])


def model_of(folder: Path) -> dict[str, np.ndarray]:
    """The final model of a results folder."""
    arrays: dict[str, np.ndarray] = load_file(folder / "model.safetensors")
    return dict(sorted(arrays.items()))


def diagnostics_of(folder: Path) -> list[dict[str, Any]]:
    """The diagnostics of all training rounds."""
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    return [line["diagnostics"] for line in lines if line["round"] > 0]


@METHODS
def test_older_api_and_any_number_of_nodes_give_the_same_bits(method: str, tmp_path: Path) -> None:
    first = model_of(in_process(tmp_path, method))
    assert_same_bits(model_of(in_process(tmp_path, method, nodes=7)), first)
    config = {**DECLARED, **SMALL, "strategy": method}
    task = TaskConfig.from_run_config(config)
    initial = {name: array.numpy() for name, array in initial_arrays(task).items()}
    models: dict[int, list[np.ndarray]] = {}
    strategy = legacy.METHODS[method](
        **({"tau": SMALL["tau"]} if method == "fedpcd" else {}),
        seed=0,
        client_ids="ask",
        code_hash=code_hash(),
        local_learning_rate=task.learning_rate,
        fraction_fit=SMALL["fraction-train"],
        min_fit_clients=1,
        min_available_clients=3,  # Flower's own thread registers the nodes one by one
        parameter_names=list(initial),
        initial_parameters=ndarrays_to_parameters(list(initial.values())),
        evaluate_fn=lambda server_round, arrays, _: models.update({server_round: arrays}),
    )
    start_grid(grid=InProcessGrid(client_app, 3, config), config=LegacyServerConfig(num_rounds=3), strategy=strategy)
    assert_same_bits(dict(sorted(zip(initial, models[3], strict=True))), first)


@METHODS
def test_two_runs_with_one_seed_agree_and_another_seed_differs(method: str, tmp_path: Path) -> None:
    first = model_of(in_process(tmp_path / "a", method))
    assert_same_bits(model_of(in_process(tmp_path / "b", method)), first)
    other = model_of(in_process(tmp_path / "c", method, seed=1))
    assert any(other[name].tobytes() != first[name].tobytes() for name in first)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2])
def test_ray_with_one_and_two_workers_gives_the_bits_of_the_in_process_grid(workers: int, tmp_path: Path) -> None:
    # Two cores per client leave Ray one worker on two cores, one core per client two. Ditto's and DQN-Fed's clients
    # remember between rounds, AFL's result is not the last model, FedMDFG asks again within a round.
    methods = sorted(RULES) if workers == 2 else ["fedavg", "fedpcd", "ditto", "dqnfed", "afl", "fedmdfg"]
    in_ray(tmp_path, methods, cpus_per_client={1: 2, 2: 1}[workers], **SMALL)
    for method in methods:
        assert_same_bits(model_of(tmp_path / "ray" / method), model_of(in_process(tmp_path, method)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_method_trains_twenty_rounds_in_rays_simulation_to_better_than_chance(tmp_path: Path) -> None:
    in_ray(tmp_path, list(RULES), num_server_rounds=20, evaluate_every=20)
    for method in RULES:
        summary = json.loads((tmp_path / "ray" / method / "summary.json").read_text())
        assert (summary["status"], summary["rounds"], summary["skipped-rounds"]) == ("completed", 20, 0), method
        assert sum(summary["rejections"].values()) == 0, method
        assert summary["fairness"]["mean"] > 0.15, (method, summary["fairness"])
        assert all(np.isfinite(array).all() for array in model_of(tmp_path / "ray" / method).values()), method


def in_ray(folder: Path, methods: list[str], cpus_per_client: int = 1, **changes: Any) -> None:
    """Run methods through `fedpcd run`, that is `flwr run` on a SuperLink of its own."""
    settings = " ".join(f"{key.replace('_', '-')}={value}" for key, value in changes.items())
    command = [sys.executable, "-c", "from cli.main import app; app()", "run", str(ROOT)]
    command += ["--compare-with", ",".join(methods), "-c", f"{settings} strategy='{methods[-1]}' run-name='ray'"]
    command += ["--results-dir", str(folder), "--cpus-per-client", str(cpus_per_client)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_in_which_no_constraint_binds_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    iid = {"partition": "iid", "num_clients": 10, "fraction_train": 1.0, "tau": 0.0, "num_server_rounds": 20}
    ours = in_process(tmp_path, "fedpcd", **iid)
    theirs = in_process(tmp_path, "fedavg", **iid)
    found = diagnostics_of(ours)
    assert len(found) == 20
    assert {d["status"] for d in found} == {"inactive"}
    assert {d["constraints-active"] for d in found} == {0}
    assert min(d["smallest-progress"] for d in found) > 0
    assert {d["constraints-current"] for d in found} == {10}
    assert_same_bits(model_of(ours), model_of(theirs))


def test_rounds_with_active_constraints_are_not_fedavg(tmp_path: Path) -> None:
    ours, theirs = in_process(tmp_path, "fedpcd"), in_process(tmp_path, "fedavg")
    assert any(d["constraints-active"] > 0 for d in diagnostics_of(ours))
    assert any(model_of(ours)[n].tobytes() != a.tobytes() for n, a in model_of(theirs).items())


def test_strategies_of_one_run_start_from_clients_without_memory(tmp_path: Path) -> None:
    folder = in_process(tmp_path, "fedpcd", compare_with="fedavg", fraction_train=1.0)
    for method in ("fedavg", "fedpcd"):
        lines = [json.loads(line) for line in (folder.parent / method / "rounds.jsonl").read_text().splitlines()]
        assert [line["train"]["participations"]["max"] for line in lines if line["round"] > 0] == [1.0, 2.0, 3.0]
