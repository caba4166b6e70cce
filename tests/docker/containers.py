"""The containers of docker/, as the compose files and the Dockerfile describe them, run as plain processes.

No Docker engine is needed. Each container gets a folder in place of its file system, in which links stand for its
mounts; paths, ports and names of hosts in its command are replaced. The process sees the image's environment alone and
none of the packages that the image lacks. Where Linux lets it, it also gets what the compose files ask for: a user
without a name, no capability, and a file system of which it can write its volumes and /tmp alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distribution, packages_distributions
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cli.reaper import marked_processes
from cli.superlink import free_port

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
SCRIPTS = Path(sysconfig.get_path("scripts"))
GRACE = 10.0
"""Seconds that Docker waits after SIGTERM."""
MOUNTS = """
for place in $1; do mount --bind "$place" "$place" || exit; done
mount -o remount,bind,ro / || exit
shift; exec "$@"
"""


@dataclass
class Image:
    """What a stage of the Dockerfile says about the processes of its containers."""

    environment: dict[str, str] = field(default_factory=dict)
    working_dir: str = "/"
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    requirements: list[str] = field(default_factory=list)


@cache
def images(torch: str = "cpu") -> dict[str, Image]:
    """Read the stages of the Dockerfile, each with what it inherits; only the forms that this Dockerfile uses."""
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, Image] = {}
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            old = stages.get(base, Image())
            new = Image(dict(old.environment), old.working_dir, old.user, requirements=list(old.requirements))
            stages[name] = new
        elif word == "ENV":
            new.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "WORKDIR":
            new.working_dir = rest.strip()
        elif word == "USER":
            new.user = rest.strip()
        elif word == "ENTRYPOINT":
            new.entrypoint = json.loads(rest)
        elif word == "HEALTHCHECK":
            new.health = json.loads(rest.partition("CMD ")[2])
        elif word == "COPY":
            sources = rest.replace("${TORCH}", torch).split()[:-1]
            new.requirements += [
                file for file in sources if file.startswith("requirements/") and "constraints" not in file
            ]
    return stages


def compose(*files: str, env: Mapping[str, str | Path]) -> dict[str, Any]:
    """Return the project that Compose makes of the files, with these variables and no others."""
    command = [str(SCRIPTS / "docker-compose"), "--env-file", os.devnull]
    command += [word for file in files for word in ("-f", str(DOCKER / file))]
    done = subprocess.run(
        [*command, "config", "--format", "json"],
        env={"PATH": os.environ["PATH"], "HOME": os.devnull, **{key: str(value) for key, value in env.items()}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr, done.stderr
    project: dict[str, Any] = json.loads(done.stdout.replace("$$", "$"))
    return project


class Containers:
    """Context manager for processes in place of containers; all end with it.

    A service is called ``<project>/<service>``.

    Parameters
    ----------
    folder : Path
        For volumes, file systems and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.can_confine = _can_confine()
        self.services: dict[str, dict[str, Any]] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[tuple[str, int], int] = {}

    @property
    def owner(self) -> dict[str, str]:
        """Variables of the compose files that say whose the key files are."""
        return {"FEDPCD_UID": "54321", "FEDPCD_GID": "54321"}

    def add(self, project: Mapping[str, Any]) -> None:
        """Make the services of a project known."""
        for short, service in project["services"].items():
            name = f"{project['name']}/{short}"
            assert service["user"] == "54321:54321", service["user"]
            self.services[name] = {**service, "image-stage": images()[service["build"]["target"]]}
            for port in service.get("ports", []):
                self._ports[name, port["target"]] = int(port["published"])
            self._make_file_system(name)

    def up(self, *names: str) -> None:
        """Start services, or all, after those that they depend on; wait until each is well."""
        for name in names or tuple(self.services):
            if name not in self.running:
                for other in self.services[name].get("depends_on") or {}:
                    self.up(f"{_project(name)}/{other}")
                self._start(name)

    def healthy(self, name: str) -> bool:
        """Run a service's health check."""
        check = self._command(name, self.services[name]["image-stage"].health)
        return subprocess.run(check, **self._process(name), capture_output=True, check=False).returncode == 0

    def stop(self, name: str) -> int:
        """End a service as Docker does, and return its exit code."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"{name} outlived SIGTERM by {GRACE} s:\n{self.log(name)}") from None

    def log(self, name: str) -> str:
        """What a service has printed."""
        return self._log(name).read_text(errors="replace")

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in self.services if self._log(name).exists())

    def volume(self, name: str) -> Path:
        """Where a volume, ``<project>/<volume>``, is."""
        return self.folder / "volumes" / name

    def leftovers(self) -> list[int]:
        """Processes that outlived the services that they came from."""
        main = {process.pid for process in self.running.values()}
        return [pid for pid in marked_processes(str(self.folder / "containers")) if pid not in main]

    def __enter__(self) -> Containers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        for pid in self.leftovers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self, name: str) -> None:
        service = self.services[name]
        words = (service["entrypoint"] or service["image-stage"].entrypoint) + service["command"]
        with self._log(name).open("wb") as sink:
            process = subprocess.Popen(
                self._command(name, words),
                **self._process(name),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        self.running[name] = process
        if (service.get("healthcheck") or {}).get("disable"):  # a service that does one thing and ends
            assert process.wait(GRACE) == 0, self.log(name)
            return
        deadline = time.monotonic() + 120
        while not self.healthy(name):
            assert process.poll() is None, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)

    def _process(self, name: str) -> dict[str, Any]:
        """Environment, working directory and user of a service's processes."""
        image = self.services[name]["image-stage"]
        environment = {**image.environment, **self.services[name].get("environment", {}), "TMPDIR": "/tmp"}
        environment = {key: self._local_paths(name, value) for key, value in environment.items()} | {
            "PATH": f"{SCRIPTS}:/usr/bin:/bin",
            "PYTHONPATH": str(Path(__file__).parent / "image"),
            "FEDPCD_NOT_IN_IMAGE": ",".join(modules_outside(tuple(image.requirements))),
            # This machine's own, where it has an OpenBLAS that needs them.
            **{key: value for key, value in os.environ.items() if key.startswith("OPENBLAS_")},
        }
        return {"env": environment, "cwd": self._file_system(name) / image.working_dir[1:]}

    def _command(self, name: str, words: Sequence[str]) -> list[str]:
        """Turn a command of the container into one of this machine."""
        program = {"healthcheck": [sys.executable, str(DOCKER / "healthcheck.py")], "sh": ["/bin/sh"]}
        command = program.get(words[0], [str(SCRIPTS / words[0])])
        command += [self._local_word(name, before, word) for before, word in pairwise(words)]
        return confined(command, self._writable(name)) if self.can_confine else command

    def _local_word(self, name: str, before: str, word: str) -> str:
        if before == "--port":
            return str(self._port(name, int(word)))
        if word == "0.0.0.0":  # nobody else's services
            return "127.0.0.1"
        if before == "--node-config":  # its paths are those of the process that trains
            return self._local_paths(self._executor_of(name), word)
        address = re.fullmatch(r"((?:https?|grpc)://)?([\w.-]+):(\d+)(/\S*)?", word)
        if address is None:
            return self._local_paths(name, word)
        scheme, host, port, path = address.groups(default="")
        other = name if host in ("localhost", "127.0.0.1") else f"{_project(name)}/{host}"
        if other not in self.services:  # another machine
            return f"{scheme}127.0.0.1:{port}{path}"
        networks = [set(self.services[service].get("networks") or {}) for service in (name, other)]
        assert name == other or set.intersection(*networks), f"{name} and {other} share no network"
        return f"{scheme}localhost:{self._port(other, int(port))}{path}"

    def _executor_of(self, supernode: str) -> str:
        project, _, short = supernode.partition("/")
        services = [name for name, service in self.services.items() if service["command"] == [f"{short}:9094"]]
        return next(name for name in services if _project(name) == project)

    def _local_paths(self, name: str, text: str) -> str:
        """Put the service's own file system before absolute paths."""
        places = "|".join(sorted({"tmp", "home", *(path.parts[1] for path in self._targets(name))}))
        return re.sub(rf"(?<![\w.:/-])/(?=(?:{places})\b)", f"{self._file_system(name)}/", text)

    def _make_file_system(self, name: str) -> None:
        """Make a folder with a link for every mount, writable where the container is."""
        root, image = self._file_system(name), self.services[name]["image-stage"]
        for path in ("tmp", image.working_dir[1:]):
            (root / path).mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        for mount in self.services[name].get("volumes", []):
            source = Path(mount["source"])
            if mount["type"] == "volume":
                source = self.volume(f"{_project(name)}/{mount['source']}")
                source.mkdir(parents=True, exist_ok=True)
            link = root / mount["target"][1:]
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)

    def _writable(self, name: str) -> list[Path]:
        mounts = self.services[name].get("volumes", [])
        volumes = [self.volume(f"{_project(name)}/{m['source']}") for m in mounts if not m.get("read_only")]
        return [self._file_system(name) / "tmp", *volumes]

    def _targets(self, name: str) -> list[PurePosixPath]:
        return [PurePosixPath(mount["target"]) for mount in self.services[name].get("volumes", [])]

    def _file_system(self, name: str) -> Path:
        return self.folder / "containers" / name

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / name.replace("/", ".")

    def _port(self, name: str, port: int) -> int:
        return self._ports.setdefault((name, port), free_port())


@contextmanager
def containers() -> Iterator[Containers]:
    """Containers in a new folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="fedpcd-containers-", dir="/tmp"))
    try:
        with Containers(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def modules_outside(requirements: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the installed modules that an image with these requirements would not have."""
    lines = [line for file in requirements for line in (DOCKER / file).read_text().splitlines()]
    wanted = [Requirement(line).name for line in lines if line and line[0] not in "#-"]
    inside: set[str] = set()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name not in inside:
            inside.add(name)
            needs = [Requirement(text) for text in distribution(name).requires or ()]
            wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    bundled = {"pip", "setuptools", "pkg_resources"}
    modules = packages_distributions().items()
    return tuple(
        sorted(
            module
            for module, owners in modules
            if module not in bundled and not inside & {canonicalize_name(owner) for owner in owners}
        )
    )


def _project(name: str) -> str:
    return name.partition("/")[0]


def confined(command: Sequence[str], writable: Sequence[Path]) -> list[str]:
    """The command run by user 54321, who owns what the tests' user owns, and who can write the given places alone."""
    mounts = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTS, "sh", " ".join(map(str, writable))]
    # A second namespace takes the powers away again that the first gave for mounting.
    user = ["setpriv", "--no-new-privs", "unshare", "--user", "--map-user=54321", "--map-group=54321"]
    return [*mounts, *user, *command]


def _can_confine() -> bool:
    with suppress(FileNotFoundError):
        return subprocess.run(confined(["true"], []), capture_output=True, check=False).returncode == 0
    return False
