"""Part 1 of the deployment guide, typed as it stands, on ports that are free here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cli.reaper import marked_processes
from cli.superlink import free_port
from tests.docker.containers import ROOT, SCRIPTS

GUIDE = (ROOT / "docs" / "deployment.md").read_text()
STAYS = "# stays running\n"


def blocks(section: str) -> list[str]:
    """The commands of a section, block by block."""
    text = GUIDE.partition(f"\n## {section}")[2].partition("\n## ")[0]
    return re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


class Terminals:
    """Shells of a user with a home of their own; a terminal closes with what runs in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {"HOME": str(home), "PATH": f"{SCRIPTS}:/usr/bin:/bin", "TMPDIR": str(home), "TERM": "dumb"}
        self.env |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        self.env |= {key: value for key, value in os.environ.items() if key.startswith("OPENBLAS_")}
        self.open: list[subprocess.Popen[bytes]] = []

    def type(self, commands: str) -> str:
        """Run commands one after the other and return what they print."""
        done = subprocess.run(
            ["bash", "-euc", commands], cwd=ROOT, env=self.env, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout

    def leave_running(self, commands: str, until: str) -> None:
        """Run commands in a terminal of their own, and wait until it shows a text."""
        log = self.home / f"terminal-{len(self.open)}.log"
        with log.open("wb") as sink:
            shell = subprocess.Popen(
                ["bash", "-euc", commands],
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.open.append(shell)
        deadline = time.monotonic() + 90
        while until not in log.read_text(errors="replace"):
            assert shell.poll() is None, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)

    def interrupt(self) -> None:
        """Press Ctrl-C in every terminal, the last one first."""
        for shell in reversed(self.open):
            os.killpg(shell.pid, signal.SIGINT)
        for shell in self.open:
            shell.wait(30)

    def close(self) -> None:
        """Kill everything that is left."""
        for shell in self.open:
            shell.kill()
            shell.wait()
        for pid in marked_processes(str(self.home)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-3000:]}" for file in self.home.glob("*.log"))


@pytest.fixture
def terminals() -> Iterator[Terminals]:
    home = Path(tempfile.mkdtemp(prefix="fedpcd-guide-", dir="/tmp"))
    terminals = Terminals(home)
    try:
        yield terminals
    finally:
        terminals.close()
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_walk_on_one_machine_works_as_written(terminals: Terminals) -> None:
    install, *walk = blocks("1. ")
    assert "pip install" in install
    ports = {port: str(free_port()) for port in ("8000", "9094", "9095")}
    shown = ""
    for block in walk:
        commands = block.replace("--host localhost --site", "--host localhost --port 8000 --site")
        for port, free in ports.items():
            commands = re.sub(rf"(?<=[ :]){port}\b", free, commands)
        if block.startswith(STAYS):
            terminals.leave_running(
                commands, "SuperNode ID" if "flower-supernode" in block else "Application startup complete"
            )
        else:
            shown += terminals.type(commands)

    assert "finished:completed" in shown, shown
    results = terminals.home / "fedpcd-results" / "first" / "fedpcd"
    assert len((results / "rounds.jsonl").read_text().splitlines()) >= 2
    assert json.loads((results / "summary.json").read_text())
    terminals.interrupt()
    assert marked_processes(str(terminals.home)) == []


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", GUIDE)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_commands_and_files_in_the_guide_exist() -> None:
    help_text = {
        program: subprocess.run([SCRIPTS / program, "--help"], capture_output=True, text=True, check=True).stdout
        for program in ("flower-superlink", "flower-supernode")
    }
    for block in blocks("1. ") + blocks("3. "):
        for command in re.split(r"(?<!\\)\n", block):
            for program in help_text:
                if program in command:
                    unknown = [
                        option for option in re.findall(r"(?<= )--[\w-]+", command) if option not in help_text[program]
                    ]
                    assert unknown == [], command
    for file in set(re.findall(r"\b[\w.]+\.(?:yml|env\.example)\b", GUIDE)):
        assert (ROOT / "docker" / file).exists(), file
