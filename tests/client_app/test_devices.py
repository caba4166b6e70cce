"""Devices: every site has its own, impossible requests end at once, and a GPU computes what a CPU computes."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from client_app.app import app as client_app
from client_app.config import ConfigError
from client_app.training import resolve_device
from server_app.experiment import run_experiment
from server_app.report import make_console
from strategies import RosterError
from strategies.inprocess import InProcessGrid

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that PyTorch can use")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    run_config = {
        "num-clients": 4,
        "alpha": 1.0,
        "num-server-rounds": 1,
        "fraction-train": 1.0,
        "results-dir": str(folder),
        "run-name": "run",
    }
    return run_config | {name.replace("_", "-"): value for name, value in changes.items()}


def run(run_config: dict[str, Any], **grid: Any) -> Path:
    run_experiment(InProcessGrid(client_app, run_config=run_config, **grid), run_config, make_console(io.StringIO()))
    return Path(run_config["results-dir"]) / run_config["run-name"] / "fedpcd"


@pytest.mark.parametrize(
    ("name", "device"), [("auto", "cuda"), ("cpu", "cpu"), ("cuda", "cuda"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_a_device_that_is_there_is_taken(two_gpus: None, name: str, device: str) -> None:
    assert resolve_device(name) == torch.device(device)


def test_auto_is_the_cpu_without_a_gpu(no_gpu: None) -> None:
    assert resolve_device("auto") == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_an_error_that_says_how_many_there_are(two_gpus: None) -> None:
    with pytest.raises(ConfigError, match=r"device='cuda:2' is not allowed: this process sees 2 CUDA devices"):
        resolve_device("cuda:2")


def test_on_a_gpu_convolutions_are_as_exact_as_on_a_cpu(two_gpus: None) -> None:
    resolve_device("cuda")
    cudnn = torch.backends.cudnn
    assert (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32) == (True, False, False)


def test_a_run_whose_device_no_node_has_ends_at_once_with_the_reason(tmp_path: Path, no_gpu: None) -> None:
    started = time.monotonic()
    with pytest.raises(RosterError, match=r"(?s)nodes refuse it.*5 nodes: .*device='cuda' is not allowed"):
        run(settings(tmp_path, device="cuda", wait_for_nodes=600.0), num_nodes=5)
    assert time.monotonic() - started < 10
    assert list(tmp_path.iterdir()) == []


def test_a_nodes_own_device_goes_before_the_runs(tmp_path: Path, no_gpu: None) -> None:
    nodes = [{"client-id": str(client), "device": "cpu"} for client in range(3)]
    folder = run(settings(tmp_path, device="cuda"), node_configs=nodes)  # the server needs no GPU for it
    assert json.loads((folder / "config.json").read_text())["client-ids"] == ["0", "1", "2"]


def test_a_site_without_the_gpu_it_is_to_use_is_left_out_by_name(tmp_path: Path, no_gpu: None) -> None:
    nodes = [{"client-id": str(client)} for client in range(3)] + [{"client-id": "3", "device": "cuda:0"}]
    folder = run(settings(tmp_path), node_configs=nodes)
    assert json.loads((folder / "config.json").read_text())["client-ids"] == ["0", "1", "2"]


@needs_gpu
@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet18"])
def test_cpu_and_gpu_agree_to_1e_4_after_one_round(tmp_path: Path, model: str) -> None:
    """The whole product: four clients train on either device, FedPCD aggregates, the server evaluates."""
    models, accuracies = [], []
    for device in ("cpu", "cuda"):
        folder = run(settings(tmp_path / device, model=model, device=device, batch_size=64))
        models.append(load_file(folder / "model.safetensors"))
        accuracies.append(json.loads((folder / "summary.json").read_text())["fairness"]["mean"])
    cpu, gpu = models
    assert list(cpu) == list(gpu)
    assert max(float(np.abs(cpu[name] - gpu[name]).max()) for name in cpu) < 1e-4
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.01)


@needs_gpu
def test_sites_with_and_without_a_gpu_train_together(tmp_path: Path) -> None:
    mixed = [{"client-id": str(client), "device": ("cpu", "cuda")[client % 2]} for client in range(4)]
    alike = [{"client-id": str(client), "device": "cpu"} for client in range(4)]
    first, second = (
        load_file(run(settings(tmp_path / name), node_configs=nodes) / "model.safetensors")
        for name, nodes in (("mixed", mixed), ("alike", alike))
    )
    assert max(float(np.abs(first[name] - second[name]).max()) for name in first) < 1e-4
