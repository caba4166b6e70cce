"""The closing report: a table on the terminal and a picture beside it, made from results folders alone."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from itertools import chain
from itertools import count as numbers
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from server_app.finished_runs import ResultsError, RunResults, find_runs, load_run
from server_app.labels import count, difference, labels, shared_setting
from server_app.picture import picture as draw_picture

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import ConsoleOptions, RenderResult

__all__ = ["PICTURE", "FairnessTable", "ResultsError", "RunResults", "compare", "find_runs", "load_run", "make_console"]

PICTURE: Final = "comparison.png"
"""File name of the picture."""

_WIDTH = 100
_LABEL_WIDTH = 16
"""Width that a label keeps, at the cost of expendable columns; a longer one is folded."""
_UNLIMITED = 10_000
_COLUMNS: Final = ("mean", "sigma_c", "worst\n10%", "best\n10%", "Jain", "worst\nclient", "id", "rounds", "seconds")
_EXPENDABLE: Final = ("seconds", "Jain", "best\n10%", "rounds", "id")
"""Columns that a narrow terminal does without, the first one first."""
_VARIANTS: Final = {
    "personal": "the clients' personal models (not in the table)",
    "last-iterate": "the last iterate instead of the average (not in the table)",
}
_AVERAGED = 10
"""Fewer evaluations than these include the steep beginning, so their average says little."""


def compare(folders: Iterable[Path], picture: Path | None = None) -> tuple[FairnessTable, Path]:
    """Compare runs: a table, and a picture of accuracies per client and of convergence.

    Parameters
    ----------
    folders : iterable of Path
        Folders of strategies or of whole runs.
    picture : Path, optional
        Where the picture goes; a file that is there is replaced. By default ``comparison.png`` in the run's folder,
        or in the working directory if the strategies do not all lie in one run's folder; if another picture is
        there already, ``comparison-2.png``, ``comparison-3.png``, ...

    Returns
    -------
    table : FairnessTable
        One row per strategy's run; print it with `make_console`.
    picture : Path
        The picture (PNG).

    Raises
    ------
    ResultsError
        If a folder holds no readable results, none of them holds an evaluation, or the picture cannot be written.
    """
    places = dict.fromkeys(folder.resolve() for folder in find_runs(folders))  # each once, however often it is named
    runs = [load_run(folder) for folder in places]
    runs = [dataclasses.replace(run, label=label) for run, label in zip(runs, labels(runs), strict=True)]
    if not any(run.evaluations for run in runs):
        raise ResultsError(
            "nothing to compare: no round was evaluated in " + ", ".join(str(run.folder) for run in runs)
        )
    return FairnessTable(runs), _save(draw_picture(runs), places, picture)


def make_console(file: TextIO | None = None) -> Console:
    """Make the console for tables: coloured on a terminal, plain text elsewhere.

    Elsewhere the width is that of the environment variable COLUMNS, by default 100.

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
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) > 0 else _WIDTH
    return Console(file=stream, width=width, force_terminal=False, color_system=None, highlight=False)


@dataclass(frozen=True)
class FairnessTable:
    """One row per run, for rich's consoles; where it does not fit, the least important columns are left out."""

    runs: Sequence[RunResults]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        hidden = self._hidden(console, options)
        yield Text(": ".join(filter(None, ("Fairness over all clients", shared_setting(self.runs)))), style="italic")
        yield ""
        yield _table(self.runs, hidden)
        notes = list(_notes(self.runs))
        if hidden:
            notes.append("Left out at this width: " + ", ".join(hidden).replace("\n", " ") + ".")
        yield ""
        yield Text("\n".join(notes), style="dim italic")

    def _hidden(self, console: Console, options: ConsoleOptions) -> Sequence[str]:
        unlimited = options.update_width(_UNLIMITED)
        for number in range(len(_EXPENDABLE)):
            table = _table(self.runs, _EXPENDABLE[:number])
            if Measurement.get(console, unlimited, table).minimum <= options.max_width:
                return _EXPENDABLE[:number]
        return _EXPENDABLE


def _table(runs: Sequence[RunResults], hidden: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    longest_label = max(len(run.label) for run in runs)
    table.add_column("strategy", overflow="fold", min_width=min(longest_label, _LABEL_WIDTH))
    columns: list[Sequence[str]] = [[run.label for run in runs]]
    for name, cells in zip(_COLUMNS, zip(*map(_cells, runs), strict=True), strict=True):
        if name not in hidden:
            width = max(map(len, (*name.split("\n"), *cells)))
            table.add_column(name, justify="right", no_wrap=True, min_width=width)
            columns.append(cells)
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    return table


def _cells(run: RunResults) -> list[str]:
    rounds, seconds = (run.summary.get(name) for name in ("rounds", "seconds"))
    ending = [
        str(max(run.evaluations, default=0) if rounds is None else rounds),
        "-" if seconds is None else f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}",
    ]
    final = run.final
    if final is None:
        return ["-"] * 7 + ending
    return [
        *(f"{final[name]:.1%}" for name in ("mean", "sigma-c", "worst-10", "best-10")),
        f"{final['jain']:.3f}",
        f"{final['worst-accuracy']:.1%}",
        str(final["worst-client"]),
        *ending,
    ]


def _notes(runs: Sequence[RunResults]) -> Iterator[str]:
    """Yield what a reader must know beside the figures; nothing for a run without incidents."""
    yield "Accuracy of the last evaluated model on each client's own test examples."
    if differing := difference(runs):
        yield f"{differing[0].upper()}{differing[1:]}."
    for run in runs:
        average = run.summary.get("fairness-last-evaluations")
        if average and average["evaluations"] >= _AVERAGED:
            yield (
                f"{run.label}, average of the last {average['evaluations']} evaluations: "
                f"mean {average['mean']:.1%}, worst 10% {average['worst-10']:.1%}."
            )
        for variant, found in (run.final or {}).get("variants", {}).items():
            yield (
                f"{run.label}, {_VARIANTS.get(variant, variant)}: mean {found['mean']:.1%}, "
                f"sigma {found['sigma-c']:.1%}, worst 10% {found['worst-10']:.1%}, Jain {found['jain']:.3f}."
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
        yield f"{count(len(run.final['missing-clients']), 'client')} missing from the last evaluation"
    for name in ("skipped", "infeasible", "uncertified"):
        if number := summary.get(f"{name}-rounds"):
            yield count(number, f"{name} round")
    for name, phase in (("rejections", "training"), ("evaluation-rejections", "evaluation")):
        counts = {kind: number for kind, number in summary.get(name, {}).items() if number}
        if counts:
            listed = ", ".join(f"{number} {kind}" for kind, number in counts.items())
            yield f"{phase} replies rejected: {listed}, see rejections.jsonl"


# ---- picture


def _save(content: bytes, folders: Iterable[Path], picture: Path | None) -> Path:
    target = _free_path(content, folders) if picture is None else picture
    try:
        if not _holds(target, content):
            target.write_bytes(content)
    except OSError as error:
        raise ResultsError(
            f"the picture cannot be written to {target} ({error}): give another path, or run this in a folder that "
            "can be written"
        ) from error
    return target


def _free_path(content: bytes, folders: Iterable[Path]) -> Path:
    """Find the picture's default path; only a file with the same content counts as free."""
    parents = {folder.parent for folder in folders}
    parent = parents.pop() if len(parents) == 1 else Path.cwd()
    name = Path(PICTURE)
    paths = (parent / f"{name.stem}-{number}{name.suffix}" for number in numbers(2))
    return next(path for path in chain([parent / name], paths) if not path.exists() or _holds(path, content))


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content
