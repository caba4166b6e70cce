"""The closing report: a table on the terminal and one picture, made from results folders alone."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import matplotlib as mpl
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from server_app.results import CLIENTS, CONFIG, ROUNDS, SCHEMA_VERSION, SUMMARY
from strategies import METHODS

mpl.use("Agg")  # before pyplot: a server has no screen, and runs report from a thread
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, PercentFormatter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from matplotlib.axes import Axes

__all__ = ["PICTURE", "ResultsError", "RunResults", "compare", "find_runs", "load_run", "make_console"]

PICTURE: Final = "comparison.png"
"""File name of the picture, in the run's folder."""

_WIDTH = 100
_DOTS_PER_INCH = 150
# Okabe and Ito's palette, which colour-blind readers can tell apart. FedPCD and FedAvg keep theirs in every
# picture.
_COLOURS: Final[Mapping[str, str]] = {"fedpcd": "#0072B2", "fedavg": "#D55E00"}
_OTHER_COLOURS: Final = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK = "#333333"
_CURVES: Final = (("mean", "mean", "-"), ("worst-10", "worst 10%", (0, (3, 1.5))))
_AVERAGED = 10
"""Fewer evaluations than these include the steep beginning, so their average says little."""
_LABEL_HEIGHT = 0.055
"""Least distance of two labels beside the curves, in units of accuracy."""


class ResultsError(ValueError):
    """A folder does not hold the results of a run, or not in a form that this version reads."""


@dataclass(frozen=True)
class RunResults:
    """Results of one strategy's run, as read from its folder.

    Attributes
    ----------
    folder : Path
        Where they lie.
    label : str
        Name in tables and pictures.
    strategy : str
        The method's name in the registry.
    config : dict
        ``config.json``.
    summary : dict
        ``summary.json``; empty if the run was killed before it could write one.
    evaluations : dict of int to dict
        Fairness metrics by round, in increasing order.
    accuracies : dict of str to float
        Each client's test accuracy in the last evaluated round.
    """

    folder: Path
    label: str
    strategy: str
    config: dict[str, Any]
    summary: dict[str, Any]
    evaluations: dict[int, dict[str, Any]]
    accuracies: dict[str, float]

    @property
    def final(self) -> dict[str, Any] | None:
        """Fairness metrics of the last evaluated round, or None if no round was evaluated."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else None


def load_run(folder: Path) -> RunResults:
    """Read the results of one strategy's run, finished or not.

    Parameters
    ----------
    folder : Path
        The strategy's folder (``<results-dir>/<run-name>/<strategy>``).

    Returns
    -------
    RunResults
        What the folder holds. A line that was cut off when the run was killed is left out.

    Raises
    ------
    ResultsError
        If files are missing, malformed or of another schema version; names the file.
    """
    config = _read_json(folder / CONFIG)
    if config.get("schema-version") != SCHEMA_VERSION:
        raise ResultsError(
            f"{folder / CONFIG} has schema version {config.get('schema-version')!r}; "
            f"this version reads {SCHEMA_VERSION}"
        )
    strategy = str(config.get("strategy"))
    evaluations = {
        line["round"]: line["evaluation"] for line in _read_json_lines(folder / ROUNDS) if line["evaluation"]
    }
    summary = _read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else {}
    accuracies = _read_accuracies(folder / CLIENTS, max(evaluations, default=0))
    return RunResults(folder, _title(strategy), strategy, config, summary, evaluations, accuracies)


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Find the strategies' folders in or at the given folders.

    Parameters
    ----------
    folders : iterable of Path
        Folders of a strategy (returned as they are) or of a run (its strategies' folders are returned, in the
        order in which they were trained).

    Returns
    -------
    list of Path
        Folders that `load_run` reads.

    Raises
    ------
    ResultsError
        If a folder holds no results.
    """
    found = []
    for folder in folders:
        if (folder / CONFIG).is_file():
            found.append(folder)
            continue
        children = [child.parent for child in folder.glob(f"*/{CONFIG}")]
        if not children:
            raise ResultsError(f"{folder} holds no results: expected {CONFIG} in it, or in the folders that it holds")
        found += sorted(children, key=lambda child: (child / CONFIG).stat().st_mtime_ns)
    return found


def compare(folders: Iterable[Path], picture: Path | None = None) -> tuple[Table, Path]:
    """Compare runs: a table, and a picture of accuracies per client and of convergence.

    Parameters
    ----------
    folders : iterable of Path
        Folders of strategies or of whole runs.
    picture : Path, optional
        Where the picture goes; by default ``comparison.png`` beside the first strategy's folder.

    Returns
    -------
    table : Table
        One row per strategy's run; print it with `make_console`.
    picture : Path
        The picture (PNG).

    Raises
    ------
    ResultsError
        If a folder holds no readable results, or none of them holds an evaluation.
    """
    runs = _label_apart([load_run(folder) for folder in find_runs(folders)])
    if not any(run.evaluations for run in runs):
        raise ResultsError(
            "nothing to compare: no round was evaluated in " + ", ".join(str(run.folder) for run in runs)
        )
    target = picture if picture is not None else runs[0].folder.parent / PICTURE
    _draw(runs, target)
    return _table(runs), target


def make_console(file: TextIO | None = None) -> Console:
    """Make the console for tables: coloured on a terminal; elsewhere 100 columns of plain text.

    Parameters
    ----------
    file : text file, optional
        Where it prints; by default standard output.

    Returns
    -------
    Console
        The console.
    """
    stream = sys.stdout if file is None else file
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, width=_WIDTH, force_terminal=False, color_system=None, highlight=False)


# ---- reading


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultsError(f"{path.parent} holds no results of a run: {path.name} is missing") from None
    except ValueError as error:
        raise ResultsError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ResultsError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _complete_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ResultsError(f"{path.parent} holds no results of a run: {path.name} is missing") from None
    return text.split("\n")[:-1]  # what follows the last line feed was cut off


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for number, line in enumerate(_complete_lines(path), start=1):
        try:
            content = json.loads(line)
        except ValueError as error:
            raise ResultsError(f"{path}, line {number}, is no valid JSON: {error}") from error
        if not isinstance(content, dict) or not {"round", "evaluation"} <= content.keys():
            raise ResultsError(f"{path}, line {number}, is no round: 'round' and 'evaluation' are expected")
        lines.append(content)
    return lines


def _read_accuracies(path: Path, server_round: int) -> dict[str, float]:
    try:
        rows = csv.DictReader(_complete_lines(path))
        return {row["client_id"]: float(row["accuracy"]) for row in rows if int(row["round"]) == server_round}
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} is malformed: {error!r}") from error


def _title(strategy: str) -> str:
    return METHODS[strategy].__name__ if strategy in METHODS else strategy


def _label_apart(runs: Sequence[RunResults]) -> list[RunResults]:
    """Add the run's name to labels that would occur twice."""
    labels = [run.label for run in runs]
    return [
        RunResults(**{**vars(run), "label": f"{run.label} ({run.folder.parent.name})"})
        if labels.count(run.label) > 1
        else run
        for run in runs
    ]


# ---- table


def _table(runs: Sequence[RunResults]) -> Table:
    table = Table(
        title=f"Fairness over all clients: {_setting(runs[0])}",
        caption="\n".join(_notes(runs)),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("strategy", no_wrap=True)
    for name in ("mean", "sigma_c", "worst 10%", "best 10%", "Jain", "worst client", "rounds", "seconds"):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(run.label, *_cells(run))
    return table


def _cells(run: RunResults) -> list[str]:
    rounds, seconds = (run.summary.get(name) for name in ("rounds", "seconds"))
    ending = [
        str(max(run.evaluations, default=0) if rounds is None else rounds),
        "-" if seconds is None else f"{seconds:.1f}",
    ]
    final = run.final
    if final is None:
        return ["-"] * 6 + ending
    return [
        *(f"{final[name]:.1%}" for name in ("mean", "sigma-c", "worst-10", "best-10")),
        f"{final['jain']:.3f}",
        f"{final['worst-accuracy']:.1%} (id {final['worst-client']})",
        *ending,
    ]


def _notes(runs: Sequence[RunResults]) -> Iterator[str]:
    """Yield what a reader must know beside the figures; nothing for a run without incidents."""
    yield "Accuracy of the last evaluated model on each client's own test examples."
    for run in runs:
        average = run.summary.get("fairness-last-evaluations")
        if average and average["evaluations"] >= _AVERAGED:
            yield (
                f"{run.label}, average of the last {average['evaluations']} evaluations: "
                f"mean {average['mean']:.1%}, worst 10% {average['worst-10']:.1%}."
            )
        incidents = list(_incidents(run))
        if incidents:
            yield f"{run.label}: " + "; ".join(incidents) + "."


def _incidents(run: RunResults) -> Iterator[str]:
    summary = run.summary
    if not summary:
        yield "unfinished, the run ended without a summary"
    elif summary["status"] != "completed":
        yield f"{summary['status']} after round {summary['rounds']}: {summary['error']}"
    if run.final and run.final["missing-clients"]:
        yield f"{len(run.final['missing-clients'])} clients missing from the last evaluation"
    for name in ("skipped", "infeasible", "uncertified"):
        if count := summary.get(f"{name}-rounds"):
            yield f"{count} {name} round{'s' if count > 1 else ''}"
    for name, phase in (("rejections", "training"), ("evaluation-rejections", "evaluation")):
        counts = {kind: count for kind, count in summary.get(name, {}).items() if count}
        if counts:
            listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            yield f"{phase} replies rejected: {listed}, see rejections.jsonl"


def _setting(run: RunResults) -> str:
    """Describe the setting that the compared runs share, from the first one's run config."""
    config = run.config.get("run-config", {})
    parts = [str(config.get("dataset", "unknown data"))]
    parts.append(f"{len(run.config.get('client-ids', ()))} clients")
    partition = config.get("partition")
    if partition in ("dirichlet", "dirichlet-classes"):
        parts.append(f"Dirichlet alpha {config.get('alpha'):g}")
    elif partition is not None:
        parts.append(str(partition))
    if "fraction-train" in config:
        parts.append(f"{config['fraction-train']:.0%} per round")
    if "seed" in config:
        parts.append(f"seed {config['seed']}")
    return ", ".join(parts)


# ---- picture


def _draw(runs: Sequence[RunResults], target: Path) -> None:
    colours = _colours(runs)
    with plt.rc_context({"font.size": 10, "axes.edgecolor": _INK, "text.color": _INK, "axes.labelcolor": _INK}):
        figure, (clients, convergence) = plt.subplots(
            1, 2, figsize=(12, 4.6), width_ratios=(1, 1), layout="constrained"
        )
        try:
            figure.suptitle(_setting(runs[0]), fontsize=11)
            _draw_clients(clients, runs, colours)
            _draw_convergence(convergence, runs, colours)
            figure.savefig(target, dpi=_DOTS_PER_INCH)
        finally:
            plt.close(figure)


def _colours(runs: Sequence[RunResults]) -> list[str]:
    """Give each run a colour; FedPCD and FedAvg have their own, unless they occur more than once."""
    free = cycle(_OTHER_COLOURS)
    colours: list[str] = []
    for run in runs:
        own = _COLOURS.get(run.strategy)
        colours.append(own if own is not None and own not in colours else next(free))
    return colours


def _draw_clients(axes: Axes, runs: Sequence[RunResults], colours: Sequence[str]) -> None:
    most = max(len(run.accuracies) for run in runs)
    tail = -(-most // 10)
    axes.axvspan(0.5, tail + 0.5, color="#000000", alpha=0.06, linewidth=0)
    axes.text(0.5 + most * 0.01, 1.035, "worst 10%", ha="left", va="center", fontsize=9)
    for run, colour in zip(runs, colours, strict=True):
        ascending = sorted(run.accuracies.values())
        axes.plot(
            range(1, len(ascending) + 1),
            ascending,
            color=colour,
            linewidth=1.2,
            marker="o",
            markersize=max(2.0, 5.0 - most / 40),
            label=run.label,
        )
    axes.set_title(f"Test accuracy of each client after {_rounds(runs)}")
    axes.set_xlabel("clients, from worst to best served")
    axes.set_xlim(0.5, most + 0.5)
    axes.legend(loc="lower right", frameon=False)
    _style(axes)


def _rounds(runs: Sequence[RunResults]) -> str:
    last = {max(run.evaluations) for run in runs if run.evaluations}
    return f"{last.pop()} rounds" if len(last) == 1 else "the last evaluated round"


def _draw_convergence(axes: Axes, runs: Sequence[RunResults], colours: Sequence[str]) -> None:
    ends = []
    for run, colour in zip(runs, colours, strict=True):
        rounds = list(run.evaluations)
        for name, words, dashes in _CURVES:
            values = [evaluation[name] for evaluation in run.evaluations.values()]
            axes.plot(rounds, values, color=colour, linestyle=dashes, linewidth=1.8)
            if values:
                ends.append((values[-1], f"{run.label}, {words} {values[-1]:.1%}", colour))
    _label_ends(axes, ends)
    axes.set_title("Convergence: mean (solid) and worst 10% (dashed)")
    axes.set_xlabel("round")
    axes.set_xlim(0, max(1, *(max(run.evaluations, default=0) for run in runs)))
    _style(axes)


def _label_ends(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each curve's name beside its end, moved up or down where two would overlap."""
    ends = sorted(ends)
    heights = [value for value, _, _ in ends]
    for lower, upper in pairwise(range(len(heights))):
        heights[upper] = max(heights[upper], heights[lower] + _LABEL_HEIGHT)
    ceiling = 1.0 + _LABEL_HEIGHT
    for index in reversed(range(len(heights))):
        ceiling = heights[index] = min(heights[index], ceiling - _LABEL_HEIGHT)
    for height, (_, text, colour) in zip(heights, ends, strict=True):
        axes.text(1.015, height, text, color=colour, va="center", transform=axes.get_yaxis_transform())


def _style(axes: Axes) -> None:
    axes.set_ylabel("test accuracy")
    axes.set_ylim(0.0, 1.07)
    axes.set_yticks([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
