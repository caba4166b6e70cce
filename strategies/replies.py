"""From client replies to validated updates, and from a rule's step to the new model. Knows nothing of Flower.

The server trusts no reply: names, shapes, kinds of dtype, finiteness, example counts, duplicates and lengths are
checked, and a reply that fails costs its sender the round, never the run.

Arrays fall into three groups. *Parameters* (floating, not a buffer) make up the rows that rules see. *Averaged
buffers* (floating statistics such as BatchNorm's running mean and variance) belong to no direction and are averaged
with FedAvg's weights. *Counters* (integers and booleans) take the clients' lower median, which one client cannot drive
away. All keep their dtype and shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reports import Rejection
from .rules import Aggregate, Updates, client_order
from .rules.gram import norm
from .rules.updates import METRIC_NEEDS, NEWTON_DIRECTION, Floats, Row, TrialLosses

Arrays = Mapping[str, NDArray[Any]]

BUFFER_PATTERNS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Names (shell patterns) of arrays that are statistics rather than parameters: PyTorch's BatchNorm buffers."""
_VARIANCE_PATTERN = "*running_var"
_MOST_EXAMPLES = 2**53
"""Beyond it counts are no longer exact in float64, and their sum may overflow."""


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
    """

    client_id: str
    arrays: Arrays | None = None
    num_examples: object = None
    metrics: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None
    newton_direction: Arrays | None = None


@dataclass(frozen=True)
class Accepted:
    """A reply that passed, as a row of displacements."""

    client_id: str
    row: Row
    statistics: Row
    num_examples: float
    buffers: Arrays
    metrics: dict[str, float]
    newton_direction: Row | None = None


class Model:
    """The global model of one round: which arrays are parameters, and how they lie in a row.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        The global model, in the order in which it is sent.
    buffer_patterns : sequence of str
        Shell patterns of names that are statistics.

    Raises
    ------
    ValueError
        If there is no parameter, or an array is neither floating, integer nor boolean, or not finite.
    """

    def __init__(self, arrays: Arrays, buffer_patterns: Sequence[str] = BUFFER_PATTERNS) -> None:
        self.arrays = dict(arrays)
        for name, array in self.arrays.items():
            if array.dtype.kind not in "fiub":
                raise ValueError(f"array {name!r} has dtype {array.dtype}; only floats, integers and booleans work")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"array {name!r} of the global model is not finite")
        floating = [name for name, array in self.arrays.items() if array.dtype.kind == "f"]
        self.averaged = [n for n in floating if any(fnmatchcase(n, p) for p in buffer_patterns)]
        self.parameters = [n for n in floating if n not in set(self.averaged)]
        self.counters = [n for n in self.arrays if self.arrays[n].dtype.kind != "f"]
        if not any(self.arrays[n].size for n in self.parameters):
            raise ValueError("the model has no trainable floating-point parameter")
        self.spans, self.size = self._layout(self.parameters)
        self.array_slices = tuple(span for span in self.spans.values() if span.stop > span.start)
        self.layer_slices = self._layers()
        # float16 is widened for arithmetic; float64 models keep their precision.
        self.row_dtype = np.result_type(np.float32, *(self.arrays[n].dtype for n in floating))

    def problem(self, arrays: Arrays) -> str | None:
        """Why arrays cannot be a client's version of this model, or None if they can."""
        missing, extra = self.arrays.keys() - arrays.keys(), arrays.keys() - self.arrays.keys()
        if missing or extra:
            return f"array names differ: missing {_some(missing)}, unexpected {_some(extra)}"
        for name, own in self.arrays.items():
            theirs = arrays[name]
            if theirs.shape != own.shape:
                return f"array {name!r} has shape {theirs.shape}, expected {own.shape}"
            if _kind(theirs) != _kind(own):
                return f"array {name!r} has dtype {theirs.dtype}, expected a {own.dtype}-like one"
            if name in self.averaged and fnmatchcase(name, _VARIANCE_PATTERN) and (theirs < 0).any():
                return f"array {name!r} holds a negative variance"
        return None

    def direction_problem(self, arrays: Arrays | None) -> str | None:
        """Why arrays cannot be a direction in the space of this model's parameters, or None if they can."""
        if arrays is None:
            return f"sent no {NEWTON_DIRECTION!r}, which this rule needs"
        if arrays.keys() != self.spans.keys():
            return f"the arrays of its {NEWTON_DIRECTION!r} differ from the model's parameters"
        for name, array in arrays.items():
            if array.shape != self.arrays[name].shape or array.dtype.kind != "f" or not np.isfinite(array).all():
                return f"array {name!r} of its {NEWTON_DIRECTION!r} has another shape or dtype, or is not finite"
        return None

    def flat(self, arrays: Arrays) -> Row:
        """Arrays by parameter name as one row, shape (size,)."""
        row = np.empty(self.size, dtype=self.row_dtype)
        for name, span in self.spans.items():
            row[span] = arrays[name].ravel()
        return row

    def shifted(self, step: Floats) -> dict[str, NDArray[Any]]:
        """The model at ``theta_t - step``; statistics and counters stay as they are.

        Raises
        ------
        FloatingPointError
            If a parameter would leave the range of its dtype.
        """
        result = dict(self.arrays)
        for name, span in self.spans.items():
            own = self.arrays[name]
            with np.errstate(over="ignore"):
                # A 0-dim array decays to a scalar in arithmetic; asarray brings it back.
                moved = np.asarray(own.astype(np.float64) - step[span].reshape(own.shape))
                result[name] = moved.astype(own.dtype)
            if not np.isfinite(result[name]).all():
                raise FloatingPointError(f"the step would make {name!r} infinite in {own.dtype}")
        return result

    def displacement(self, arrays: Arrays) -> Row:
        """``theta_t - theta_i`` as one row, shape (size,); not finite where the client's model is not."""
        return self._difference(arrays, self.spans, self.size)

    def statistics(self, arrays: Arrays) -> Row:
        """The same for the averaged buffers."""
        return self._difference(arrays, *self._layout(self.averaged))

    def culprit(self, arrays: Arrays) -> str | None:
        """Name of the first floating array that is not finite in the model's own dtype, or None."""
        with np.errstate(over="ignore"):
            for name in (*self.parameters, *self.averaged):
                if not np.isfinite(arrays[name].astype(self.arrays[name].dtype)).all():
                    return name
        return None

    def _layers(self) -> tuple[slice, ...]:
        """Weight and bias of a module make one layer; a normalisation joins the layer before it in the same parent."""
        layers: list[tuple[str, int, int]] = []
        for module, names in groupby(self.parameters, key=_module):
            members = list(names)
            low, high = self.spans[members[0]].start, self.spans[members[-1]].stop
            parent = module.rpartition(".")[0]
            joins = all(self.arrays[name].ndim <= 1 for name in members)
            if joins and layers and layers[-1][0] == parent:
                low = layers.pop()[1]
            layers.append((parent, low, high))
        return tuple(slice(low, high) for _, low, high in layers if high > low)

    def _layout(self, names: Sequence[str]) -> tuple[dict[str, slice], int]:
        ends = np.cumsum([0, *(self.arrays[name].size for name in names)]).tolist()
        return {name: slice(ends[i], ends[i + 1]) for i, name in enumerate(names)}, ends[-1]

    def _difference(self, arrays: Arrays, spans: Mapping[str, slice], size: int) -> Row:
        row = np.empty(size, dtype=self.row_dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for name, span in spans.items():
                own = self.arrays[name]
                # In the model's own dtype, which is what the client's values would become.
                theirs = arrays[name].astype(own.dtype, copy=False)
                np.subtract(own, theirs, out=row[span].reshape(own.shape), dtype=self.row_dtype)
        return row

    def moved(self, aggregate: Aggregate, accepted: Sequence[Accepted], weights: Floats) -> dict[str, NDArray[Any]]:
        """The next global model: parameters minus the step, statistics averaged, counters at their median.

        Raises
        ------
        FloatingPointError
            If a parameter would leave the range of its dtype.
        """
        result = self.shifted(aggregate.step)
        for name in self.averaged:
            stack = np.stack([reply.buffers[name].astype(np.float64) for reply in accepted])
            result[name] = np.asarray(np.tensordot(weights, stack, axes=1)).astype(self.arrays[name].dtype)
        for name in self.counters:
            values = np.stack([reply.buffers[name].astype(self.arrays[name].dtype) for reply in accepted])
            result[name] = np.asarray(np.sort(values, axis=0)[(len(accepted) - 1) // 2])
        return result


def screen(
    model: Model, replies: Iterable[Reply], cohort: Sequence[str], norm_screen: float, needs: Sequence[str] = ()
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
        An update longer than this many times both the others' (lower) median of non-zero lengths and the length of
        the global model itself is refused; 0 accepts any length. The median alone would not do: once most clients are
        well served their updates are tiny, and it is the badly served ones that still move.
    needs : sequence of str
        What the rule requires of every client; a reply without it is refused.

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
    for client_id, reason in _too_long(model, accepted, norm_screen).items():
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
        return Rejection(reply.client_id, "error", reply.error)
    problem = count_problem(reply.num_examples)
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
        return f"its metric {need!r} must be a finite number >= 0, got {reply.metrics[need]!r}"
    return None


def count_problem(value: object) -> str | None:
    """Why a number of examples cannot be used, or None if it can."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"num-examples must be a number > 0, got {value!r}"
    if not _is_finite(value) or not 0 < value <= _MOST_EXAMPLES:
        return f"num-examples must be > 0 and at most {_MOST_EXAMPLES}, got {value!r}"
    return None


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An int beyond the range of floats.
        return False


def _too_long(model: Model, accepted: Mapping[str, Accepted], norm_screen: float) -> dict[str, str]:
    if norm_screen <= 0.0:
        return {}
    refused: dict[str, str] = {}
    updates = {client_id: reply.row for client_id, reply in accepted.items()}
    statistics = {client_id: reply.statistics for client_id, reply in accepted.items()}
    for what, rows, names in (("update", updates, model.parameters), ("statistics", statistics, model.averaged)):
        lengths = {client_id: norm(row) for client_id, row in rows.items()}
        own = math.hypot(*(norm(model.arrays[name].astype(model.row_dtype).ravel()) for name in names))
        for client_id, length in lengths.items():
            # Its own length is left out of the median, so that nobody vouches for himself in a small cohort.
            moving = sorted(other for c, other in lengths.items() if c != client_id and other > 0.0)
            median = moving[(len(moving) - 1) // 2] if moving else 0.0
            if length > norm_screen * max(median, own) > 0.0:
                refused[client_id] = (
                    f"its {what} has length {length:.3g}, more than {norm_screen:g} times the others' median "
                    f"{median:.3g} and the model's own length {own:.3g} (norm-screen)"
                )
    return refused


def _kind(array: NDArray[Any]) -> str:
    return "i" if array.dtype.kind in "iu" else array.dtype.kind


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:3])
    return f"[{shown}{', ...' if len(ordered) > 3 else ''}]"


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name
