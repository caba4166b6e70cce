"""The same app on real Flower processes: a SuperLink and SuperNodes that are one client each."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.superlink import LocalSuperLink
from client_app.app import app as client_app
from server_app.experiment import run_experiment
from strategies.inprocess import InProcessGrid
from tests.end_to_end.test_engines_agree import DECLARED, ROOT, model_of
from tests.support import assert_same_bits

pytestmark = pytest.mark.slow

CLIENTS = {"site-a": 3, "site-b": 17}
"""Names of the sites, and which part of the data each holds."""
SETTINGS = {"num-server-rounds": 1, "fraction-train": 1.0, "tau": 0.1}


class Federation(LocalSuperLink):
    """A SuperLink without simulation, whose SuperNodes are processes of their own; everything ends with it."""

    def __init__(self, app_folder: Path) -> None:
        super().__init__(app_folder)
        self.nodes: list[subprocess.Popen[bytes]] = []

    def _command(self) -> list[str]:
        return [word for word in super()._command() if word != "--simulation"]

    def start_node(self, client_id: str, partition: int, port: int) -> None:
        """Start the SuperNode of one client; it ends with the SuperLink."""
        command = [os.path.join(sysconfig.get_path("scripts"), "flower-supernode"), "--insecure"]  # noqa: PTH118
        command += ["--superlink", f"127.0.0.1:{self.port}", "--port", str(port)]
        command += ["--node-config", f"client-id='{client_id}' partition-id={partition}"]
        with (self.folder / f"supernode-{client_id}.log").open("wb") as log:
            node = subprocess.Popen(command, env=self._env, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)
        self.nodes.append(node)

    def close(self) -> None:
        """End the SuperNodes too."""
        super().close()
        for node in self.nodes:
            node.wait()


@pytest.fixture
def federation() -> Iterator[Federation]:
    with Federation(ROOT) as superlink:
        for offset, (client_id, partition) in enumerate(CLIENTS.items()):
            superlink.start_node(client_id, partition, superlink.port + 1 + offset)
        yield superlink


def in_process(folder: Path) -> dict[str, Any]:
    config = {**DECLARED, **SETTINGS, "results-dir": str(folder), "run-name": "in-process"}
    nodes = [{"client-id": client_id, "partition-id": partition} for client_id, partition in CLIENTS.items()]
    run_experiment(InProcessGrid(client_app, run_config=config, node_configs=nodes), config)
    return model_of(folder / "in-process" / "fedpcd")


@pytest.mark.timeout(600)
def test_supernodes_that_are_one_client_each_give_the_bits_of_the_in_process_grid(
    federation: Federation, tmp_path: Path
) -> None:
    run_id = federation.submit({**SETTINGS, "results-dir": str(tmp_path), "run-name": "deployed"})
    deadline = time.monotonic() + 500
    while not (status := federation.outcome(run_id)[0]).startswith("finished"):
        assert time.monotonic() < deadline, (federation.folder / "superlink.log").read_text()[-3000:]
        time.sleep(1)
    assert status == "finished:completed", federation.outcome(run_id)
    assert_same_bits(model_of(tmp_path / "deployed" / "fedpcd"), in_process(tmp_path))
