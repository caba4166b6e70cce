"""Sites with images of their own, and devices that are not there, on real Flower processes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cli.superlink import LocalSuperLink
from client_app.app import app as client_app
from server_app.experiment import run_experiment
from strategies.inprocess import InProcessGrid
from tests.end_to_end.federation import Federation
from tests.end_to_end.test_engines_agree import DECLARED, ROOT, model_of
from tests.support import assert_same_bits

pytestmark = pytest.mark.slow

COUNTS = {"site-a": {"dark": 8, "light": 5}, "site-b": {"light": 12}, "site-c": {"dark": 4, "middle": 9}}
"""Training images of each class at each site; as many test images."""
WAIT = 600.0
"""Seconds that a run would wait for nodes: much longer than a refusal takes."""
SETTINGS: dict[str, Any] = {
    "dataset": "image-folder",
    "image-classes": "dark,middle,light",
    "image-size": 16,
    "image-channels": 1,
    "num-server-rounds": 1,
    "fraction-train": 1.0,
    "min-nodes": 3,
}


class Sites(Federation):
    """SuperNodes that have nothing but a folder of images each."""

    def __init__(self, roots: Mapping[str, Path]) -> None:
        super().__init__(dict.fromkeys(roots, 0), secure=False)
        self.roots = roots

    def node_config(self, client_id: str) -> str:
        """Node config of a client's SuperNode: its own folders, and no part of anybody's data."""
        return f"client-id='{client_id}' data-root='{self.roots[client_id]}' state-dir='{self.state(client_id)}'"

    def state(self, client_id: str) -> Path:
        """Folder in which the client keeps things."""
        return self.folder / "state" / client_id


@pytest.fixture
def roots(tmp_path: Path) -> dict[str, Path]:
    """Write the sites' images: each class has a brightness of its own."""
    rng = np.random.default_rng(0)
    for site, classes in COUNTS.items():
        for split in ("train", "test"):
            for name, count in classes.items():
                folder = tmp_path / site / split / name
                folder.mkdir(parents=True)
                low = {"dark": 0, "middle": 90, "light": 180}[name]
                for number in range(count):
                    pixels = rng.integers(low, low + 70, (30, 40), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")
    return {site: tmp_path / site for site in COUNTS}


@pytest.mark.timeout(1000)
def test_sites_with_images_of_their_own_give_the_bits_of_the_in_process_grid(
    tmp_path: Path, roots: dict[str, Path]
) -> None:
    with Sites(roots) as sites:
        run_id = sites.submit({**SETTINGS, "results-dir": str(tmp_path / "results"), "run-name": "deployed"})
        assert sites.finish(run_id, 700) == "finished:completed", sites.outcome(run_id)
        # Every message was worked on by another process, each site decoded its images once.
        assert all(len(list((sites.state(site) / "decoded").iterdir())) == 1 for site in roots)
    config = {**DECLARED, **SETTINGS, "results-dir": str(tmp_path / "results"), "run-name": "in-process"}
    nodes = [
        {"client-id": site, "data-root": str(root), "state-dir": str(tmp_path / "state" / site)}
        for site, root in roots.items()
    ]
    run_experiment(InProcessGrid(client_app, run_config=config, node_configs=nodes), config)
    deployed, in_process = (model_of(tmp_path / "results" / name / "fedpcd") for name in ("deployed", "in-process"))
    assert_same_bits(deployed, in_process)


@pytest.mark.timeout(1000)
def test_a_site_with_a_broken_image_ends_a_run_that_needs_it_at_once_and_by_name(
    tmp_path: Path, roots: dict[str, Path]
) -> None:
    broken = roots["site-b"] / "train" / "light" / "7.png"
    broken.write_bytes(b"not an image")
    with Sites(roots) as sites:
        began = time.monotonic()
        run_id = sites.submit({**SETTINGS, "results-dir": str(tmp_path / "results"), "wait-for-nodes": WAIT})
        assert sites.finish(run_id, 700) == "finished:failed"
        assert time.monotonic() - began < WAIT / 2
        assert f"{broken} cannot be used as an image" in sites.outcome(run_id)[1]
    assert not (tmp_path / "results").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.timeout(300)
def test_a_simulation_without_the_gpu_it_asks_for_ends_at_once_with_the_reason(tmp_path: Path) -> None:
    with LocalSuperLink(ROOT) as superlink:
        changes = {"device": "cuda", "wait-for-nodes": WAIT, "results-dir": str(tmp_path / "results")}
        run_id = superlink.submit(changes, "num-supernodes=4 client-resources-num-cpus=1")
        began = time.monotonic()
        superlink.stream(run_id)
        assert time.monotonic() - began < WAIT / 2
        status, details = superlink.outcome(run_id)
    assert status == "finished:failed"
    assert "device='cuda' is not allowed: this process sees 0 CUDA devices" in details
