"""What can be said of docker/ without starting anything."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docker.containers import DOCKER, ROOT, SCRIPTS, compose, images

OWNER = {"FEDPCD_UID": "1000", "FEDPCD_GID": "1000"}
ONE_MACHINE = {**OWNER, "SUPERLINK_DIR": "/srv/superlink", "SITES_DIR": "/srv/sites"}


def example(name: str) -> dict[str, str]:
    """The variables of a shipped example file."""
    return dict(re.findall(r"^(\w+)=(.*)$", (DOCKER / name).read_text(), flags=re.MULTILINE))


PROJECTS = {
    "one machine": (("compose.yml",), ONE_MACHINE),
    "server": (("server.yml",), example("server.env.example")),
    "site": (("site.yml",), example("site.env.example")),
    "site with a GPU": (("site.yml", "site.gpu.yml"), example("site.env.example")),
}


@pytest.fixture(params=PROJECTS)
def services(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    files, variables = PROJECTS[request.param]
    result: dict[str, dict[str, Any]] = compose(*files, env=variables)["services"]
    return result


def pins(file: str) -> dict[str, Requirement]:
    """The requirements in a file of docker/."""
    lines = [line for line in (DOCKER / file).read_text().splitlines() if line and line[0] not in "#-"]
    return {canonicalize_name(need.name): need for need in map(Requirement, lines)}


def version(pin: Requirement) -> str:
    """The one version that a requirement admits."""
    (only,) = pin.specifier
    assert only.operator == "==", pin
    return only.version


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run([SCRIPTS / "hadolint", DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_every_service_is_confined(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["user"] == "1000:1000", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        assert "cap_add" not in service, name
        assert service["restart"] == ("no" if name == "secret" else "unless-stopped"), name


def test_mounts_from_the_host_are_read_only_and_must_exist(services: dict[str, dict[str, Any]]) -> None:
    binds = [mount for service in services.values() for mount in service["volumes"] if mount["type"] == "bind"]
    assert binds
    for mount in binds:
        assert mount["read_only"] is True, mount
        assert mount["bind"]["create_host_path"] is False, mount


def test_what_runs_the_apps_code_has_no_key_of_the_federation_and_no_way_out(
    services: dict[str, dict[str, Any]],
) -> None:
    apps = {name: service for name, service in services.items() if name.startswith(("server-app", "client-app"))}
    assert apps
    for name, service in apps.items():
        targets = {mount["target"]: mount["source"] for mount in service["volumes"] if mount["type"] == "bind"}
        assert set(targets) <= {"/federation/ca.crt", "/data"}, name
        assert targets.get("/federation/ca.crt", "ca.crt").endswith("ca.crt"), name
        assert len(service["networks"]) == 1, name
        assert "outside" not in service["networks"], name


@pytest.mark.parametrize(("files", "variables"), PROJECTS.values(), ids=PROJECTS)
def test_networks_of_the_apps_code_are_internal(files: tuple[str, ...], variables: dict[str, str]) -> None:
    networks = compose(*files, env=variables)["networks"]
    assert [name for name, network in networks.items() if not network.get("internal")] == ["outside"]


def test_every_connection_that_leaves_a_machine_uses_tls_and_node_keys() -> None:
    superlink = compose("server.yml", env=PROJECTS["server"][1])["services"]["superlink"]["command"]
    supernode = compose("site.yml", env=PROJECTS["site"][1])["services"]["supernode"]["entrypoint"]
    assert {"--enable-supernode-auth", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"} <= set(superlink)
    assert {"--root-certificates", "--auth-supernode-private-key"} <= set(supernode)
    texts = {file.name: file.read_text().count("--insecure") for file in DOCKER.glob("*.yml")}
    assert {name for name, count in texts.items() if count} == {"common.yml"}
    assert texts["common.yml"] == 1  # client-app, to its own SuperNode


def test_one_machine_runs_what_several_run() -> None:
    server, site = (compose(f"{name}.yml", env=PROJECTS[name][1])["services"] for name in ("server", "site"))
    one = compose("compose.yml", env=ONE_MACHINE)["services"]
    words = ("entrypoint", "command", "image", "networks")
    for name, service in server.items():
        assert [one[name].get(word) for word in words] == [service.get(word) for word in words], name
    for name, service in site.items():
        for letter in "ab":
            twin = one[f"{name}-{letter}"]
            assert (twin["entrypoint"], twin["image"]) == (service["entrypoint"], service["image"])


def test_a_missing_variable_is_named() -> None:
    for (file, *_), variables in PROJECTS.values():
        for missing in set(variables) & {
            "FEDPCD_UID",
            "FEDPCD_GID",
            "SUPERLINK_DIR",
            "CLIENT_ID",
            "DATA_ROOT",
            "SITE_DIR",
        }:
            with pytest.raises(AssertionError, match=f"required variable {missing} is missing"):
                compose(file, env={key: value for key, value in variables.items() if key != missing})


def test_a_gpu_is_reserved_with_the_override_alone() -> None:
    variables = {**PROJECTS["site"][1], "GPU": "3"}
    plain = compose("site.yml", env=variables)["services"]["client-app"]
    gpu = compose("site.yml", "site.gpu.yml", env=variables)["services"]["client-app"]
    assert "deploy" not in plain
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["device_ids"], device["capabilities"]) == (["3"], ["gpu"])
    assert (plain["build"]["args"], gpu["build"]["args"]) == ({"TORCH": "cpu"}, {"TORCH": "cuda"})
    assert plain["image"] != gpu["image"]


def test_images_run_as_a_user_by_number_with_a_health_check() -> None:
    for name in ("superlink", "supernode", "app"):
        image = images()[name]
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", image.user), name
        assert image.entrypoint, name
        assert image.health[0] == "healthcheck", name


def test_pins_lie_within_the_ranges_of_the_project_and_nothing_is_forgotten() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["app"]]
    declared = [
        need for need in declared if need.marker is None or need.marker.evaluate({"platform_machine": "x86_64"})
    ]
    pinned = pins("requirements/flower.txt") | pins("requirements/app.txt") | pins("requirements/torch-cuda.txt")
    of_the_command = {"cryptography", "typer"}
    assert set(pinned) == {canonicalize_name(need.name) for need in declared} - of_the_command
    for need in declared:
        if need.name not in of_the_command:
            assert need.specifier.contains(version(pinned[canonicalize_name(need.name)])), need


def test_both_variants_and_the_constraints_pin_the_same_versions() -> None:
    constraints = pins("requirements/constraints.txt")
    cpu, cuda = pins("requirements/torch-cpu.txt"), pins("requirements/torch-cuda.txt")
    assert {name: version(pin).removesuffix("+cpu") for name, pin in cpu.items()} == {
        name: version(pin) for name, pin in cuda.items()
    }
    for file in ("flower", "app", "torch-cuda"):
        for name, pin in pins(f"requirements/{file}.txt").items():
            assert version(constraints[name]) == version(pin), name
    assert (
        version(constraints["flwr"])
        == tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["flwr-version-target"]
    )


def test_the_build_context_holds_no_key_and_no_setting() -> None:
    lines = [line for line in (DOCKER / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    copied = re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    allowed = {file.relative_to(DOCKER) for line in lines[1:] for file in DOCKER.glob(line.removeprefix("!"))}
    wanted = {
        Path(file.replace("${TORCH}", torch)) for line in copied for file in line.split() for torch in ("cpu", "cuda")
    }
    assert wanted == allowed
