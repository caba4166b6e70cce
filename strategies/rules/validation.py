"""Checks of hyper-parameters that several rules share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence


def is_real(value: object) -> bool:
    """Whether a value is a real number (numpy's included) and not a boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_whole(name: str, value: object, low: int) -> None:
    """Raise ValueError unless the value is a whole number >= low."""
    if not (is_real(value) and isinstance(value, numbers.Integral) and int(value) >= low):
        raise ValueError(f"{name} must be a whole number >= {low}, got {value!r}")


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless ``low <= value <= high``."""
    if not (is_real(value) and low <= value <= high):
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_learning_rate(value: float) -> None:
    """Raise ValueError unless the server learning rate is finite and >= 0."""
    if not (is_real(value) and math.isfinite(value) and value >= 0.0):
        raise ValueError(
            f"server_learning_rate must be a finite number >= 0 (0: the round's local learning rate), got {value!r}"
        )


def check_finite(name: str, value: float, low: float, *, above: bool = False) -> None:
    """Raise ValueError unless the value is a finite number >= low, or > low if `above`."""
    fits = is_real(value) and math.isfinite(value) and (value > low if above else value >= low)
    if not fits:
        raise ValueError(f"{name} must be a finite number {'>' if above else '>='} {low:g}, got {value!r}")


def check_flag(name: str, value: bool) -> None:
    """Raise ValueError unless the value is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def server_rate(server_learning_rate: float, local_learning_rate: float) -> float:
    """Server over local learning rate: what a direction in displacements is multiplied by; 0 means the local one."""
    return (server_learning_rate or local_learning_rate) / local_learning_rate
