"""What a run leaves on disk, written while it goes on: one folder per strategy (docs/results.md)."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self

from server_app.fairness import Fairness, fairness
from server_app.result_files import (
    CLIENTS,
    CONFIG,
    MODEL,
    REJECTIONS,
    ROUNDS,
    SCHEMA_VERSION,
    SUMMARY,
    csv_line,
    json_line,
    write_json,
    write_model,
)
from server_app.run_folder import lock
from strategies.protocol import ACCURACY, LOSS, NUM_EXAMPLES
from strategies.rules import client_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from types import TracebackType

    from flwr.app import ArrayRecord

    from strategies.reports import Rejection, RoundReport

__all__ = ["ResultsWriter", "versions"]

_GROWING: Final = (ROUNDS, REJECTIONS, CLIENTS)
_CLIENT_COLUMNS = ("round", "client_id", "accuracy", "loss", "num_examples")
_AVERAGED_EVALUATIONS = 10
_AVERAGED_METRICS = ("mean", "sigma-c", "worst-10", "best-10", "jain")
_PACKAGES = ("fedpcd", "flwr", "torch", "numpy", "proxsuite")


def versions() -> dict[str, str | None]:
    """Find the versions of what decides the numbers.

    Returns
    -------
    dict
        Version by package name, and of Python; None for a package that is not installed (``fedpcd`` itself,
        where Flower runs the app from its bundle).
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


class ResultsWriter:
    """Writes the results of one strategy's run, each as soon as it is known.

    A round's line is on disk when the round is aggregated, and is completed when the round is evaluated, so a
    run that dies keeps everything up to that moment. Use it as a context manager: an exception that passes
    through it is recorded in the summary, with status ``failed``.

    Parameters
    ----------
    folder : Path
        The strategy's folder: created, or, to go on in it, existing.
    config : mapping
        What the run was made of; written as given, plus schema version, package versions and starting time.
        Its ``strategy`` and ``client-ids`` are used here too. Going on, it replaces the old one.
    resumed : mapping of str to int, optional
        To go on: the size in bytes of each file of `sizes` at the end of the last complete round. What was written
        after it is removed.
    seconds : float
        Wall-clock seconds that the run had taken by then.

    Raises
    ------
    FileExistsError
        If a new run's folder exists.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], resumed: Mapping[str, int] | None = None, seconds: float = 0.0
    ) -> None:
        if resumed is None:
            folder.mkdir(parents=True)
        self.folder = folder
        self._strategy = str(config["strategy"])
        self._client_ids = tuple(str(client) for client in config["client-ids"])
        self._started = time.perf_counter() - seconds
        self._rounds: dict[int, dict[str, Any]] = {}
        self._rejections: dict[str, Counter[str]] = {"train": Counter(), "evaluate": Counter()}
        self._finished = False
        self._last_line = 0
        self._files = {name: (folder / name).open("x+b" if resumed is None else "r+b") for name in _GROWING}
        lock(self._files[ROUNDS], folder)
        started = {"schema-version": SCHEMA_VERSION, "started": _now(), "versions": versions()}
        if resumed is None:
            write_json(folder / CONFIG, {**started, **config})
            self._append(CLIENTS, csv_line(_CLIENT_COLUMNS))
        else:
            (folder / SUMMARY).unlink(missing_ok=True)
            write_json(folder / CONFIG, config)
            self._take_up(resumed)

        self.latest: ArrayRecord | None = None
        """The newest model, which is kept if the run ends early."""
        self.checkpoint_bytes = 0
        """Largest size of the checkpoints on disk."""

    @property
    def rounds(self) -> Mapping[int, Mapping[str, Any]]:
        """The lines of ``rounds.jsonl`` by round."""
        return self._rounds

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of the files that grow with every round."""
        return {name: file.tell() for name, file in self._files.items()}

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of this run so far, without the time between its parts."""
        return time.perf_counter() - self._started

    def _take_up(self, sizes: Mapping[str, int]) -> None:
        """Cut the files off after the last complete round, and remember what they hold."""
        for name, file in self._files.items():
            file.truncate(sizes[name])
        for line in self._files[ROUNDS].readlines():
            content = json.loads(line)
            self._rounds[content["round"]] = content
        for line in self._files[REJECTIONS].readlines():
            record = json.loads(line)
            self._rejections[record["phase"]][record["kind"]] += 1
        self._files[CLIENTS].seek(0, os.SEEK_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        if not self._finished:
            if self.latest is not None:
                write_model(self.folder / MODEL, self.latest)
            reason = "the run ended early" if error is None else f"{type(error).__name__}: {error}"
            write_json(self.folder / SUMMARY, self._summary("failed", reason))

    def record_round(self, report: RoundReport) -> None:
        """Write a round's line and its rejections.

        Parameters
        ----------
        report : RoundReport
            The strategy's account of the round; rounds come in increasing order.
        """
        self._write_line(
            {
                "round": report.round,
                "cohort": report.cohort,
                "accepted": report.accepted,
                "rejected": len(report.rejections),
                "skipped": report.skipped,
                "diagnostics": report.diagnostics,
                "train": _summarise_training(report.train_metrics),
                "seconds": report.seconds,
                "evaluation": None,
            }
        )
        self.record_rejections(report.round, "train", report.rejections)

    def record_rejections(self, server_round: int, phase: str, rejections: Iterable[Rejection]) -> None:
        """Write who was rejected, and why.

        Parameters
        ----------
        server_round : int
            The round.
        phase : {"train", "evaluate"}
            What the client was asked for.
        rejections : iterable of Rejection
            One per client.
        """
        for rejection in rejections:
            self._rejections[phase][rejection.kind] += 1
            record = {
                "round": server_round,
                "phase": phase,
                "client_id": rejection.client_id,
                "kind": rejection.kind,
                "reason": rejection.reason,
            }
            self._append(REJECTIONS, json_line(record))

    def record_evaluation(
        self,
        server_round: int,
        metrics: Mapping[str, Mapping[str, float]],
        variants: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Fairness | None:
        """Write each client's test metrics and complete the round's line with the fairness metrics.

        Parameters
        ----------
        server_round : int
            The round; 0 is the initial model.
        metrics : mapping of str to mapping
            By client id: accuracy, loss and number of examples, under the protocol's names. Clients of the
            roster that are absent here are named in the line.
        variants : mapping of str to mapping, optional
            Accuracies by client id of other models of the method, by the models' name: ``personal`` (each client's
            own), ``last-iterate`` (where the method's result is an average). They get their own fairness metrics, in
            the evaluation's ``variants``, and are never mixed with those of the global model.

        Returns
        -------
        Fairness or None
            The fairness metrics over the clients that are present; None if there is none.
        """
        rows = []
        for client in sorted(metrics, key=client_order):
            values = metrics[client]
            row = (
                server_round,
                client,
                float(values[ACCURACY]),
                float(values[LOSS]),
                int(values[NUM_EXAMPLES]),
            )
            rows.append(csv_line(row))
        self._append(CLIENTS, b"".join(rows))

        result = fairness({client: float(values[ACCURACY]) for client, values in metrics.items()}) if metrics else None
        line = self._rounds.get(server_round) or _line_without_training(server_round)
        if result is not None:
            losses = [float(metrics[client][LOSS]) for client in sorted(metrics, key=client_order)]
            line["evaluation"] = {
                **result.as_json(),
                "mean-loss": _mean(losses),
                "missing-clients": [client for client in self._client_ids if client not in metrics],
            }
            if variants:
                line["evaluation"]["variants"] = {name: fairness(found).as_json() for name, found in variants.items()}
        self._write_line(line)
        return result

    def finish(self, arrays: ArrayRecord) -> dict[str, Any]:
        """Write the final model and the summary.

        Parameters
        ----------
        arrays : ArrayRecord
            The final model.

        Returns
        -------
        dict
            The summary, as in ``summary.json``.
        """
        write_model(self.folder / MODEL, arrays)
        summary = self._summary("completed", None)
        write_json(self.folder / SUMMARY, summary)
        self._finished = True
        return summary

    def _summary(self, status: str, error: str | None) -> dict[str, Any]:
        trained = [line for server_round, line in self._rounds.items() if server_round > 0]
        programs = Counter(line["diagnostics"].get("status", "none") for line in trained if not line["skipped"])
        evaluated = [line for line in self._rounds.values() if line["evaluation"]]
        last = evaluated[-1] if evaluated else None
        return {
            "schema-version": SCHEMA_VERSION,
            "status": status,
            "error": error,
            "strategy": self._strategy,
            "clients": len(self._client_ids),
            "rounds": len(trained),
            "skipped-rounds": sum(line["skipped"] for line in trained),
            "programs": dict(sorted(programs.items())),
            "infeasible-rounds": programs["infeasible"],
            "uncertified-rounds": programs["uncertified"],
            "rejections": _by_kind(self._rejections["train"]),
            "evaluation-rejections": _by_kind(self._rejections["evaluate"]),
            "evaluated-round": last["round"] if last else None,
            "fairness": last["evaluation"] if last else None,
            "fairness-last-evaluations": _average([line["evaluation"] for line in evaluated if line["round"] > 0]),
            "checkpoint-bytes": self.checkpoint_bytes,
            "seconds": self.seconds,
        }

    def _write_line(self, line: dict[str, Any]) -> None:
        """Append the round's line, or replace it where it is the last one."""
        server_round = line["round"]
        if server_round in self._rounds and server_round != max(self._rounds):
            raise ValueError(f"round {server_round} is over: its line in {ROUNDS} cannot change any more")
        encoded = json_line(line)
        file = self._files[ROUNDS]
        if server_round in self._rounds:
            file.seek(self._last_line)
            file.truncate()
        self._last_line = file.tell()
        self._rounds[server_round] = line
        self._append(ROUNDS, encoded)

    def _append(self, name: str, content: bytes) -> None:
        self._files[name].write(content)
        self._files[name].flush()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _line_without_training(server_round: int) -> dict[str, Any]:
    """Build the line of the initial model, or of a round whose report never came."""
    return {
        "round": server_round,
        "cohort": [],
        "accepted": [],
        "rejected": 0,
        "skipped": False,
        "diagnostics": {},
        "train": {},
        "seconds": {},
        "evaluation": None,
    }


def _summarise_training(train_metrics: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Summarise over the cohort: the examples in all, and mean, min and max of every other metric."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for client in sorted(train_metrics, key=client_order):
        for name, value in train_metrics[client].items():
            values[name].append(float(value))
    summary: dict[str, Any] = {name: _mean_min_max(found) for name, found in sorted(values.items())}
    if NUM_EXAMPLES in values:
        summary[NUM_EXAMPLES] = int(sum(values[NUM_EXAMPLES]))
    return summary


def _mean_min_max(values: list[float]) -> dict[str, float]:
    return {"mean": _mean(values), "min": min(values), "max": max(values)}


def _mean(values: list[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # Clients may claim any finite number.
        return math.fsum(value / len(values) for value in values)


def _average(evaluations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Average the last evaluations: single rounds of FedAvg swing by more than methods differ."""
    last = evaluations[-_AVERAGED_EVALUATIONS:]
    if not last:
        return None
    return {"evaluations": len(last)} | {name: _mean([item[name] for item in last]) for name in _AVERAGED_METRICS}


def _by_kind(counts: Counter[str]) -> dict[str, int]:
    return {kind: counts[kind] for kind in ("error", "invalid", "silent")}
