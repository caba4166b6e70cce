"""What happened in a round, for the results on disk and for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["error", "invalid", "silent"]


@dataclass(frozen=True)
class Rejection:
    """One client whose reply did not count in one round.

    Parameters
    ----------
    client_id : str
        The client.
    kind : {"error", "invalid", "silent"}
        "error": the client reported an error. "invalid": its reply was refused. "silent": it did not answer in time.
    reason : str
        In words, with the name of what was wrong.
    """

    client_id: str
    kind: Kind
    reason: str


@dataclass(frozen=True)
class RoundReport:
    """One round of training.

    Parameters
    ----------
    round : int
        Counted from 1.
    cohort : tuple of str
        The clients that were asked to train.
    accepted : tuple of str
        Those whose updates were aggregated.
    rejections : tuple of Rejection
        All others, with reasons.
    skipped : bool
        True if no update was usable and the model stayed as it was.
    diagnostics : dict
        The rule's account of the round (JSON values).
    train_metrics : dict of str to dict of str to float
        What each accepted client measured.
    seconds : dict of str to float
        Wall-clock seconds: "clients" (waiting for replies) and "aggregation".
    """

    round: int
    cohort: tuple[str, ...]
    accepted: tuple[str, ...]
    rejections: tuple[Rejection, ...]
    skipped: bool
    diagnostics: dict[str, Any] = field(default_factory=dict)
    train_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationReport:
    """One round of federated evaluation.

    Parameters
    ----------
    round : int
        Counted from 1.
    metrics : dict of str to dict of str to float
        What each client measured on its own test examples.
    rejections : tuple of Rejection
        Clients that gave no usable answer.
    """

    round: int
    metrics: dict[str, dict[str, float]]
    rejections: tuple[Rejection, ...]
