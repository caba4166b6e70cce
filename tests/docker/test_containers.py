"""The commands that the images run, as processes: a federation comes up, trains, and goes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cli.superlink import free_port
from tests.docker.containers import ROOT, SCRIPTS, Containers, compose, containers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class User:
    """Who submits runs: a Flower configuration that knows the federation, and the commands of the guide."""

    def __init__(self, folder: Path) -> None:
        self.federation = folder / "federation"
        self.port = free_port()
        self.env = {**os.environ, "FLWR_HOME": str(folder / "user"), "FLWR_TELEMETRY_ENABLED": "0"}
        self.env |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "PATH": f"{SCRIPTS}:{os.environ['PATH']}"}
        options = f"--host localhost --host fl.example.org --port {self.port} --site site-a --site site-b"
        self.fedpcd("init", str(self.federation), *options.split())
        self.fedpcd("connect", str(self.federation / "user"))

    def fedpcd(self, *words: str) -> None:
        subprocess.run([sys.executable, "-m", "cli.main", "federation", *words], cwd=ROOT, env=self.env, check=True)

    def flwr(self, *words: str) -> Any:
        command = ["flwr", *words, "--format", "json"]
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, check=False)
        answer = json.loads(done.stdout[done.stdout.index("{") :])
        assert answer["success"], answer
        return answer

    def run(self, run_config: str) -> str:
        """Run the app and return how it ended."""
        run = self.flwr("run", ".", "fedpcd", "--run-config", run_config)["run-id"]
        deadline = time.monotonic() + 900
        while (status := self.flwr("ls", "fedpcd", "--run-id", run)["runs"][0])["status"].partition(":")[
            0
        ] != "finished":
            assert time.monotonic() < deadline, status
            time.sleep(2)
        return f"{status['status']} {status['status-details']}"


def test_compose_yml_trains_on_two_sites_with_tls_and_node_keys() -> None:
    with containers() as machine:
        user = User(machine.folder)
        variables = {"SUPERLINK_DIR": user.federation / "superlink", "SITES_DIR": user.federation / "sites"}
        machine.add(compose("compose.yml", env={**variables, "SUPERLINK_PORT": str(user.port), **machine.owner}))
        machine.up("fedpcd/server-app")
        user.fedpcd("register", str(user.federation), "--address", f"127.0.0.1:{user.port}")
        machine.up()

        ended = user.run("num-server-rounds=1 fraction-train=1.0 run-name='tried'")

        assert ended.startswith("finished:completed"), ended + machine.logs()
        summary = json.loads((machine.volume("fedpcd/results") / "tried/fedpcd/summary.json").read_text())
        assert summary, summary
        assert list(machine.volume("fedpcd/state").glob("superlink.db*"))
        assert_ends(machine)


def test_server_yml_and_site_yml_train_on_each_sites_own_images() -> None:
    with containers() as machine:
        user = User(machine.folder)
        superlink = {"SUPERLINK_DIR": user.federation / "superlink", "SUPERLINK_PORT": str(user.port)}
        machine.add(compose("server.yml", env={**superlink, **machine.owner}))
        machine.up()
        user.fedpcd("register", str(user.federation), "--address", f"127.0.0.1:{user.port}")
        for number, site in enumerate(("site-a", "site-b")):
            data = machine.folder / "data" / site
            write_images(data, seed=number)
            place = {"CLIENT_ID": site, "SITE_DIR": user.federation / "sites" / site, "DATA_ROOT": data}
            server = {"SUPERLINK": f"fl.example.org:{user.port}"}
            machine.add(compose("site.yml", env={**place, **server, **machine.owner}))
        machine.up()

        assert_executors_need_the_secret(machine, user)
        images = "dataset='image-folder' image-classes='dark,light' image-size=8 image-channels=1 model='mlp'"
        ended = user.run(f"{images} num-server-rounds=1 fraction-train=1.0 run-name='own'")

        assert ended.startswith("finished:completed"), ended + machine.logs()
        assert (machine.volume("fedpcd-server/results") / "own/fedpcd/summary.json").is_file()
        assert_ends(machine)


def write_images(folder: Path, seed: int) -> None:
    """A site's data: two classes of small grey images, 8 to train with and 4 to test with in each."""
    generator = np.random.default_rng(seed)
    for split, count in (("train", 8), ("test", 4)):
        for label, brightness in (("dark", 60), ("light", 190)):
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(brightness - 50, brightness + 50, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{number}.png")


def assert_executors_need_the_secret(machine: Containers, user: User) -> None:
    """Whoever reaches the SuperLink's port is still offered no ServerApp to run."""
    authority = user.federation / "user" / "ca.crt"
    command = [
        "flower-superexec",
        "--runtime-api-address",
        f"localhost:{user.port}",
        "--root-certificates",
        str(authority),
    ]
    subprocess.run(command, env=user.env, capture_output=True, timeout=120, check=False)  # it ends, with 0 though
    assert "SuperExec authentication failed" in machine.log("fedpcd-server/superlink")


def assert_ends(machine: Containers) -> None:
    """SIGTERM ends every service in Docker's time, its health check sees that, and nothing is left."""
    services = [name for name in machine.running if not name.endswith("/secret")]
    assert all(machine.healthy(name) for name in services)
    for name in reversed(services):
        # uvicorn, in SuperLink, ends in order and then by the signal itself.
        assert machine.stop(name) in (0, -signal.SIGTERM), machine.log(name)
        assert not machine.healthy(name), name
    machine.running.clear()
    assert machine.leftovers() == []
