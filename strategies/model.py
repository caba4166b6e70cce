"""The global model of a round: how its arrays lie in a row, and how a rule's step becomes the next one.

Arrays fall into three groups. *Parameters* (floating, not a buffer) make up the rows that rules see. *Averaged
buffers* (floating statistics such as BatchNorm's running mean and variance) belong to no direction and are averaged
with FedAvg's weights. *Counters* (integers and booleans) take the clients' lower median, which one client cannot drive
away. All keep their dtype and shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .rules import Aggregate
from .rules.updates import NEWTON_DIRECTION, Floats, Row

Arrays = Mapping[str, NDArray[Any]]

BUFFER_PATTERNS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Names (shell patterns) of arrays that are statistics rather than parameters: PyTorch's BatchNorm buffers."""
_VARIANCE_PATTERN = "*running_var"
_LONGEST_NAME = 60
"""Characters of a name that a client made up, in a reason."""


class Layout(Protocol):
    """What is known of an array before its values are."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The array's dtype."""


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
        problem = self.names_problem(arrays.keys()) or self.layout_problem(arrays)
        for name in self.averaged if problem is None else ():
            if fnmatchcase(name, _VARIANCE_PATTERN) and (arrays[name] < 0).any():
                return f"array {name!r} holds a negative variance"
        return problem

    def names_problem(self, names: Collection[str]) -> str | None:
        """Why names cannot be those of this model's arrays, or None if they can."""
        missing, extra = self.arrays.keys() - set(names), set(names) - self.arrays.keys()
        if missing or extra:
            return f"array names differ: missing {_some(missing)}, unexpected {_some(extra)}"
        return None

    def layout_problem(self, layouts: Mapping[str, Layout]) -> str | None:
        """Why shapes and dtypes, by the right names, cannot be this model's, or None if they can."""
        for name, own in self.arrays.items():
            theirs = layouts[name]
            if theirs.shape != own.shape:
                return f"array {name!r} has shape {theirs.shape}, expected {own.shape}"
            if _kind(theirs) != _kind(own):
                return f"array {name!r} has dtype {theirs.dtype}, expected a {own.dtype}-like one"
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

    def moved(self, aggregate: Aggregate, buffers: Sequence[Arrays], weights: Floats) -> dict[str, NDArray[Any]]:
        """The next global model: parameters minus the step, statistics averaged, counters at their median.

        Raises
        ------
        FloatingPointError
            If a parameter would leave the range of its dtype.
        """
        result = self.shifted(aggregate.step)
        for name in self.averaged:
            stack = np.stack([arrays[name].astype(np.float64) for arrays in buffers])
            result[name] = np.asarray(np.tensordot(weights, stack, axes=1)).astype(self.arrays[name].dtype)
        for name in self.counters:
            values = np.stack([arrays[name].astype(self.arrays[name].dtype) for arrays in buffers])
            result[name] = np.asarray(np.sort(values, axis=0)[(len(buffers) - 1) // 2])
        return result


def _kind(array: Layout) -> str:
    return "i" if array.dtype.kind in "iu" else array.dtype.kind


def _some(names: Collection[str]) -> str:
    shown = ", ".join(_cut(name) for name in sorted(names)[:3])
    return f"[{shown}{', ...' if len(names) > 3 else ''}]"


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name
