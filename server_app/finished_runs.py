"""Results of finished runs, read back from their folders."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server_app.result_files import CLIENTS, CONFIG, ROUNDS, SCHEMA_VERSION, SUMMARY
from strategies import METHODS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


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
    return RunResults(folder, method_name(strategy), strategy, config, summary, evaluations, accuracies)


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


def method_name(strategy: str) -> str:
    """Return the class name of a registered method; any other name stays as it is."""
    return METHODS[strategy].__name__ if strategy in METHODS else strategy


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
