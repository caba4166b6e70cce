"""A Flower SuperLink of our own: its own port and folders, gone without a trace when the run is over."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .app_folder import INSTALL, Value
from .errors import RunError, UsageError
from .interruption import uninterrupted
from .reaper import end_marked, watch
from .run_config import to_toml
from .simulation_log import readable

CONNECTION = "fedpcd"
"""Name of the connection in the private Flower configuration."""


class LocalSuperLink:
    """Context manager around one ``flower-superlink`` in simulation mode.

    Flower's shared local SuperLink outlives every command and keeps the folder, the environment and the
    Python of whoever started it first. This one belongs to a single command: it runs in the app's folder, so
    that Ray workers find this app's code, and on leaving the context it goes, with all processes that came
    from it, Ray's included; also if the command is killed.

    Parameters
    ----------
    app_folder : Path
        The app; working directory of the SuperLink.
    startup_timeout : float, default 60.0
        Seconds to wait until the SuperLink answers.
    """

    def __init__(self, app_folder: Path, *, startup_timeout: float = 60.0) -> None:
        self.app_folder = app_folder
        self.startup_timeout = startup_timeout
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalSuperLink:
        # Under /tmp whatever TMPDIR says: Ray's socket paths must stay below 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="fedpcd-", dir="/tmp"))
        self.mark = str(self.folder)
        self._reaper = watch(self.folder)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, run_config: Mapping[str, Value], federation: str = "") -> int:
        """Start a run of the app and return its run id.

        Parameters
        ----------
        run_config : mapping
            Changed run-config keys.
        federation : str
            Flower's ``--federation-config``: the size of a simulation.

        Raises
        ------
        RunError
            If Flower refuses the run.
        """
        file = self.folder / "run-config.toml"
        file.write_text(to_toml(run_config), encoding="utf-8")
        command = ["run", str(self.app_folder), CONNECTION]
        if federation:
            command += ["--federation-config", federation]
        answer = self._ask(*command, *(["--run-config", str(file)] if run_config else []))
        return int(answer["run-id"])

    def stream(self, run_id: int) -> None:
        """Print the run's log as it grows, without noise; returns when the run has ended.

        Raises
        ------
        RunError
            If the log breaks off.
        """
        command = [self._tool("flwr"), "log", str(run_id), CONNECTION, "--stream"]
        with subprocess.Popen(
            command,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is this command's to handle
        ) as process:
            assert process.stdout is not None
            try:
                for line in readable(process.stdout, coloured=sys.stdout.isatty()):
                    print(line, end="", flush=True)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise RunError(f"`flwr log` broke off with exit code {process.returncode}")

    def outcome(self, run_id: int) -> tuple[str, str]:
        """Status of the run, e.g. ``finished:completed``, and Flower's words about it."""
        run = self._ask("ls", CONNECTION, "--run-id", str(run_id))["runs"][0]
        return str(run["status"]), str(run.get("status-details") or "")

    def _start(self) -> None:
        self.port = free_port()
        self._env = self._environment()
        self._configure_flower()
        self._launch()

    def _launch(self) -> None:
        log = self.folder / "superlink.log"
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                self._command(),
                cwd=self.app_folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this command only, which then ends the rest in order
            )
        deadline = time.monotonic() + self.startup_timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RunError(f"the local SuperLink did not start:\n{tail}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        connection = self._connect()
        try:
            connection.request("GET", "/health")
            return 200 <= connection.getresponse().status < 300
        except OSError:
            return False
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)

    def _command(self) -> list[str]:
        command = [self._tool("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
        return [*command, "--host", "127.0.0.1", "--port", str(self.port)]

    def _environment(self) -> dict[str, str]:
        env = dict(os.environ)
        # The SuperLink starts its helpers by name: this environment's scripts come first, activated or not.
        env["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), env.get("PATH", "")])
        # The folder's name, in several variables, also tells every descendant of the SuperLink.
        env["FLWR_HOME"] = str(self.folder / "flwr")
        env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
        env["FLWR_DISABLE_UPDATE_CHECK"] = "1"
        env["FLWR_TELEMETRY_ENABLED"] = "0"
        env.pop("RAY_ADDRESS", None)  # the simulation is on a Ray of its own
        env["TMPDIR"] = env["RAY_TMPDIR"] = str(self.folder)  # whatever a killed process leaves goes with it
        env["RAY_USAGE_STATS_ENABLED"] = "0"
        env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # workers see the GPU, if `device` wants it
        env["PYTHONUNBUFFERED"] = "1"  # progress arrives line by line, also through a pipe
        direct = [*filter(None, [env.get("NO_PROXY")]), "127.0.0.1", "localhost"]
        env["NO_PROXY"] = env["no_proxy"] = ",".join(direct)
        return env

    def _configure_flower(self) -> None:
        home = self.folder / "flwr"
        home.mkdir()
        text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        text += f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (home / "config.toml").write_text(text, encoding="utf-8")

    def _tool(self, name: str) -> str:
        found = shutil.which(name, path=self._env["PATH"])
        if found is None:
            raise UsageError(f"the command {name} is not installed: {INSTALL}")
        return found

    def _ask(self, *arguments: str) -> dict[str, Any]:
        return ask_flower(self._tool("flwr"), *arguments, env=self._env)

    def close(self) -> None:
        """End the SuperLink and everything that came from it; remove its folder. A second Ctrl-C does not stop it."""
        with uninterrupted():
            self._close()

    def _close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=3.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            end_marked(self.mark)  # Flower and Ray detach their helpers, so the group does not hold them all
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._reaper.communicate()


def ask_flower(flwr: str, *arguments: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Run a ``flwr`` command and return its JSON answer (its exit code is 0 even if it failed).

    Raises
    ------
    RunError
        With Flower's words, if the command failed.
    """
    command = [flwr, *arguments, "--format", "json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        raise RunError(f"flwr {arguments[0]} answered:\n{done.stdout}{done.stderr}") from None
    if not answer.get("success", False):
        raise RunError(str(answer.get("error-message") or answer.get("error") or answer))
    return answer


def free_port() -> int:
    """Find a TCP port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
