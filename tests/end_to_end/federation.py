"""A federation of real Flower processes on this machine, whose members can be killed and started again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cli.reaper import marked_processes
from cli.superlink import LocalSuperLink, free_port
from client_app.app import app as client_app
from server_app.experiment import run_experiment
from strategies.inprocess import InProcessGrid
from tests.end_to_end.test_engines_agree import DECLARED, ROOT, model_of

CLIENT_APP, SERVER_APP = "flwr-clientapp", "flwr-serverapp"
"""Flower's programs that run the two halves of the app, one process per message and per run."""


class Federation(LocalSuperLink):
    """A SuperLink with a database, and one SuperNode per site; everything ends with the context.

    Parameters
    ----------
    sites : mapping of str to int
        Client id of each site, and which part of the data it holds.
    secure : bool, default True
        TLS and SuperNode authentication, from a folder that ``fedpcd federation`` makes; else plain HTTP.
    """

    def __init__(self, sites: Mapping[str, int], *, secure: bool = True) -> None:
        super().__init__(ROOT)
        self.sites = dict(sites)
        self.secure = secure
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}

    def __enter__(self) -> Federation:
        """Start everything and wait until all SuperNodes are online."""
        super().__enter__()
        try:
            if self.secure:
                self.fedpcd("register", str(self.keys))
            for client_id in self.sites:
                self.start_node(client_id)
            self.until(lambda: all(map(self.node_ids, self.sites)), "the SuperNodes are online")
        except BaseException:
            self.close()
            raise
        return self

    @property
    def keys(self) -> Path:
        """The folder of certificates and keys."""
        return self.folder / "federation"

    def fedpcd(self, *arguments: str) -> str:
        """Run ``fedpcd federation ...`` as a user does."""
        command = [sys.executable, "-m", "cli.main", "federation", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self._env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # -- processes

    def start_node(self, client_id: str, *, site: str = "", options: tuple[str, ...] | None = None) -> None:
        """Start the SuperNode of a client; another site's key or other options make it an intruder."""
        place = self.keys / "sites" / (site or client_id)
        secure = ("--root-certificates", "ca.crt", "--auth-supernode-private-key", "node.key")
        chosen = options if options is not None else secure if self.secure else ("--insecure",)
        port = self._ports.setdefault(client_id, free_port())
        command = [self._tool("flower-supernode"), *chosen, "--superlink", f"127.0.0.1:{self.port}"]
        command += ["--port", str(port), "--node-config", self.node_config(client_id)]
        with self.log(client_id).open("ab") as sink:
            self.nodes[client_id] = subprocess.Popen(
                command,
                env={**self._env, "FLWR_HOME": str(self._home(client_id)), **self.node_environment(client_id)},
                cwd=place if self.secure else self.folder,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def node_config(self, client_id: str) -> str:
        """Node config of a client's SuperNode."""
        return f"client-id='{client_id}' partition-id={self.sites.get(client_id, 0)}"

    def node_environment(self, client_id: str) -> Mapping[str, str]:
        """More variables of a site's processes."""
        return {}

    def kill_node(self, client_id: str) -> None:
        """Kill a SuperNode and what it started, as a power failure does."""
        self._kill(self.nodes[client_id], marked_processes(str(self._home(client_id))))

    def return_node(self, client_id: str, seconds: float = 150) -> None:
        """Start a killed SuperNode until the SuperLink takes it, as a restart policy does.

        As long as the SuperLink has not noticed that the node was gone, it refuses its return.
        """
        before = len(self.node_ids(client_id))

        def accepted() -> bool:
            if self.nodes[client_id].poll() is not None:
                self.start_node(client_id)
            return len(self.node_ids(client_id)) > before

        self.until(accepted, f"{client_id} is back", seconds, pause=3)

    def kill_superlink(self) -> None:
        """Kill the SuperLink; its SuperExec then ends by itself, and the ServerApp with it, within ten seconds."""
        assert self._process is not None
        self._kill(self._process, [])

    def restart_superlink(self) -> None:
        """Start the SuperLink again at the same address, on the same database."""
        self._launch()

    def client_app(self, client_id: str, since: float) -> int | None:
        """Id of the process, started after a time, that computes a client's reply; earlier ones may still be ending."""
        return _running(CLIENT_APP, str(self._home(client_id)), since)

    def server_app(self) -> int | None:
        """Id of the process that runs the ServerApp now."""
        return _running(SERVER_APP, self.mark)

    def log(self, client_id: str) -> Path:
        """Output of a client's SuperNode."""
        return self.folder / f"supernode-{client_id}.log"

    def node_ids(self, client_id: str) -> list[str]:
        """Node ids that a client's SuperNode was given, one for each time that it connected."""
        return re.findall(r"SuperNode ID: (\d+)", self.log(client_id).read_text(errors="replace"))

    # -- what the SuperLink says; each question is a command that takes a second of computing

    def online(self) -> list[str]:
        """Ids of the SuperNodes that are online."""
        return [
            node["node-id"] for node in self._ask("supernode", "ls", "fedpcd")["nodes"] if node["status"] == "online"
        ]

    def finish(self, run_id: int, seconds: float = 900) -> str:
        """Wait for the end of a run and return its status."""
        self.until(lambda: self.outcome(run_id)[0].startswith("finished"), "the run ends", seconds, pause=4)
        return self.outcome(run_id)[0]

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 600, pause: float = 0.5) -> float:
        """Wait until something is the case; returns how long that took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}\n{self._logs()}"
            time.sleep(pause)
        return time.monotonic() - began

    def _logs(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-2500:]}" for file in files)

    # -- how this SuperLink differs from that of a simulation

    def _command(self) -> list[str]:
        command = [word for word in super()._command() if word != "--simulation"]
        command += ["--database", str(self.folder / "state.db")]
        if self.secure:
            place = self.keys / "superlink"
            command.remove("--insecure")
            command += ["--enable-supernode-auth", "--ssl-ca-certfile", str(place / "ca.crt")]
            command += ["--ssl-certfile", str(place / "server.pem"), "--ssl-keyfile", str(place / "server.key")]
        return command

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}

    def _configure_flower(self) -> None:
        if not self.secure:
            super()._configure_flower()
            return
        sites = [word for client_id in self.sites for word in ("--site", client_id)]
        self.fedpcd("init", str(self.keys), "--host", "127.0.0.1", "--port", str(self.port), *sites)
        self.fedpcd("connect", str(self.keys / "user"))

    def _connect(self) -> http.client.HTTPConnection:
        if not self.secure:
            return super()._connect()
        context = ssl.create_default_context(cafile=self.keys / "user" / "ca.crt")
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=1.0, context=context)

    def _home(self, client_id: str) -> Path:
        return self.folder / "homes" / client_id

    def _kill(self, process: subprocess.Popen[bytes], others: list[int]) -> None:
        process.kill()
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End the SuperNodes too."""
        super().close()
        for node in self.nodes.values():
            node.wait()


def _running(program: str, mark: str, since: float = 0.0) -> int | None:
    """Id of a program's process with a mark in its environment, started after a time."""
    for pid in marked_processes(mark):
        with contextlib.suppress(OSError):
            if program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and _started(pid) > since:
                return pid
    return None


def _started(pid: int) -> float:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def has_loaded(pid: int, library: str) -> bool:
    """Whether a process has mapped a library, or has ended."""
    try:
        return library in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return True


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a ``.jsonl`` file that may be growing or missing."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def in_process(folder: Path, sites: Mapping[str, int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The model of an uninterrupted run with the same clients in this process."""
    config = {**DECLARED, **settings, "results-dir": str(folder), "run-name": "in-process"}
    nodes = [{"client-id": client_id, "partition-id": partition} for client_id, partition in sites.items()]
    run_experiment(InProcessGrid(client_app, run_config=config, node_configs=nodes), config)
    return model_of(folder / "in-process" / "fedpcd")
