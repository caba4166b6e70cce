"""kill -9 of every kind of process: no finished round is lost, and the run ends as it should."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.federation import Federation, has_loaded, in_process, lines_of
from tests.end_to_end.test_engines_agree import model_of
from tests.support import assert_same_bits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SITES = {"site-a": 3, "site-b": 17, "site-c": 29}
"""Names of the sites, and which part of the data each holds."""
SETTINGS: dict[str, Any] = {
    "num-server-rounds": 4,
    "fraction-train": 0.67,  # the third client's update is in the history
    "tau": 0.5,
    "min-nodes": len(SITES),
    "evaluate-every": 100,
}
UNATTENDED = 60
"""Seconds without a heartbeat after which Flower 1.42 gives up a process or a node; it has no setting for that."""


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    with Federation(SITES) as members:
        yield members


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The model of the run that nobody disturbs."""
    return in_process(tmp_path_factory.mktemp("uninterrupted"), SITES, SETTINGS)


def begin(federation: Federation, results: Path, **changes: Any) -> tuple[int, Path]:
    """Start a run; returns its id and the folder of its strategy."""
    values = {**SETTINGS, **{key.replace("_", "-"): value for key, value in changes.items()}}
    run_id = federation.submit({**values, "results-dir": str(results), "run-name": "run"})
    return run_id, results / "run" / "fedpcd"


def rounds(folder: Path) -> list[int]:
    return [line["round"] for line in lines_of(folder / "rounds.jsonl")]


def training(federation: Federation, client_id: str, folder: Path) -> int:
    """Wait until a client trains in the round after the last that is finished, and return its process."""
    since = (folder / "rounds.jsonl").stat().st_mtime
    found: list[int] = []

    def trains() -> bool:
        pid = federation.client_app(client_id, since)
        if pid is None or not has_loaded(pid, "sklearn"):  # the data are being read: training begins
            return False
        found.append(pid)
        return True

    federation.until(trains, f"{client_id} trains", pause=0.05)
    time.sleep(0.5)
    return found[-1]


def test_a_killed_clientapp_and_a_killed_supernode_cost_one_round_of_two_clients(
    federation: Federation, tmp_path: Path
) -> None:
    before = federation.online()
    run_id, folder = begin(federation, tmp_path, fraction_train=1.0, local_epochs=3000, round_timeout=300)
    federation.until(lambda: rounds(folder) == [0, 1], "round 1 ends")
    os.kill(training(federation, "site-b", folder), signal.SIGKILL)
    training(federation, "site-c", folder)
    federation.kill_node("site-c")
    federation.return_node("site-c")
    assert federation.finish(run_id) == "finished:completed", federation.outcome(run_id)
    lines = lines_of(folder / "rounds.jsonl")
    assert [line["round"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[1]["accepted"] == sorted(SITES)
    assert lines[2]["accepted"] == ["site-a"]
    assert not any(line["skipped"] for line in lines)
    refused = {line["client_id"]: line for line in lines_of(folder / "rejections.jsonl")}
    assert "ClientApp stopped responding" in refused["site-b"]["reason"]
    assert (refused["site-b"]["round"], refused["site-b"]["kind"]) == (2, "error")
    # Flower reports the loss only if the server looks while the node is away; a node that is back in between has
    # forgotten the message, which the server then awaits until the round's deadline.
    assert (refused["site-c"]["round"], refused["site-c"]["kind"] in ("error", "silent")) == (2, True)
    assert {"site-a", "site-b"} <= set(lines[3]["accepted"])
    assert lines[4]["accepted"] == sorted(SITES)
    assert sorted(federation.online()) == sorted(before)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["skipped-rounds"]) == ("completed", 4, 0)


def test_a_run_whose_serverapp_was_killed_is_failed_and_its_resumption_gives_the_same_bits(
    federation: Federation, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    run_id, folder = begin(federation, tmp_path)
    federation.until(lambda: len(rounds(folder)) >= 3, "round 2 ends")
    server = federation.server_app()
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert_resumable(federation, run_id, folder, uninterrupted)


def test_a_run_whose_superlink_was_killed_is_failed_and_its_resumption_gives_the_same_bits(
    federation: Federation, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    before = federation.online()
    run_id, folder = begin(federation, tmp_path)
    federation.until(lambda: len(rounds(folder)) >= 3, "round 2 ends")
    federation.kill_superlink()
    federation.restart_superlink()
    assert_resumable(federation, run_id, folder, uninterrupted)
    assert sorted(federation.online()) == sorted(before)  # the same node ids, without a restart


def assert_resumable(federation: Federation, run_id: int, folder: Path, uninterrupted: dict[str, Any]) -> None:
    """Wait until a killed run is failed, resume it, and hold the whole against the uninterrupted run."""
    assert federation.finish(run_id, UNATTENDED + 120) == "finished:failed"
    finished = lines_of(folder / "rounds.jsonl")
    assert [line["round"] for line in finished] == [*range(len(finished))]
    assert 3 <= len(finished) <= SETTINGS["num-server-rounds"]
    second = federation.submit({"resume": str(folder.parent)})
    assert federation.finish(second) == "finished:completed", federation.outcome(second)
    lines = lines_of(folder / "rounds.jsonl")
    assert [line["round"] for line in lines] == [*range(1 + SETTINGS["num-server-rounds"])]
    assert lines[: len(finished)] == finished
    assert_same_bits(model_of(folder), uninterrupted)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("completed", SETTINGS["num-server-rounds"])
