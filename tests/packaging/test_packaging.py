"""What users install: the wheel, an editable checkout and Flower's bundle."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from server_app.config import ServerConfig

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = ("cli", "client_app", "server_app", "strategies")
APP = ("client_app", "server_app", "strategies")
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_CONFIG_FILE": os.devnull}


def call(*command, cwd, **env):
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_files(*packages):
    files = (file for package in packages for file in (ROOT / package).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix() for file in files}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Copy what the wheel and the bundle are made of, so that nothing is built in the checkout."""
    folder = tmp_path_factory.mktemp("source") / "fedpcd"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    for name in (*SHIPPED, "presets"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out)
    call(sys.executable, "-m", "pip", "wheel", *options, source, cwd=out, **OFFLINE)
    return next(out.glob("fedpcd-*.whl"))


@pytest.fixture
def environment(tmp_path):
    """Make an environment that finds this one's packages after its own."""
    folder = tmp_path / "environment"
    venv.create(folder)
    purelib = sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    # addsitedir and not a plain line: proxsuite is found through a .pth file of its own.
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(purelib) / "zz-host.pth").write_text(line)  # after an editable install's file, so that it wins
    return folder


def install(environment, *what, cwd):
    python = environment / "bin" / "python"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed")
    call(sys.executable, "-m", "pip", "--python", python, "install", *options, *what, cwd=cwd, **OFFLINE)
    return python


LOOK = """
from importlib.util import find_spec
import fedpcd
from fedpcd import FedPCD
from fedpcd.legacy import FedPCD as Legacy
from fedpcd.rules import fedpcd as rule
import fedpcd.cli.main
print(fedpcd.__file__)
print([name for name in ("strategies", "cli", "server_app", "client_app") if find_spec(name)])
print(FedPCD.__module__, Legacy.__module__)
"""


def test_the_wheel_holds_the_library_the_command_and_the_type_marker(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    library = {re.sub("^strategies/", "fedpcd/", name) for name in python_files("strategies")}
    command = {f"fedpcd/{name}" for name in python_files("cli")}
    assert names == library | command | {"fedpcd/py.typed"}
    assert {"fedpcd/__init__.py", "fedpcd/rules/fedpcd.py", "fedpcd/cli/main.py"} <= names


def test_the_wheel_installs_as_fedpcd_and_leaves_no_other_name_behind(wheel, environment, tmp_path):
    python = install(environment, wheel, cwd=tmp_path)
    file, others, modules = call(python, "-c", LOOK, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(environment)
    assert others == "[]"
    assert {module.partition(".")[0] for module in modules.split()} == {"fedpcd"}
    assert "tau=0.02" in call(environment / "bin" / "fedpcd", "methods", cwd=tmp_path, COLUMNS="200")


def test_an_editable_install_imports_the_checkout_as_fedpcd(source, environment, tmp_path):
    python = install(environment, "--editable", source, cwd=tmp_path)
    file, others, _ = call(python, "-c", LOOK, cwd=tmp_path).splitlines()
    assert Path(file) == source / "strategies" / "__init__.py"
    assert others == "[]"


def test_importing_the_library_does_not_import_torch_or_the_app(wheel, environment, tmp_path):
    python = install(environment, wheel, cwd=tmp_path)
    heavy = ("torch", "torchvision", "ray", "matplotlib", "sklearn", "typer.testing")
    code = f"import sys, fedpcd; print([name for name in {heavy} if name in sys.modules])"
    assert call(python, "-c", code, cwd=tmp_path) == "[]\n"


def test_every_package_of_the_library_is_declared():
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "strategies").rglob("__init__.py")}
    assert folders | {"cli"} == set(PYPROJECT["tool"]["setuptools"]["package-dir"].values())
    assert set(PYPROJECT["tool"]["setuptools"]["package-dir"]) == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_the_bundle_holds_the_app_and_nothing_else(source, tmp_path):
    flower = (sys.executable, "-c", "from flwr.cli.app import app; app()")
    call(*flower, "build", "--app", source, cwd=tmp_path, FLWR_DISABLE_UPDATE_CHECK="1", FLWR_HOME=str(tmp_path))
    bundle = next(tmp_path.glob("fedpcd.fedpcd.*.fab"))
    with zipfile.ZipFile(bundle) as archive:
        names = {name for name in archive.namelist() if not name.startswith(".info/")}
    assert names == python_files(*APP) | {"pyproject.toml", "README.md", "LICENSE"}
    assert bundle.stat().st_size < 1_000_000  # Flower takes up to 10 MiB


def test_every_declared_run_config_key_is_known_to_the_app_with_the_same_default():
    declared = PYPROJECT["tool"]["flwr"]["app"]["config"]
    assert set(declared) == set(ServerConfig.keys())
    resolved = ServerConfig.from_run_config(declared).resolved()
    assert resolved == ServerConfig().resolved() == declared
    assert {key: type(value) for key, value in declared.items()} == {
        key: type(value) for key, value in resolved.items()
    }


def test_every_declared_run_config_key_has_a_comment():
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[tool.flwr.app.config]")[2].partition("\n\n")[0]
    lines = [line for line in table.splitlines() if " = " in line]
    assert len(lines) == len(PYPROJECT["tool"]["flwr"]["app"]["config"])
    assert [line for line in lines if "#" not in line] == []


def test_no_federation_is_shipped_since_flower_would_rewrite_the_users_file():
    assert "federations" not in PYPROJECT["tool"]["flwr"]


def requirement_names():
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    requirements = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return {re.split(r"[\[<>=!~; ]", line)[0] for line in requirements}


def test_flowers_runtime_installation_is_told_to_leave_every_requirement_out():
    assert set(PYPROJECT["tool"]["uv"]["exclude-dependencies"]) == requirement_names()


def test_flowers_runtime_installation_needs_no_network(source, tmp_path):
    """The command of Flower's dependency installer, with an empty cache and the network forbidden."""
    project = tmp_path / "project"
    shutil.copytree(source, project)
    options = ("--no-install-project", "--no-install-package", "flwr", "--inexact")
    folders = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_PROJECT_ENVIRONMENT": str(tmp_path / "environment")}
    uv = (sys.executable, "-m", "uv", "sync", "--python", sys.executable)
    call(*uv, *options, cwd=project, UV_OFFLINE="1", HOME=str(tmp_path), **folders)
    installed = {path.name for path in (tmp_path / "environment").glob("lib/python*/site-packages/*.dist-info")}
    assert installed == set()
