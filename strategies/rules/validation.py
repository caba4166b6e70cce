"""Checks of hyper-parameters that several rules share."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless ``low <= value <= high``."""
    if not (isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high):
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], got {value!r}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_learning_rate(value: float) -> None:
    """Raise ValueError unless the server learning rate is finite and >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0.0):
        raise ValueError(
            f"server_learning_rate must be a finite number >= 0 (0: the round's local learning rate), got {value!r}"
        )
