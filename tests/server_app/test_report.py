from __future__ import annotations

import dataclasses
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from server_app.labels import labels
from server_app.picture import draw
from server_app.report import ResultsError, compare, find_runs, load_run, make_console
from server_app.results import ResultsWriter
from strategies.protocol import ACCURACY, LOSS, NUM_EXAMPLES
from strategies.reports import Rejection, RoundReport

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from matplotlib.figure import Figure

SETTING = {"dataset": "digits", "partition": "dirichlet", "alpha": 0.01, "fraction-train": 0.1, "seed": 3}
MODEL = ArrayRecord({"w": Array(np.zeros(2))})


@pytest.fixture(autouse=True)
def a_working_directory_and_the_default_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("COLUMNS", raising=False)


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
    hyper: dict[str, Any] | None = None,
    setting: dict[str, Any] | None = None,
) -> Path:
    """Write a made-up run in which client c of n reaches best * (c + 1) / n in the last round."""
    ids = [str(client) for client in range(clients)]
    config = {"strategy": strategy, "client-ids": ids, "run-config": SETTING | (setting or {})}
    writer = ResultsWriter(folder, config | {"hyper-parameters": hyper or {}})
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
    (found,) = [line for line in text.splitlines() if line.startswith(f"{label} ")]
    return found.removeprefix(label).split()


def write_seeds(folder: Path, seeds: Iterable[int], **changes: Any) -> list[Path]:
    """Write a run of both methods per seed."""
    for seed in seeds:
        for name in ("fedavg", "fedpcd"):
            write_run(folder / f"digits-fedpcd-seed{seed}" / name, name, setting={"seed": seed}, **changes)
    return [folder / f"digits-fedpcd-seed{seed}" for seed in seeds]


def labels_of(*folders: Path) -> list[str]:
    return labels([load_run(folder) for folder in folders])


def drawing(*folders: Path) -> Figure:
    runs = [load_run(folder) for folder in folders]
    named = [dataclasses.replace(run, label=label) for run, label in zip(runs, labels(runs), strict=True)]
    figure = draw(named)
    FigureCanvasAgg(figure).draw()
    return figure


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


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
    assert row(text, "FedAvg")[:4] == ["26.2%", "14.4%", "3.8%", "48.8%"]
    assert row(text, "FedPCD")[:4] == ["47.2%", "25.9%", "6.8%", "87.8%"]
    assert row(text, "FedPCD")[4:8] == ["0.768", "4.5%", "0", "3"]
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


def test_runs_of_several_seeds_are_labelled_alike_by_method_and_seed(tmp_path: Path) -> None:
    text = printed(write_seeds(tmp_path, (0, 1)))
    starts = [line[:14] for line in text.splitlines() if line.startswith("Fed")]
    assert starts == ["FedAvg, seed 0", "FedPCD, seed 0", "FedAvg, seed 1", "FedPCD, seed 1"]
    assert "digits-fedpcd" not in text


def test_labels_hold_only_the_settings_that_tell_runs_apart(tmp_path: Path) -> None:
    avg = write_run(tmp_path / "a" / "fedavg", "fedavg")
    small = write_run(tmp_path / "b" / "fedpcd", hyper={"tau": 0.02, "primary": True})
    large = write_run(tmp_path / "c" / "fedpcd", hyper={"tau": 0.05, "primary": True})
    plain = write_run(tmp_path / "d" / "fedpcd", hyper={"tau": 0.05, "primary": False})
    fashion = write_run(
        tmp_path / "e" / "fedpcd",
        hyper={"tau": 0.02},
        setting={"dataset": "fashion-mnist", "num-server-rounds": 200},
        clients=1,
    )
    assert labels_of(avg, small) == ["FedAvg", "FedPCD"]
    assert labels_of(avg, small, large) == ["FedAvg", "FedPCD, tau 0.02", "FedPCD, tau 0.05"]
    assert labels_of(large, plain) == ["FedPCD, primary on", "FedPCD, primary off"]
    assert labels_of(small, fashion) == ["FedPCD, digits", "FedPCD, fashion-mnist"]


@pytest.mark.parametrize(
    ("setting", "ending"),
    [
        ({"num-server-rounds": 1}, "1 round"),
        ({"num-server-rounds": 60}, "60 rounds"),
        ({"fraction-train": 0.125}, "12.50% per round"),
        ({"partition": "iid"}, "iid"),
        ({"local-epochs": 5}, "local-epochs 5"),
    ],
)
def test_a_setting_is_put_in_words(tmp_path: Path, setting: dict[str, Any], ending: str) -> None:
    first = write_run(tmp_path / "a" / "fedpcd", setting={"num-server-rounds": 2, "local-epochs": 1})
    second = write_run(tmp_path / "b" / "fedpcd", setting={"num-server-rounds": 2, "local-epochs": 1, **setting})
    assert labels_of(first, second)[1] == f"FedPCD, {ending}"


def test_the_number_of_clients_can_tell_runs_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(number) / "fedpcd", clients=number) for number in (1, 2)]
    assert labels_of(*folders) == ["FedPCD, 1 client", "FedPCD, 2 clients"]


def test_settings_without_effect_do_not_count_as_a_difference(tmp_path: Path) -> None:
    iid = {"partition": "iid", "results-dir": "/a", "tau": 0.1}
    folders = [
        write_run(tmp_path / "one" / "fedavg", "fedavg", setting=iid),
        write_run(tmp_path / "two" / "fedavg", "fedavg", setting={**iid, "alpha": 5.0, "results-dir": "/b", "tau": 1}),
    ]
    assert labels_of(*folders) == ["FedAvg, run one", "FedAvg, run two"]
    assert "differ" not in printed(folders)


def test_runs_with_the_same_settings_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    names = ("digits-fedpcd-seed0-20260101T000000Z", "digits-fedpcd-seed0-20260101T000000Z-2", "mine")
    runs = [write_run(tmp_path / name / "fedpcd") for name in names]
    assert labels_of(*runs[:2]) == ["FedPCD, run 20260101T000000Z", "FedPCD, run 20260101T000000Z-2"]
    assert labels_of(runs[0], runs[2])[1] == "FedPCD, run mine"
    again = write_run(tmp_path / "elsewhere" / "mine" / "fedpcd")
    assert labels_of(runs[2], again) == ["FedPCD (1)", "FedPCD (2)"]


def test_a_folder_that_is_named_twice_is_compared_once(tmp_path: Path) -> None:
    write_run(tmp_path / "run" / "fedpcd")
    row(printed([tmp_path / "run", tmp_path / "run" / "fedpcd", tmp_path / "run" / ".." / "run"]), "FedPCD")


def test_the_title_holds_what_all_runs_share_and_a_note_the_rest(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a" / "fedpcd", setting={"num-server-rounds": 3}, hyper={"tau": 0.02}),
        write_run(
            tmp_path / "b" / "fedpcd",
            setting={"dataset": "fashion-mnist", "seed": 4, "num-server-rounds": 5},
            rounds=5,
            hyper={"tau": 0.05},
        ),
    ]
    text = printed(folders)
    assert text.splitlines()[0] == "Fairness over all clients: 20 clients, Dirichlet alpha 0.01, 10% per round"
    assert (
        "Settings differ in: dataset (digits, fashion-mnist), tau (0.02, 0.05), num-server-rounds (3, 5), seed (3, 4)."
    ) in unwrapped(text)
    assert "20 clients, Dirichlet alpha 0.01, 10% per round" in words(drawing(*folders))


def test_images_of_the_sites_own_are_not_said_to_be_divided(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a" / "fedpcd", setting={"dataset": "image-folder"})
    config = json.loads((folder / "config.json").read_text())
    assert "Dirichlet" in printed([folder]).splitlines()[0]
    (folder / "config.json").write_text(json.dumps(config | {"divided": False}))
    assert (
        printed([folder]).splitlines()[0]
        == "Fairness over all clients: image-folder, 20 clients, 10% per round, seed 3"
    )


def test_many_values_of_a_setting_are_cut_short_in_the_note(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed) / "fedpcd", setting={"seed": seed}, rounds=1) for seed in range(6)]
    assert "seed (0, 1, 2, ...)" in printed(folders)


def test_runs_of_different_code_are_said_to_be(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name / "fedpcd") for name in ("a", "b")]
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "code-hash": folder.parent.name * 64}))
    text = printed(folders)
    assert "Settings differ in: code-hash." in text
    assert "aaaa" not in text


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_figures_are_never_cut_off_however_long_the_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    long = {"dataset": "a-data-set-with-quite-a-long-name"}
    folders = [
        write_run(tmp_path / "a" / "fedpcd", best=1.0, clients=1234, rounds=1),
        write_run(tmp_path / "b" / "fedpcd", best=1.0, clients=1234, rounds=1, setting=long),
    ]
    text = printed(folders)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    assert all(text.count(figure) == 2 for figure in ("50.0%", "28.9%", " 5.1%"))
    assert "long-name" in text


def test_a_narrow_table_keeps_what_matters_and_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = write_seeds(tmp_path, (0, 1))
    monkeypatch.setenv("COLUMNS", "70")
    text = printed(folders)
    assert row(text, "FedPCD, seed 1") == ["47.2%", "25.9%", "6.8%", "87.8%", "4.5%", "0", "3"]
    assert "Left out at this width: seconds, Jain." in text
    monkeypatch.setenv("COLUMNS", "100")
    assert "Left out" not in printed(folders)


@pytest.mark.parametrize(("columns", "width"), [("", 100), ("0", 100), ("wide", 100), ("72", 72), ("200", 200)])
def test_the_width_outside_a_terminal_is_that_of_columns(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert make_console(io.StringIO()).width == width


def test_a_single_client_or_round_is_not_put_in_the_plural(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run" / "fedpcd", clients=1, rounds=1)
    assert "digits, 1 client, Dirichlet" in printed([folder])
    assert "Test accuracy of the only client after 1 round" in words(drawing(folder))
    text = printed([write_run(tmp_path / "two" / "fedpcd", clients=2, missing=1)])
    assert "1 client missing from the last evaluation" in text


def test_the_picture_of_runs_in_several_folders_goes_to_the_working_directory(tmp_path: Path) -> None:
    folders = write_seeds(tmp_path, (0, 1))
    first = compare(folders[:1])[1]
    content = first.read_bytes()
    assert compare(folders)[1] == tmp_path / "here" / "comparison.png"
    assert first.read_bytes() == content
    assert [path.name for path in folders[0].iterdir() if path.is_file()] == ["comparison.png"]


def test_another_picture_that_is_there_is_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "run" / "fedpcd")
    (tmp_path / "run" / "comparison.png").write_bytes(b"mine")
    (tmp_path / "run" / "comparison-2.png").write_bytes(b"mine too")
    pictures = [compare([tmp_path / "run"])[1] for _ in range(2)]
    assert pictures == [tmp_path / "run" / "comparison-3.png"] * 2  # the second time the same picture lies there
    assert (tmp_path / "run" / "comparison.png").read_bytes() == b"mine"
    assert (tmp_path / "run" / "comparison-2.png").read_bytes() == b"mine too"


def test_a_picture_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run" / "fedpcd")
    with pytest.raises(ResultsError, match=r"cannot be written to .*nowhere/x\.png .*give another path"):
        compare([folder], tmp_path / "nowhere" / "x.png")


def test_up_to_four_curves_are_named_where_they_end(tmp_path: Path) -> None:
    (run,) = write_seeds(tmp_path, (0,))
    figure = drawing(run / "fedavg", run / "fedpcd")
    assert "FedPCD, worst 10% 6.8%" in words(figure)
    assert figure.legends == []


@pytest.mark.parametrize("seeds", [(0, 1), (0, 1, 2)])
def test_more_curves_are_named_below_the_axes_which_keep_their_size(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    figure = drawing(*find_runs(write_seeds(tmp_path, seeds)))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["FedAvg, seed 0", "FedPCD, seed 0"]
    assert not any("FedPCD, seed 0, mean" in text for text in words(figure))
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    below = legend.get_window_extent()
    assert all(box is not None and box.y0 >= below.y1 for box in boxes)
    assert min(axes.get_position().width for axes in figure.axes) > 0.4
    assert below.x0 >= 0
    assert below.x1 <= figure.bbox.width


def test_long_names_stand_in_a_legend_that_fits(tmp_path: Path) -> None:
    names = ("a-very-long-name-" * 5, "another-long-name-" * 5)
    figure = drawing(*(write_run(tmp_path / name / "fedpcd") for name in names))
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert min(axes.get_position().width for axes in figure.axes) > 0.4


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_titles_do_not_overlap(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    figure = drawing(*find_runs(write_seeds(tmp_path, seeds)))
    boxes = [axes.title.get_window_extent() for axes in figure.axes]
    assert boxes[0].x1 < boxes[1].x0
    assert all(box.x0 > 0 and box.x1 < figure.bbox.width for box in boxes)


@pytest.mark.parametrize("clients", [2, 3, 5, 6, 10, 11, 99, 100])
def test_the_words_worst_10_stand_inside_their_band(tmp_path: Path, clients: int) -> None:
    figure = drawing(write_run(tmp_path / "run" / "fedpcd", clients=clients))
    axes = figure.axes[0]
    (band,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    (text,) = [text for text in axes.texts if "worst" in text.get_text()]
    outer, inner = band.get_window_extent(), text.get_window_extent()
    assert outer.x0 <= inner.x0
    assert inner.x1 <= outer.x1
    assert axes.bbox.y0 <= inner.y0
    assert inner.y1 <= axes.bbox.y1
    assert inner.y0 > axes.transData.transform((0, 1.0))[1]  # above every possible accuracy


def test_a_single_client_is_drawn_without_a_band_on_sensible_axes(tmp_path: Path) -> None:
    figure = drawing(write_run(tmp_path / "run" / "fedpcd", clients=1))
    clients, convergence = figure.axes
    left, right = clients.get_xlim()
    assert [tick for tick in clients.get_xticks() if left <= tick <= right] == [1]
    assert not clients.patches
    assert not any("worst" in text for text in words(figure))
    assert len(convergence.get_lines()) == 1


def test_federations_of_different_sizes_share_an_axis_in_percent(tmp_path: Path) -> None:
    figure = drawing(*(write_run(tmp_path / str(size) / "fedpcd", clients=size) for size in (4, 50)))
    assert figure.axes[0].get_xlim() == (0, 1)
    assert [line.get_xdata()[0] for line in figure.axes[0].get_lines()] == pytest.approx([0.125, 0.01])


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


@pytest.mark.parametrize("number", [3, 9])
def test_many_runs_have_a_colour_each(tmp_path: Path, number: int) -> None:
    one_method = drawing(*(write_run(tmp_path / f"run{i}" / "fedpcd") for i in range(number)))
    two_methods = drawing(*find_runs(write_seeds(tmp_path, range(number))))
    for figure, expected in ((one_method, number), (two_methods, 2 * number)):
        assert len({line.get_color() for line in figure.axes[0].get_lines()}) == expected


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
    assert row(printed([tmp_path / "run"]), "FedPCD, 1 client")[:7] == ["-"] * 7


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
        assert printed([folder]).splitlines()[0] == f"Fairness over all clients: {title}"


def test_an_unknown_strategy_keeps_its_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run" / "mine", "mine")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    assert config["strategy"] == "mine"
    assert load_run(folder).label == "mine"
