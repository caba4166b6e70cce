from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from matplotlib import image

from server_app.report import ResultsError, compare, find_runs, load_run, make_console
from server_app.results import ResultsWriter
from strategies.protocol import ACCURACY, LOSS, NUM_EXAMPLES
from strategies.reports import Rejection, RoundReport

if TYPE_CHECKING:
    from pathlib import Path

SETTING = {"dataset": "digits", "partition": "dirichlet", "alpha": 0.01, "fraction-train": 0.1, "seed": 3}
MODEL = ArrayRecord({"w": Array(np.zeros(2))})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write_run(
    folder: Path,
    strategy: str = "fedpcd",
    *,
    rounds: int = 3,
    clients: int = 20,
    best: float = 0.9,
    rejections: tuple[Rejection, ...] = (),
    missing: int = 0,
    finish: bool = True,
) -> Path:
    """Write a made-up run in which client c of n reaches best * (c + 1) / n in the last round."""
    ids = [str(client) for client in range(clients)]
    writer = ResultsWriter(folder, {"strategy": strategy, "client-ids": ids, "run-config": SETTING})
    for server_round in range(rounds + 1):
        if server_round > 0:
            report = RoundReport(server_round, ("0",), ("0",), rejections, False, {"status": "solved"})
            writer.record_round(report)
        scale = best * server_round / rounds
        metrics = {
            client: {ACCURACY: scale * (int(client) + 1) / clients, LOSS: 1.0, NUM_EXAMPLES: 5}
            for client in ids[: clients - missing]
        }
        writer.record_evaluation(server_round, metrics)
    if finish:
        writer.finish(MODEL)
    writer.__exit__(None, None, None)
    return folder


def printed(folders: list[Path], file: io.StringIO | None = None) -> str:
    stream = io.StringIO() if file is None else file
    make_console(stream).print(compare(folders)[0])
    return stream.getvalue()


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def row(text: str, label: str) -> list[str]:
    (found,) = [line for line in text.splitlines() if line.strip().startswith(f"{label} ")]
    return found.split()


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run" / "fedpcd"))
    assert (run.strategy, run.label) == ("fedpcd", "FedPCD")
    assert list(run.evaluations) == [0, 1, 2, 3]
    assert run.accuracies["19"] == pytest.approx(0.9)
    assert run.final is not None
    assert run.final["worst-client"] == "0"
    assert run.summary["status"] == "completed"


def test_the_table_has_a_row_per_strategy_with_the_final_fairness(tmp_path: Path) -> None:
    write_run(tmp_path / "run" / "fedavg", "fedavg", best=0.5)
    write_run(tmp_path / "run" / "fedpcd", "fedpcd", best=0.9)
    text = printed([tmp_path / "run"])
    assert row(text, "FedAvg")[1:5] == ["26.2%", "14.4%", "3.8%", "48.8%"]
    assert row(text, "FedPCD")[1:5] == ["47.2%", "25.9%", "6.8%", "87.8%"]
    assert row(text, "FedPCD")[5:9] == ["0.768", "4.5%", "(id", "0)"]
    assert row(text, "FedPCD")[9] == "3"
    assert "digits, 20 clients, Dirichlet alpha 0.01, 10% per round, seed 3" in text


def test_strategies_stand_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    for name in ("fedpcd", "fedavg"):
        write_run(tmp_path / "run" / name, name)
    assert [folder.name for folder in find_runs([tmp_path / "run"])] == ["fedpcd", "fedavg"]


def test_plain_text_outside_a_terminal_fits_into_a_hundred_columns(tmp_path: Path) -> None:
    text = printed([write_run(tmp_path / "run" / "fedpcd", clients=1234, best=1.0)])
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert "1234 clients" in text


def test_colours_may_be_used_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" in printed([write_run(tmp_path / "run" / "fedpcd")], Terminal())


def test_a_forced_colour_does_not_reach_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in printed([write_run(tmp_path / "run" / "fedpcd")])


def test_incidents_are_told_below_the_table(tmp_path: Path) -> None:
    rejections = (Rejection("4", "error", "boom"), Rejection("5", "silent", "no answer"))
    text = unwrapped(printed([write_run(tmp_path / "run" / "fedpcd", rejections=rejections, missing=2)]))
    assert "training replies rejected: 3 error, 3 silent, see rejections.jsonl" in text
    assert "2 clients missing from the last evaluation" in text


def test_a_run_without_incidents_is_not_annotated(tmp_path: Path) -> None:
    assert "FedPCD:" not in printed([write_run(tmp_path / "run" / "fedpcd")])


def test_long_runs_also_show_the_average_of_the_last_evaluations(tmp_path: Path) -> None:
    text = unwrapped(printed([write_run(tmp_path / "run" / "fedpcd", rounds=20)]))
    assert "FedPCD, average of the last 10 evaluations: mean 36.6%, worst 10% 5.2%." in text


def test_an_unfinished_run_is_shown_and_called_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run" / "fedpcd", finish=False)
    assert "FedPCD: failed after round 3: the run ended early" in printed([folder])
    (folder / "summary.json").unlink()
    text = printed([folder])
    assert "FedPCD: unfinished" in text
    assert row(text, "FedPCD")[-2:] == ["3", "-"]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run" / "fedpcd")
    for name in ("rounds.jsonl", "clients.csv"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-5])
    run = load_run(folder)
    assert list(run.evaluations) == [0, 1, 2]
    assert len(run.accuracies) == 20


def test_runs_of_one_strategy_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "fedpcd") for name in ("seed0", "seed1")]
    text = printed(folders)
    assert "FedPCD (seed0)" in text
    assert "FedPCD (seed1)" in text


def test_the_picture_is_a_drawing_beside_the_runs(tmp_path: Path) -> None:
    for name in ("fedavg", "fedpcd"):
        write_run(tmp_path / "run" / name, name)
    _, picture = compare([tmp_path / "run"])
    assert picture == tmp_path / "run" / "comparison.png"
    pixels = image.imread(picture)
    assert pixels.shape[0] >= 600
    assert pixels.shape[1] >= 1500
    colours = {tuple(pixel) for pixel in (pixels[..., :3] * 255).round().astype(int).reshape(-1, 3)}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colours  # FedPCD's blue and FedAvg's orange


@pytest.mark.parametrize(("clients", "rounds"), [(1, 1), (3, 1), (1000, 2)])
def test_small_and_large_federations_can_be_drawn(tmp_path: Path, clients: int, rounds: int) -> None:
    folder = write_run(tmp_path / "run" / "fedavg", "fedavg", clients=clients, rounds=rounds)
    _, picture = compare([folder], tmp_path / "elsewhere.png")
    assert picture == tmp_path / "elsewhere.png"
    assert picture.stat().st_size > 10_000


def test_many_runs_have_a_colour_each(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"run{number}" / "fedpcd", best=0.5) for number in range(5)]
    _, picture = compare(folders)
    assert picture.is_file()


def test_a_folder_without_results_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=rf"{tmp_path} holds no results"):
        compare([tmp_path])


def test_results_without_any_evaluation_cannot_be_compared(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "run" / "fedpcd", {"strategy": "fedpcd", "client-ids": ["0"]}) as writer:
        writer.finish(MODEL)
    with pytest.raises(ResultsError, match="no round was evaluated"):
        compare([tmp_path / "run"])


def test_a_run_without_evaluation_beside_one_with_it_has_an_empty_row(tmp_path: Path) -> None:
    write_run(tmp_path / "run" / "fedavg", "fedavg")
    with ResultsWriter(tmp_path / "run" / "fedpcd", {"strategy": "fedpcd", "client-ids": ["0"]}) as writer:
        writer.finish(MODEL)
    assert row(printed([tmp_path / "run"]), "FedPCD")[1:7] == ["-"] * 6


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.json", "{", r"config\.json is no valid JSON"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", '{"schema-version": 99}', "schema version 99"),
        ("rounds.jsonl", "nonsense\n", r"rounds\.jsonl, line 1, is no valid JSON"),
        ("rounds.jsonl", '{"x": 1}\n', r"rounds\.jsonl, line 1, is no round"),
        ("clients.csv", "a,b\n1,2\n", r"clients\.csv is malformed"),
        ("summary.json", "nope", r"summary\.json is no valid JSON"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str, content: str, complaint: str) -> None:
    folder = write_run(tmp_path / "fedpcd")
    (folder / name).write_text(content)
    with pytest.raises(ResultsError, match=complaint):
        load_run(folder)


@pytest.mark.parametrize("name", ["config.json", "rounds.jsonl", "clients.csv"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "fedpcd")
    (folder / name).unlink()
    with pytest.raises(ResultsError, match=f"{name} is missing"):
        load_run(folder)


def test_the_title_names_what_is_known_of_the_setting(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run" / "fedpcd")
    config = json.loads((folder / "config.json").read_text())
    for run_config, title in (
        ({}, "unknown data, 20 clients"),
        ({"dataset": "cifar10", "partition": "shards"}, "cifar10, 20 clients, shards"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, "run-config": run_config}))
        assert printed([folder]).splitlines()[0].strip() == f"Fairness over all clients: {title}"


def test_an_unknown_strategy_keeps_its_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run" / "mine", "mine")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert config["strategy"] == "mine"
    assert load_run(folder).label == "mine"
