"""GPUs that a command asks for: refused before Flower starts where they are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cli import engines, main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fedpcd():
    return lambda *arguments: CliRunner().invoke(main.app, [str(argument) for argument in arguments])


@pytest.fixture
def submitted(monkeypatch, tmp_path):
    """Record the size of the simulation that Flower would be asked for."""
    sizes = []

    class NoSuperLink:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, _, size):
            sizes.append(size)
            return 1

        def stream(self, _):
            pass

        def outcome(self, _):
            return engines.COMPLETED, ""

    monkeypatch.setattr(engines, "LocalSuperLink", NoSuperLink)
    monkeypatch.chdir(tmp_path)
    return sizes


def gpus(monkeypatch, number: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize("options", [["-c", "device='cuda'"], ["-c", "device=cuda:1", "--engine", "in-process"]])
def test_a_device_that_is_not_there_is_refused_before_anything_starts(fedpcd, submitted, monkeypatch, options):
    gpus(monkeypatch, 0)
    done = fedpcd("run", ROOT, *options)
    assert done.exit_code == 2
    assert "is not allowed: this process sees 0 CUDA devices" in done.stderr
    assert submitted == []


@pytest.mark.parametrize(
    ("number", "options", "words"),
    [
        (0, ["--gpus-per-client", 0.25, "-c", "device=cuda"], "--gpus-per-client 0.25: this machine has 0 GPUs"),
        (1, ["--gpus-per-client", 2, "-c", "device=auto"], "--gpus-per-client 2: this machine has 1 GPUs"),
        (1, ["--gpus-per-client", 0.25], "device='cpu', which uses no GPU: add -c \"device='cuda'\""),
        (2, ["--gpus-per-client", 0.5, "-c", "device=cuda:1"], "use device='cuda', since each client sees only"),
        (4, ["--gpus-per-client", 1.5, "-c", "device=cuda"], "--gpus-per-client 1.5: use a share in (0, 1]"),
        (1, ["--gpus-per-client", -1, "-c", "device=cuda"], "--gpus-per-client -1: use a share in (0, 1]"),
    ],
)
def test_an_impossible_share_of_a_gpu_is_refused_before_anything_starts(
    fedpcd, submitted, monkeypatch, number, options, words
):
    gpus(monkeypatch, number)
    done = fedpcd("run", ROOT, *options)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert submitted == []


def test_several_clients_share_a_gpu(fedpcd, submitted, monkeypatch):
    gpus(monkeypatch, 1)
    done = fedpcd("run", ROOT, "--gpus-per-client", 0.25, "-c", "device='cuda'", "--nodes", 4)
    assert done.exit_code == 0, done.output
    assert submitted == ["num-supernodes=4 client-resources-num-cpus=1 client-resources-num-gpus=0.25"]


def test_without_the_option_flower_is_asked_for_no_gpu(fedpcd, submitted):
    assert fedpcd("run", ROOT, "--nodes", 4).exit_code == 0
    assert submitted == ["num-supernodes=4 client-resources-num-cpus=1"]
