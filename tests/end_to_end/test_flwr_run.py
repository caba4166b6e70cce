"""Flower's own command and ours, with real SuperLinks, Ray and nothing but an empty home folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from cli.reaper import marked_processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = "num-server-rounds=3 num-clients=20 fraction-train=0.2 alpha=1.0"
OTHER_PROJECT = {
    "pyproject.toml": """
        [project]
        name = "other"
        version = "1.0.0"
        description = "Another project with the same package names"
        license = "Apache-2.0"
        dependencies = ["flwr>=1.42"]
        [tool.uv]
        exclude-dependencies = ["flwr"]
        [tool.flwr.app]
        publisher = "other"
        [tool.flwr.app.components]
        serverapp = "server_app.app:app"
        clientapp = "client_app.app:app"
        """,
    "client_app/__init__.py": "",
    "client_app/app.py": """
        from flwr.app import Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        app = ClientApp()
        @app.query()
        def query(message, context):
            return Message(RecordDict({"other": MetricRecord({"one": 1})}), reply_to=message)
        """,
    "server_app/__init__.py": "",
    "server_app/app.py": """
        import time
        from flwr.app import Message, MessageType, RecordDict
        from flwr.serverapp import ServerApp
        app = ServerApp()
        @app.main()
        def main(grid, context):
            while not (nodes := list(grid.get_node_ids())):
                time.sleep(0.2)
            replies = grid.send_and_receive([Message(RecordDict(), node, MessageType.QUERY) for node in nodes])
            assert all(reply.content["other"]["one"] == 1 for reply in replies)
        """,
    "strategies/__init__.py": "",
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def user(tmp_path):
    """Environment of a new user: an empty home folder, no network for packages; whatever starts is ended."""
    mark = uuid.uuid4().hex
    short = tempfile.mkdtemp(dir="/tmp")  # Ray's sockets need a short path
    home = tmp_path / "home"
    home.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR_", "UV_", "PYTHON"))}
    env |= {
        **dict.fromkeys(("FEDPCD_TEST", "A_FEDPCD_TEST", "Z_FEDPCD_TEST"), mark),  # see marked_processes
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), env["PATH"]]),
        "HOME": str(home),
        "RAY_TMPDIR": short,
        "UV_OFFLINE": "1",
        "UV_CACHE_DIR": str(tmp_path / "uv-cache"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": free_port(),
        "FLWR_LOCAL_CONTROL_API_PORT": free_port(),
    }
    yield env
    for pid in marked_processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for _ in range(100):
        if not marked_processes(mark):
            break
        time.sleep(0.1)
    shutil.rmtree(short, ignore_errors=True)
    assert marked_processes(mark) == []


def left_running(user):
    """Command lines of the processes that came from this test."""
    found = []
    for pid in marked_processes(user["FEDPCD_TEST"]):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found.append(f"{pid} (parent {status[1]}, {status[0]}): {words[:300]}")
    return found


def folders_of(user):
    """Temporary folders of the ``fedpcd run`` that this test started; other runs on the machine have theirs."""
    found = set()
    for pid in marked_processes(user["FEDPCD_TEST"]):
        with contextlib.suppress(OSError):
            found |= set(re.findall(rb"/tmp/fedpcd-\w+", Path(f"/proc/{pid}/environ").read_bytes()))
    return {Path(folder.decode()) for folder in found}


def call(*command, cwd, env):
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=300
    )


def flwr_json(*arguments, cwd, env):
    done = call("flwr", *arguments, "--format", "json", cwd=cwd, env=env)
    assert "{" in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


def flwr_run(*arguments, cwd, env):
    """Type ``flwr run .`` in a folder and wait for the end; returns the status and the log."""
    answer = flwr_json("run", ".", *arguments, cwd=cwd, env=env)
    assert answer["success"], answer
    log = call("flwr", "log", answer["run-id"], "--stream", cwd=cwd, env=env).stdout
    for _ in range(100):
        [run] = flwr_json("ls", "--run-id", answer["run-id"], cwd=cwd, env=env)["runs"]
        if run["status"].startswith("finished"):
            break
        time.sleep(0.2)
    return run["status"], log


@pytest.mark.timeout(600)
def test_flwr_run_works_offline_twice_in_a_row_after_another_project_started_the_superlink(user, tmp_path):
    other = tmp_path / "other"
    for name, content in OTHER_PROJECT.items():
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text(textwrap.dedent(content))
    before = (ROOT / "pyproject.toml").read_bytes()

    status, log = flwr_run(cwd=other, env=user)
    assert status == "finished:completed", log
    models = []
    for name in ("first", "second"):
        config = f"{SMALL} tau=0.02 results-dir='{tmp_path}' run-name='{name}'"
        status, log = flwr_run("--run-config", config, cwd=ROOT, env=user)
        assert status == "finished:completed", log
        summary = json.loads((tmp_path / name / "fedpcd" / "summary.json").read_text())
        assert summary["status"] == "completed"
        assert summary["rounds"] == 3
        models += [file.read_bytes() for file in (tmp_path / name / "fedpcd").glob("*.safetensors")]
    assert len(models) == 2
    assert models[0] == models[1]  # one seed, one model, whatever Flower's node ids were
    assert (ROOT / "pyproject.toml").read_bytes() == before


def fedpcd(*arguments, cwd, env):
    env = env | {"PYTHONPATH": str(ROOT)}
    return call(sys.executable, "-m", "cli.main", *arguments, cwd=cwd, env=env)


@pytest.mark.timeout(300)
def test_fedpcd_run_completes_reports_and_leaves_nothing_running(user, tmp_path):
    done = fedpcd("run", ROOT, "-c", SMALL, "--compare-with", "fedavg", cwd=tmp_path, env=user)
    assert done.returncode == 0, done.stdout + done.stderr
    [picture] = (tmp_path / "results").glob("*/comparison.png")
    assert str(picture) in done.stdout
    assert "FedAvg" in done.stdout
    assert done.stdout.splitlines()[-2:] == [f"picture  {picture}", f"results  {picture.parent}"]
    assert all(
        noise not in done.stdout for noise in ("\x1b", "Successfully installed", "SuperNodes changed", "(empty!)")
    )
    assert left_running(user) == []
    assert not (Path(user["HOME"]) / ".flwr").exists()


@pytest.mark.timeout(300)
def test_fedpcd_run_fails_when_the_run_fails_and_says_why(user, tmp_path):
    (tmp_path / "file").touch()
    done = fedpcd("run", ROOT, "--results-dir", "file", cwd=tmp_path, env=user)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("fedpcd: the run failed: results-dir=")
    assert left_running(user) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_fedpcd_run_leaves_nothing_behind_when_it_is_ended(user, tmp_path, number):
    command = [sys.executable, "-m", "cli.main", "run", str(ROOT), "-c", "num-server-rounds=1000"]
    env = user | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that a shell started in the background ignore Ctrl-C, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert any(line.startswith("round    1/1000") for line in process.stdout)
        mine = folders_of(user)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    codes = {signal.SIGHUP: 128 + signal.SIGHUP, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}
    assert process.returncode == codes[number]
    assert ("results so far: " in errors) == (number == signal.SIGINT)
    deadline = time.monotonic() + (60 if number == signal.SIGKILL else 0)  # what survives the command cleans up then
    while (left := left_running(user)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []
    assert mine
    assert not any(folder.exists() for folder in mine)
