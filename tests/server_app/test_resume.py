"""A run that was interrupted goes on as if nothing had happened."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from server_app.config import ConfigError
from server_app.experiment import ExperimentError
from server_app.labels import labels
from server_app.report import load_run
from strategies.inprocess import InProcessGrid
from strategies.rules import RULES
from tests.interrupted_runs import ROUNDS, at_message, interrupt, outcome, run, settings

COHORT = 5


def interrupted(results: Path, name: str = "run", message: int = 4 * COHORT + 2, **changes: Any) -> Path:
    """Interrupt a run, by default in its fifth round; returns its folder."""
    with pytest.raises(KeyboardInterrupt):
        run(settings(results, name, **changes), at_message(message, interrupt))
    return results / name


def resume(folder: Path, **changes: Any) -> str:
    """Go on with a run; nothing but its folder is known."""
    return run({"resume": str(folder), "wait-for-nodes": 0.0} | {k.replace("_", "-"): v for k, v in changes.items()})


def whole(results: Path, name: str = "whole", **changes: Any) -> Path:
    run(settings(results, name, **changes))
    return results / name


@cache
def uninterrupted(method: str = "fedpcd", **changes: Any) -> dict[str, Any]:
    """What the same run leaves that nobody interrupts."""
    with tempfile.TemporaryDirectory() as folder:
        return outcome(whole(Path(folder), strategy=method, **changes) / method)


@pytest.fixture
def picture() -> None:
    """Ask for the picture."""


@pytest.fixture(autouse=True)
def no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than these runs."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr("server_app.experiment.compare", lambda folders, place: ("", "none"))


@pytest.mark.parametrize("method", sorted(RULES))
def test_every_method_goes_on_bit_for_bit_from_the_folder_alone(method: str, tmp_path: Path) -> None:
    expected = uninterrupted(method, evaluation="both")
    folder = interrupted(tmp_path, strategy=method, evaluation="both")
    text = resume(folder)
    assert f"{method} goes on after round 4" in text
    assert outcome(folder / method) == expected


@pytest.mark.parametrize("normalization", ["l2", "ema", "none"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_rounds_after_the_last_checkpoint_are_done_again(normalization: str, every: int, tmp_path: Path) -> None:
    expected = uninterrupted(normalization=normalization)
    folder = interrupted(tmp_path, normalization=normalization, checkpoint_every=every)
    assert f"goes on after round {4 // every * every}" in resume(folder)
    assert outcome(folder / "fedpcd") == expected


def test_a_run_can_be_interrupted_again_and_again(tmp_path: Path) -> None:
    expected = uninterrupted()
    folder = interrupted(tmp_path, message=2)
    for _ in range(ROUNDS - 1):
        with pytest.raises(KeyboardInterrupt):
            run({"resume": str(folder), "wait-for-nodes": 0.0}, at_message(COHORT + 3, interrupt))
    resume(folder)
    assert outcome(folder / "fedpcd") == expected


def test_a_run_that_died_before_its_first_checkpoint_starts_anew_in_its_folder(tmp_path: Path) -> None:
    expected = uninterrupted()
    folder = interrupted(tmp_path, message=3)
    resume(folder)
    assert outcome(folder / "fedpcd") == expected


def test_a_strategy_of_which_there_is_no_more_than_a_folder_starts_anew(tmp_path: Path) -> None:
    folder = interrupted(tmp_path, message=ROUNDS * COHORT + 1, compare_with="fedavg")
    (folder / "fedpcd" / "config.json").unlink()
    shutil.rmtree(folder / "fedpcd" / "checkpoints")
    resume(folder)
    assert outcome(folder / "fedpcd") == uninterrupted()


def test_a_run_that_died_after_its_last_round_only_has_to_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = uninterrupted("afl")  # its result is not the last iterate
    monkeypatch.setattr("server_app.results.ResultsWriter.finish", lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt):
        run(settings(tmp_path, "run", strategy="afl"))
    monkeypatch.undo()
    resume(tmp_path / "run")
    assert outcome(tmp_path / "run" / "afl") == expected


@pytest.mark.usefixtures("picture")
def test_of_several_strategies_those_that_are_complete_are_not_trained_again(tmp_path: Path) -> None:
    folder = interrupted(tmp_path, message=ROUNDS * COHORT + 2 * COHORT + 1, compare_with="fedavg,ditto")
    before = (folder / "fedavg" / "summary.json").read_bytes()
    text = resume(folder)
    assert "ditto goes on after round 2" in text
    assert not re.search("^round .*FedAvg", text, re.MULTILINE)
    assert (folder / "fedavg" / "summary.json").read_bytes() == before
    for name in ("fedavg", "ditto", "fedpcd"):
        assert outcome(folder / name) == uninterrupted(name)
    # The picture of the strategies that were complete gives way to that of all.
    assert [path.name for path in folder.glob("*.png")] == ["comparison.png"]


def test_the_folder_of_the_strategy_does_too(tmp_path: Path) -> None:
    expected = uninterrupted()
    folder = interrupted(tmp_path)
    resume(folder / "fedpcd")
    assert outcome(folder / "fedpcd") == expected


def test_the_number_of_nodes_may_be_another_one(tmp_path: Path) -> None:
    expected = uninterrupted("ditto")
    folder = interrupted(tmp_path, strategy="ditto")
    run({"resume": str(folder), "wait-for-nodes": 0.0}, num_nodes=3)
    assert outcome(folder / "ditto") == expected


def test_a_run_can_be_prolonged_when_it_is_resumed(tmp_path: Path) -> None:
    expected = uninterrupted(num_server_rounds=ROUNDS + 2)
    folder = interrupted(tmp_path)
    resume(folder, num_server_rounds=ROUNDS + 2)
    assert outcome(folder / "fedpcd") == expected
    assert load_run(folder / "fedpcd").config["run-config"]["num-server-rounds"] == ROUNDS + 2


# ---- what is damaged ----


def newest(folder: Path, suffix: str) -> Path:
    return sorted((folder / "fedpcd" / "checkpoints").glob(f"*.{suffix}"))[-1]


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"round": 4', '"round": 5'))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "manifest cut off": lambda folder: cut_off(newest(folder, "json")),
    "manifest edited": lambda folder: edit(newest(folder, "json")),
    "manifest emptied": lambda folder: newest(folder, "json").write_bytes(b""),
    "manifest of another format": lambda folder: newest(folder, "json").write_text(
        '{"format-version": 9, "checksum": 1}'
    ),
    "arrays cut off": lambda folder: cut_off(newest(folder, "safetensors")),
    "arrays changed": lambda folder: flip_a_bit(newest(folder, "safetensors")),
    "arrays removed": lambda folder: newest(folder, "safetensors").unlink(),
    "results changed": lambda folder: flip_a_bit(folder / "fedpcd" / "clients.csv"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(damage: str, tmp_path: Path) -> None:
    expected = uninterrupted()
    folder = interrupted(tmp_path)
    DAMAGES[damage](folder)
    text = resume(folder)
    assert "checkpoint not usable: " in text
    assert "goes on after round 3" in text
    assert outcome(folder / "fedpcd") == expected


def test_where_every_checkpoint_is_damaged_nothing_is_lost_and_the_reasons_are_given(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    for manifest in (folder / "fedpcd" / "checkpoints").glob("*.json"):
        cut_off(manifest)
    before = (folder / "fedpcd" / "rounds.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"cannot go on: .*round-000004\.json is damaged.*round-000003\.json"):
        resume(folder)
    assert (folder / "fedpcd" / "rounds.jsonl").read_bytes() == before


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    path = folder / "fedpcd" / "config.json"
    config = json.loads(path.read_text())
    config["run-config"]["tau"] = 0.2
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="belongs to a run with other settings"):
        resume(folder)


# ---- settings ----


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tau": 0.3}, r"tau=0\.3 \(the run has 0\.1\)"),
        ({"seed": 4}, r"seed=4 \(the run has 0\)"),
        ({"num_server_rounds": 2}, r"num-server-rounds=2 is not allowed: 4 rounds are done"),
    ],
)
def test_settings_that_would_change_the_run_are_refused_by_name(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    folder = interrupted(tmp_path)
    with pytest.raises(ConfigError, match=text):
        resume(folder, **changes)
    resume(folder)  # nothing was spoilt


def test_settings_that_are_repeated_do_no_harm(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    resume(folder, tau=0.1, num_clients=20, round_timeout=9.0)
    assert load_run(folder / "fedpcd").summary["status"] == "completed"


@pytest.mark.parametrize(("place", "text"), [("", "does not exist on the server's machine"), ("empty", "holds no run")])
def test_a_folder_without_a_run_is_refused(place: str, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    if place:
        folder.mkdir()
    with pytest.raises(ConfigError, match=text):
        resume(folder)


def test_a_complete_run_has_nothing_to_resume(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    with pytest.raises(ConfigError, match="this run is complete"):
        resume(folder)


def test_a_complete_run_cannot_be_prolonged(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    with pytest.raises(ConfigError, match="num-server-rounds=9 is not allowed: a strategy of this run is complete"):
        resume(folder, num_server_rounds=9)


def test_without_checkpoints_a_run_cannot_be_resumed_and_keeps_its_results(tmp_path: Path) -> None:
    folder = interrupted(tmp_path, checkpoint_every=0)
    assert not (folder / "fedpcd" / "checkpoints").exists()
    with pytest.raises(ConfigError, match="checkpoint-every=0"):
        resume(folder)
    assert len((folder / "fedpcd" / "rounds.jsonl").read_text().splitlines()) == 5


def test_two_processes_cannot_go_on_with_the_same_run(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)

    def meanwhile() -> None:
        with pytest.raises(ConfigError, match="is in use"):
            resume(folder)
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        run({"resume": str(folder), "wait-for-nodes": 0.0}, at_message(1, meanwhile))


def test_a_run_that_is_still_going_on_cannot_be_resumed(tmp_path: Path) -> None:
    def meanwhile() -> None:
        with pytest.raises(ConfigError, match="is in use"):
            resume(tmp_path / "run")

    run(settings(tmp_path, "run"), at_message(3 * COHORT, meanwhile))
    assert outcome(tmp_path / "run" / "fedpcd") == uninterrupted()


def test_a_simulation_does_not_go_on_as_a_deployment(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    nodes = [{"client-id": str(number)} for number in range(20)]
    with pytest.raises(ConfigError, match="the run's clients were 'logical', these are 'own'"):
        run({"resume": str(folder), "wait-for-nodes": 0.0}, node_configs=nodes)


# ---- deployed clients ----


@pytest.mark.parametrize("method", ["fedpcd", "ditto", "dqnfed"])
def test_deployed_clients_with_a_state_dir_remember_across_an_interruption(method: str, tmp_path: Path) -> None:
    def nodes(name: str) -> list[dict[str, Any]]:
        return [{"client-id": str(number), "state-dir": str(tmp_path / name / str(number))} for number in range(20)]

    config = settings(tmp_path, "whole", strategy=method)
    run(config, node_configs=nodes("a"))
    with pytest.raises(KeyboardInterrupt):
        run({**config, "run-name": "run"}, at_message(4 * COHORT + 2, interrupt), node_configs=nodes("b"))
    run({"resume": str(tmp_path / "run"), "wait-for-nodes": 0.0}, node_configs=nodes("b"))
    assert outcome(tmp_path / "run" / method) == outcome(tmp_path / "whole" / method)


# ---- the end ----


def test_a_complete_run_keeps_only_its_results(tmp_path: Path) -> None:
    folder = interrupted(tmp_path, strategy="ditto") / "ditto"
    assert {"checkpoints", "client-state"} <= {path.name for path in folder.iterdir()}
    resume(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "clients.csv",
        "config.json",
        "model.safetensors",
        "rejections.jsonl",
        "rounds.jsonl",
        "summary.json",
    ]
    assert load_run(folder).summary["checkpoint-bytes"] > 0


def test_too_many_skipped_rounds_in_a_row_end_a_run_which_then_goes_on(tmp_path: Path) -> None:
    expected = uninterrupted()
    silent = False

    def fall_silent() -> None:
        nonlocal silent
        silent = True

    third = at_message(2 * COHORT + 1, fall_silent)

    def intercept(message: Any, context: Any) -> object:
        third(message, context)
        return InProcessGrid.SILENT if silent and message.metadata.message_type == "train" else None

    with pytest.raises(ExperimentError, match=r"3 rounds in a row were skipped, .*round 5.*resume='") as caught:
        run(settings(tmp_path, "run"), intercept)
    assert f"resume='{tmp_path / 'run'}'" in str(caught.value)
    assert load_run(tmp_path / "run" / "fedpcd").summary["status"] == "failed"
    # The skipped rounds were complete: the run goes on after them.
    resume(tmp_path / "run")
    assert [line["skipped"] for line in outcome(tmp_path / "run" / "fedpcd")["rounds"]] == [False] * 3 + [True] * 2 + [
        False,
        False,
    ]
    assert len(expected["rounds"]) == ROUNDS + 1


def test_results_of_an_interrupted_run_are_readable(tmp_path: Path) -> None:
    folder = interrupted(tmp_path) / "fedpcd"
    assert load_run(folder).final is not None
    shutil.rmtree(folder / "checkpoints")
    assert all(np.isfinite(array).all() for array in load_file(folder / "model.safetensors").values())


def test_clients_remember_where_the_rest_of_a_run_is_done_without_checkpoints(tmp_path: Path) -> None:
    expected = uninterrupted("ditto", evaluation="federated")
    folder = interrupted(tmp_path, strategy="ditto", evaluation="federated")
    resume(folder, checkpoint_every=0)
    assert outcome(folder / "ditto") == expected


def test_a_complete_run_that_could_not_clean_up_is_cleaned_when_it_is_resumed(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    for left in ("checkpoints", "client-state"):
        (folder / "fedpcd" / left).mkdir()
        (folder / "fedpcd" / left / "update").write_text("a client's")
    with pytest.raises(ConfigError, match="complete"):
        resume(folder)
    assert not {"checkpoints", "client-state"} & {path.name for path in (folder / "fedpcd").iterdir()}


def test_a_run_is_not_cut_off_at_a_round_without_an_evaluation(tmp_path: Path) -> None:
    folder = interrupted(tmp_path, evaluate_every=3)
    with pytest.raises(ConfigError, match="num-server-rounds=4 is not allowed: round 4 is done and was not evaluated"):
        resume(folder, num_server_rounds=4)
    resume(folder, num_server_rounds=5)
    assert json.loads((folder / "fedpcd" / "summary.json").read_text())["evaluated-round"] == 5


def test_settings_that_a_run_keeps_although_the_default_is_given_are_named(tmp_path: Path) -> None:
    folder = interrupted(tmp_path, min_replies=2)
    [said] = [line for line in resume(folder, min_replies=1).splitlines() if line.startswith("the run keeps")]
    assert "min-replies=2" in said
    config = json.loads((folder / "fedpcd" / "config.json").read_text())
    assert config["run-config"]["min-replies"] == 2
    assert config["resumed-after"] == [4]


def test_the_labels_of_compared_strategies_do_not_tell_which_was_resumed(tmp_path: Path) -> None:
    folder = interrupted(tmp_path, message=2, compare_with="fedavg")
    resume(folder)
    assert labels([load_run(folder / name) for name in ("fedavg", "fedpcd")]) == ["FedAvg", "FedPCD"]
