"""What people see of a run that goes on: one line per round instead of Flower's log."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server_app.fairness import Fairness
    from strategies.reports import RoundReport

__all__ = ["clock", "evaluation_parts", "quiet_loop", "training_parts"]

# What Flower says in every round, the dump of all records at the end, and what looks like a fault and is none: that
# nobody evaluates, that a record is empty, the settings of Flower's own sampling, which these strategies replace.
# The progress lines and the results folder say the same, shorter and completely. Everything else passes.
_LOOP_MESSAGES: Final = frozenset(
    {
        "",
        "fraction_evaluate is set to 0.0. Federated evaluation will be skipped.",
        "\t├── ConfigRecord (train): %s",
        "\t├── ConfigRecord (evaluate): %s",
        "\t├──> Sampling:",
        "\t│\t├──Fraction: train (%.2f) | evaluate ( %.2f)",
        "\t│\t├──Minimum nodes: train (%d) | evaluate (%d)",
        "\t│\t└──Minimum available nodes: %d",
        "\t└──> Keys in records:",
        "\t\t├── Weighted by: '%s'",
        "\t\t├── ArrayRecord key: '%s'",
        "\t\t└── ConfigRecord key: '%s'",
        "[ROUND %s/%s]",
        "configure_train: Sampled %s nodes (out of %s)",
        "configure_evaluate: Sampled %s nodes (out of %s)",
        "%s: Received %s results and %s failures",
        "configure_train: %s of %s clients",
        "%s: %s replies count, %s do not",
        "Initial global evaluation results: %s",
        "Global evaluation",
        "\t└──> MetricRecord: %s",
        "\t└──> Aggregated MetricRecord: %s",
        "Final results:",
        "\t%s",
    }
)


def evaluation_parts(result: Fairness | None) -> list[str]:
    """The fairness of a round's model in few words."""
    if result is None:
        return ["not evaluated"]
    return [f"mean {result.mean:6.1%}", f"worst 10% {result.worst_10:6.1%}"]


def training_parts(report: RoundReport) -> Iterator[str]:
    """Yield what the round's aggregation has to tell in few words."""
    found = report.diagnostics
    if "constraints-active" in found:
        constraints = found.get("constraints-current", 0) + found.get("constraints-cached", 0)
        yield f"active {found['constraints-active']:>3}/{constraints:<3}"
    if "direction-norm" in found:
        yield f"|d*| {found['direction-norm']:.3f}"
    if found.get("status") not in (None, "inactive", "solved"):
        yield str(found["status"])
    if report.skipped:
        yield "SKIPPED"
    yield f"rejected {len(report.rejections)}"


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def quiet_loop() -> Iterator[None]:
    """Leave out what Flower's loop logs in every round, as long as a strategy runs."""

    def passes(record: logging.LogRecord) -> bool:
        return record.msg not in _LOOP_MESSAGES

    logger = logging.getLogger("flwr")
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)
