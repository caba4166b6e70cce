"""Serialised arrays from outside, judged by their headers before any of them is deserialised. Knows nothing of Flower.

Both of Flower's APIs carry arrays as `numpy.save` writes them. Such bytes may announce an array of any size, or a
pickle; numpy allocates what is announced. Here only a header that `numpy.save` writes for plain numbers is understood,
and only an array that fits the model, in name, shape, kind of dtype and number of bytes, is passed on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .model import Model
from .rules.updates import NEWTON_DIRECTION

LONGEST_HEADER = 1024
"""Bytes; numpy writes 128 for arrays of few dimensions."""
WIDEST = 8
"""Bytes per element: no client has reason to send more than float64 or int64."""

_MAGIC = b"\x93NUMPY\x01\x00"
_START = len(_MAGIC) + 2
_HEADER = re.compile(
    rb"\{'descr': '([^']{1,32})', 'fortran_order': (?:True|False), 'shape': \(((?:\d{1,19}(?:, |,|(?=\))))*)\), \} *\n"
)
_NUMBERS = re.compile(r"[<>|=][fiub][1248]")


class WireError(ValueError):
    """Bytes that cannot be the model's arrays; the text says which array, and by how much."""


@dataclass(frozen=True)
class Header:
    """What serialised bytes announce.

    Parameters
    ----------
    shape : tuple of int
        The array's shape.
    dtype : dtype
        Its dtype, of numbers or booleans.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def check_arrays(model: Model, data: Mapping[str, bytes]) -> None:
    """Raise WireError unless serialised arrays can be a client's version of the model."""
    problem = model.names_problem(data.keys())
    if problem is None:
        headers = {name: read_header(name, data[name], own.size) for name, own in model.arrays.items()}
        problem = model.layout_problem(headers)
    if problem is not None:
        raise WireError(problem)


def check_direction(model: Model, data: Mapping[str, bytes]) -> None:
    """Raise WireError unless serialised arrays can be a direction in the space of the model's parameters."""
    if data.keys() != model.spans.keys():
        raise WireError(f"the arrays of its {NEWTON_DIRECTION!r} differ from the model's parameters")
    for name in model.parameters:
        header, own = read_header(name, data[name], model.arrays[name].size), model.arrays[name]
        if header.shape != own.shape or header.dtype.kind != "f":
            raise WireError(
                f"array {name!r} of its {NEWTON_DIRECTION!r} has shape {header.shape} and dtype {header.dtype}, "
                f"expected {own.shape} and a {own.dtype}-like one"
            )


def read_header(name: str, data: bytes, size: int) -> Header:
    """The header of a serialised array of `size` elements at most, read without evaluating anything.

    Parameters
    ----------
    name : str
        For the error's text.
    data : bytes
        As `numpy.save` writes them.
    size : int
        Elements that the array should have.

    Returns
    -------
    Header
        Its shape and dtype; the bytes that follow are exactly as many as these need.

    Raises
    ------
    WireError
        If the bytes are more than such an array can take, are anything but a plain array of numbers, or fewer or more
        than their own header announces.
    """
    most = LONGEST_HEADER + WIDEST * size
    if len(data) > most:
        raise WireError(f"array {name!r} has {len(data)} bytes, more than the {most} that {size} numbers can take")
    length = int.from_bytes(data[len(_MAGIC) : _START], "little")
    found = _HEADER.fullmatch(data, _START, _START + length) if length <= LONGEST_HEADER else None
    if not data.startswith(_MAGIC) or found is None:
        raise WireError(f"array {name!r} cannot be read: its bytes are no array of numbers as numpy.save writes it")
    dtype = found[1].decode("ascii", "replace")
    if not _NUMBERS.fullmatch(dtype):
        raise WireError(f"array {name!r} has dtype {dtype!r}; only numbers of at most {WIDEST} bytes are read")
    header = Header(tuple(int(part) for part in found[2].replace(b" ", b"").split(b",") if part), _dtype(name, dtype))
    announced, held = _size(header.shape) * header.dtype.itemsize, len(data) - _START - length
    if announced != held:
        raise WireError(f"array {name!r} announces {announced} bytes (shape {header.shape}, {dtype}) and has {held}")
    return header


def _dtype(name: str, text: str) -> np.dtype[Any]:
    try:
        return np.dtype(text)
    except TypeError:
        raise WireError(f"array {name!r} has dtype {text!r}, which does not exist") from None


def _size(shape: tuple[int, ...]) -> int:
    # Python's integers: a product of announced lengths must not wrap around.
    total = 1
    for length in shape:
        total *= length
    return total
