"""From client replies to validated updates. Knows nothing of Flower.

The server trusts no reply: names, shapes, kinds of dtype, finiteness, example counts, metrics, duplicates and lengths
are checked (``wire.py`` looks at the bytes before), and a reply that fails costs its sender the round, never the run.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .model import Arrays, Model
from .reports import Rejection
from .rules import Updates, client_order
from .rules.gram import norm
from .rules.updates import METRIC_NEEDS, NEWTON_DIRECTION, Row, TrialLosses

_MOST_EXAMPLES = 2**53
"""Beyond it counts are no longer exact in float64, and their sum may overflow."""
EXAMPLES_SCREEN = 1000.0
"""Default of `screen`: how many times the others' median a client's number of examples may be."""
MOST_METRICS = 256
LONGEST_KEY = 128
"""Characters of a metric's name; names go to the log and to the results of every round."""
_LONGEST_TEXT = 1000
"""Characters of a client's own words in a reason."""


class MissingNeedError(RuntimeError):
    """No client delivers something that the rule cannot work without."""


class SecureAggregationError(RuntimeError):
    """All clients sent the same update: individual updates are hidden, and no rule of this package can work."""


@dataclass(frozen=True)
class Reply:
    """A client's answer, unchecked.

    Parameters
    ----------
    client_id : str
        Who was asked.
    arrays : mapping of str to ndarray, or None
        The trained model.
    num_examples : object
        What the client claims; should be a number > 0.
    metrics : mapping
        Other numbers it measured.
    error : str or None
        The error's text, if the client reported one.
    newton_direction : mapping of str to ndarray, or None
        Its quasi-Newton direction, by parameter name, for rules that need one.
    unreadable : str or None
        Why its arrays were not even deserialised.
    """

    client_id: str
    arrays: Arrays | None = None
    num_examples: object = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None
    newton_direction: Arrays | None = None
    unreadable: str | None = None


@dataclass(frozen=True)
class Accepted:
    """A reply that passed, as a row of displacements."""

    client_id: str
    row: Row
    length: float
    statistics: Row
    num_examples: float
    buffers: Arrays
    metrics: dict[str, float]
    newton_direction: Row | None = None


def screen(
    model: Model,
    replies: Iterable[Reply],
    cohort: Sequence[str],
    norm_screen: float,
    needs: Sequence[str] = (),
    examples_screen: float = EXAMPLES_SCREEN,
    recent_lengths: Sequence[float] = (),
) -> tuple[list[Accepted], list[Rejection]]:
    """Sort replies into usable updates, in stable order of clients, and rejections.

    Parameters
    ----------
    model : Model
        What was sent.
    replies : iterable of Reply
        What came back, in any order.
    cohort : sequence of str
        Who was asked.
    norm_screen : float
        An update longer than this many times the (lower) median length of the others' and of recent updates, zeros
        left out, is refused, unless it is no longer than the global model itself; 0 accepts any length. The median
        alone would not do: once most clients are well served their updates are tiny, and it is the badly served ones
        that still move.
    needs : sequence of str
        What the rule requires of every client; a reply without it is refused.
    examples_screen : float
        In cohorts of three or more a number of examples larger than this many times the others' (upper) median is
        refused; 0 accepts any number.
    recent_lengths : sequence of float
        Lengths of updates that were accepted in earlier rounds: without them, whoever has the majority in one small
        cohort would say what is long.

    Returns
    -------
    tuple of (list of Accepted, list of Rejection)
        Every client of the cohort appears exactly once, in one of the two; so does every stranger.
    """
    accepted: dict[str, Accepted] = {}
    rejections: dict[str, Rejection] = {}
    expected = set(cohort)
    for reply in replies:
        client_id = reply.client_id
        if client_id in accepted or client_id in rejections:
            accepted.pop(client_id, None)
            rejections[client_id] = Rejection(client_id, "invalid", "answered more than once; no answer counts")
        elif client_id not in expected:
            rejections[client_id] = Rejection(client_id, "invalid", "was not asked to take part in this round")
        else:
            outcome = _check(model, reply, needs)
            if isinstance(outcome, Accepted):
                accepted[client_id] = outcome
            else:
                rejections[client_id] = outcome
    for client_id in expected - accepted.keys() - rejections.keys():
        rejections[client_id] = silence(client_id)
    refused = {**_too_long(model, accepted, norm_screen, recent_lengths), **_too_many(accepted, examples_screen)}
    for client_id, reason in refused.items():
        del accepted[client_id]
        rejections[client_id] = Rejection(client_id, "invalid", reason)
    return (
        [accepted[c] for c in sorted(accepted, key=client_order)],
        [rejections[c] for c in sorted(rejections, key=client_order)],
    )


def to_updates(
    model: Model,
    accepted: Sequence[Accepted],
    server_round: int,
    local_learning_rate: float,
    needs: Sequence[str] = (),
    population: tuple[str, ...] = (),
    trial_losses: TrialLosses | None = None,
) -> Updates:
    """The updates of a round, from at least one accepted reply in stable order."""
    return Updates(
        server_round,
        tuple(reply.client_id for reply in accepted),
        tuple(reply.row for reply in accepted),
        np.array([reply.num_examples for reply in accepted]),
        local_learning_rate,
        metrics={key: np.array([r.metrics[key] for r in accepted]) for key in needs if key in METRIC_NEEDS},
        newton_directions=tuple(r.newton_direction for r in accepted if r.newton_direction is not None),
        trial_losses=trial_losses,
        population=population,
        arrays=model.array_slices,
        layers=model.layer_slices,
    )


def undelivered(replies: Iterable[Reply], needs: Sequence[str]) -> str | None:
    """The first need that not one of the replies (errors left out) delivers, or None; None too without replies."""
    answers = [reply for reply in replies if reply.error is None and reply.arrays is not None]
    for need in needs if answers else ():
        if need in METRIC_NEEDS and not any(need in reply.metrics for reply in answers):
            return need
        if need == NEWTON_DIRECTION and not any(reply.newton_direction for reply in answers):
            return need
    return None


def are_individual(accepted: Sequence[Accepted]) -> bool:
    """Whether the updates are evidently each client's own; False if that cannot be told yet.

    Under secure aggregation every row that reaches the strategy is the same sum.

    Raises
    ------
    SecureAggregationError
        If there are at least two updates, and all are the same non-zero row.
    """
    first = accepted[0].row
    if any(not np.array_equal(first, other.row) for other in accepted[1:]):
        return True
    if len(accepted) > 1 and first.any():
        raise SecureAggregationError(
            f"all {len(accepted)} clients sent exactly the same update, as happens under secure aggregation "
            "(SecAgg, SecAgg+). This strategy needs each client's own update to protect it: remove the secure "
            "aggregation mod or workflow, and use local differential privacy if updates must be protected."
        )
    return False


def shortened(text: str) -> str:
    """A client's own words, cut where they would fill the results."""
    return text[:_LONGEST_TEXT]


def silence(client_id: str) -> Rejection:
    """The rejection of a client that never answered."""
    return Rejection(client_id, "silent", "did not answer before the round's deadline")


def finite_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """The numbers among a client's metrics that are finite, as floats."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    }


def _check(model: Model, reply: Reply, needs: Sequence[str]) -> Accepted | Rejection:
    if reply.error is not None:
        return Rejection(reply.client_id, "error", shortened(reply.error))
    problem = reply.unreadable or metrics_problem(reply.metrics) or count_problem(reply.num_examples)
    if problem is None and reply.arrays is None:
        problem = "sent no arrays"
    if problem is None and reply.arrays is not None:
        problem = model.problem(reply.arrays)
    for need in needs if problem is None else ():
        problem = problem or _need_problem(model, reply, need)
    if problem is not None or reply.arrays is None:
        return Rejection(reply.client_id, "invalid", str(problem))
    row, statistics = model.displacement(reply.arrays), model.statistics(reply.arrays)
    if not (np.isfinite(row).all() and np.isfinite(statistics).all()):
        culprit = model.culprit(reply.arrays)
        reason = f"its update overflows {row.dtype}" if culprit is None else f"array {culprit!r} holds NaN or infinity"
        return Rejection(reply.client_id, "invalid", reason)
    buffers = {name: reply.arrays[name] for name in (*model.averaged, *model.counters)}
    count = float(reply.num_examples)  # type: ignore[arg-type]  # count_problem made sure that it is a number
    direction = reply.newton_direction
    return Accepted(
        reply.client_id,
        row,
        norm(row),
        statistics,
        count,
        buffers,
        finite_metrics(reply.metrics),
        model.flat(direction) if direction is not None and NEWTON_DIRECTION in needs else None,
    )


def _need_problem(model: Model, reply: Reply, need: str) -> str | None:
    if need == NEWTON_DIRECTION:
        return model.direction_problem(reply.newton_direction)
    if need not in METRIC_NEEDS:
        return None
    if need not in reply.metrics:
        return f"its metrics lack {need!r}, which this rule needs"
    value = finite_metrics(reply.metrics).get(need)
    if value is None or value < 0.0:
        return f"its metric {need!r} must be a finite number >= 0, got {_shown(reply.metrics[need])}"
    return None


def metrics_problem(metrics: Mapping[str, object]) -> str | None:
    """Why a client's metrics are not looked at, or None if they are."""
    if len(metrics) > MOST_METRICS:
        return f"sent {len(metrics)} metrics, more than {MOST_METRICS}"
    longest = max(map(len, metrics), default=0)
    if longest > LONGEST_KEY:
        return f"sent a metric whose name has {longest} characters, more than {LONGEST_KEY}"
    return None


def count_problem(value: object) -> str | None:
    """Why a number of examples cannot be used, or None if it can."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"num-examples must be a number > 0, got {_shown(value)}"
    if not _is_finite(value) or not 0 < value <= _MOST_EXAMPLES:
        return f"num-examples must be > 0 and at most {_MOST_EXAMPLES}, got {_shown(value)}"
    return None


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An int beyond the range of floats.
        return False


def _too_long(
    model: Model, accepted: Mapping[str, Accepted], norm_screen: float, recent: Sequence[float]
) -> dict[str, str]:
    if norm_screen <= 0.0:
        return {}
    refused: dict[str, str] = {}
    updates = {client_id: reply.length for client_id, reply in accepted.items()}
    statistics = {client_id: norm(reply.statistics) for client_id, reply in accepted.items()}
    kinds = (("update", updates, model.parameters, recent), ("statistics", statistics, model.averaged, ()))
    for what, lengths, names, earlier in kinds:
        own = math.hypot(*(norm(model.arrays[name].astype(model.row_dtype).ravel()) for name in names))
        for client_id, length in lengths.items():
            # Its own length is left out of the median, so that nobody vouches for himself in a small cohort.
            others = (other for c, other in lengths.items() if c != client_id)
            moving = sorted(other for other in (*others, *earlier) if other > 0.0)
            median = moving[(len(moving) - 1) // 2] if moving else 0.0
            if length > max(norm_screen * median, own) > 0.0:
                refused[client_id] = (
                    f"its {what} has length {length:.3g}, more than {norm_screen:g} times the median "
                    f"{median:.3g} of the others' and of recent ones, and more than the model's own length {own:.3g} "
                    "(norm-screen)"
                )
    return refused


def _too_many(accepted: Mapping[str, Accepted], examples_screen: float) -> dict[str, str]:
    refused: dict[str, str] = {}
    for client_id, reply in accepted.items() if examples_screen > 0.0 else ():
        others = sorted(other.num_examples for c, other in accepted.items() if c != client_id)
        # Of two clients neither can be told to be wrong; of two others the larger counts, so that one tiny claim
        # refuses nobody.
        median = others[len(others) // 2] if len(others) > 1 else reply.num_examples
        if reply.num_examples > max(1.0, examples_screen) * median:
            refused[client_id] = (
                f"its num-examples {reply.num_examples:g} is more than {examples_screen:g} times the others' median "
                f"{median:g} (examples-screen)"
            )
    return refused


def _shown(value: object) -> str:
    """A value from outside as short text."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to write out integers of thousands of digits.
        return "a number of thousands of digits"
