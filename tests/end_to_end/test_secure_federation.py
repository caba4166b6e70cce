"""TLS and SuperNode authentication with real processes: the simulation's model to the bit, and no intruder gets in."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_app.app import app as client_app
from server_app.experiment import run_experiment
from strategies.inprocess import InProcessGrid
from tests.end_to_end.federation import Federation, lines_of
from tests.end_to_end.test_engines_agree import DECLARED, model_of
from tests.support import assert_same_bits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SITES = {"0": 0, "1": 1, "2": 2, "3": 3}
"""The names that the simulation gives its clients."""
SETTINGS = {
    "dataset": "fashion-mnist",
    "num-clients": len(SITES),
    "partition": "dirichlet",
    "alpha": 0.1,
    "num-server-rounds": 5,
    "fraction-train": 0.5,
    "tau": 0.1,
    "min-nodes": len(SITES),
    "evaluate-every": 5,
}
KEY = ("--auth-supernode-private-key", "node.key")
TRUSTED = ("--root-certificates", "ca.crt")
INTRUDERS = {
    "wrong certificate": ("0", ("--root-certificates", "../../../others/user/ca.crt", *KEY)),
    "unregistered key": ("stranger", (*TRUSTED, *KEY)),
    "key in use": ("0", (*TRUSTED, *KEY)),
    "no key": ("0", TRUSTED),
    "key over plaintext": ("0", ("--insecure", *KEY)),
    "plaintext": ("0", ("--insecure", "--max-retries", "2")),
    "patient plaintext": ("0", ("--insecure",)),
}
"""Whose folder each intruder has, and how it starts."""
REFUSALS = {
    "wrong certificate": ("SSL/TLS handshake error detected.", "Exit Code: 305", "CERTIFICATE_VERIFY_FAILED"),
    "unregistered key": ("Exit Code: 305", "[code: 2004] Failed to activate SuperNode."),
    "key in use": ("Exit Code: 305", "[code: 2004] Failed to activate SuperNode."),
    "no key": ("Exit Code: 305", "[code: 2001] SuperNode authentication is enabled."),
    "key over plaintext": ("Exit Code: 303", "SuperNode authentication requires a secure TLS connection"),
    "plaintext": ("Option `--insecure` was set.", "Giving up reconnection", "Exit Code: 305"),
}
"""What each reads in its own log."""


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    with Federation(SITES) as members:
        yield members


def test_five_rounds_over_tls_with_authenticated_nodes_give_the_bits_of_the_simulation(
    federation: Federation, tmp_path: Path
) -> None:
    run_id = federation.submit({**SETTINGS, "results-dir": str(tmp_path), "run-name": "deployed"})
    assert federation.finish(run_id) == "finished:completed", federation.outcome(run_id)
    config = {**DECLARED, **SETTINGS, "min-nodes": 2, "results-dir": str(tmp_path), "run-name": "simulated"}
    run_experiment(InProcessGrid(client_app, 2, config), config)
    deployed, simulated = (tmp_path / name / "fedpcd" for name in ("deployed", "simulated"))
    assert_same_bits(model_of(deployed), model_of(simulated))
    hosting = [json.loads((folder / "config.json").read_text())["hosting"] for folder in (deployed, simulated)]
    assert hosting == ["own", "logical"]
    assert timeless(lines_of(deployed / "rounds.jsonl")) == timeless(lines_of(simulated / "rounds.jsonl"))
    assert len(lines_of(deployed / "rounds.jsonl")) == 1 + SETTINGS["num-server-rounds"]
    assert any(line["diagnostics"].get("constraints-active", 0) > 0 for line in lines_of(deployed / "rounds.jsonl"))


def timeless(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whom each round asked, who counted, and what the method decided."""
    decisions = [
        {key: value for key, value in line["diagnostics"].items() if not key.startswith("seconds")} for line in rounds
    ]
    return [{**d, "cohort": r["cohort"], "accepted": r["accepted"]} for d, r in zip(decisions, rounds, strict=True)]


def test_strangers_are_refused_and_read_why(federation: Federation) -> None:
    members = set(federation.online())
    federation.fedpcd("init", str(federation.folder / "others"), "--host", "127.0.0.1", "--site", "anybody")
    federation.fedpcd("add-site", str(federation.keys), "stranger")
    for name, (site, options) in INTRUDERS.items():
        federation.start_node(name, site=site, options=options)
    for name, words in REFUSALS.items():
        federation.until(lambda name=name: federation.nodes[name].poll() is not None, f"{name} is refused")
        text = federation.log(name).read_text()
        assert federation.nodes[name].returncode == 1, text
        assert [word for word in words if word not in text] == [], text
    # Flower cannot tell a plaintext client of a TLS server from a server that is down, and by default tries for ever.
    tries = federation.log("patient plaintext").read_text().count("Connection attempt failed, retrying in")
    assert tries >= 3
    assert federation.nodes["patient plaintext"].poll() is None
    assert set(federation.online()) == members
    federation.kill_node("patient plaintext")


def test_a_user_without_the_certificate_is_refused(federation: Federation, tmp_path: Path) -> None:
    section = f'[superlink.fedpcd]\naddress = "127.0.0.1:{federation.port}"\n'
    foreign = tmp_path / "others" / "user" / "ca.crt"
    answers = {"insecure = true": "", f'root-certificates = "{foreign}"': ""}
    federation.fedpcd("init", str(tmp_path / "others"), "--host", "127.0.0.1", "--site", "anybody")
    for line in answers:
        (tmp_path / "home").mkdir(exist_ok=True)
        (tmp_path / "home" / "config.toml").write_text(section + line + "\n")
        answer = subprocess.run(
            [federation._tool("flwr"), "supernode", "ls", "fedpcd"],
            env={**federation._env, "FLWR_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert answer.returncode != 0
        answers[line] = " ".join(answer.stderr.replace("│", " ").split())
    assert all("Connection to the SuperLink is unavailable" in answer for answer in answers.values()), answers
