"""What a message asks of a client beyond its update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from client_app.utility import Utility
from strategies import protocol
from strategies.rules import updates


@dataclass(frozen=True)
class Needs:
    """The parsed request; by default nothing.

    Parameters
    ----------
    names : frozenset of str
        Needs by their names in ``strategies.rules.updates``.
    utility : Utility or None
        Transform of the training loss.
    newton_memory : int
        Curvature pairs that the client keeps, >= 1.
    personal_weight : float
        Pull of the personal model towards the global one, >= 0.
    personal_epochs : int
        Passes over the examples for the personal model; 0: as many as for the global one.
    """

    names: frozenset[str] = frozenset()
    utility: Utility | None = None
    newton_memory: int = 10
    personal_weight: float = 0.0
    personal_epochs: int = 0

    def __contains__(self, name: str) -> bool:
        return name in self.names


def read_needs(config: Mapping[str, Any]) -> Needs:
    """Read the needs of a train or evaluate message.

    Raises
    ------
    ValueError
        If a need is unknown or its settings are missing or not allowed.
    """
    names = frozenset(name.strip() for name in str(config.get(protocol.NEEDS, "")).split(",") if name.strip())
    if unknown := sorted(names - set(updates.NEEDS)):
        raise ValueError(f"this client does not know the needs {', '.join(map(repr, unknown))}")
    memory = int(config.get("newton-memory", 10))
    weight, epochs = float(config.get("personal-weight", 0.0)), int(config.get("personal-epochs", 0))
    if memory < 1 or epochs < 0 or not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"newton-memory={memory}, personal-weight={weight}, personal-epochs={epochs} are not allowed")
    return Needs(names, _read_utility(config), memory, weight, epochs)


def wants_training_split(config: Mapping[str, Any]) -> bool:
    """Whether an evaluate message asks for the loss on the training examples."""
    split = config.get(protocol.SPLIT, "")
    if split not in ("", protocol.TRAINING_SPLIT):
        raise ValueError(f"{protocol.SPLIT}={split!r} in the message: expected {protocol.TRAINING_SPLIT!r} or nothing")
    return bool(split)


def _read_utility(config: Mapping[str, Any]) -> Utility | None:
    transform = config.get("loss-transform", "")
    if not transform:
        return None
    if transform != "propfair":
        raise ValueError(f"this client does not know loss-transform={transform!r}")
    if missing := [key for key in ("utility-baseline", "utility-margin", "utility-fallback") if key not in config]:
        raise ValueError(f"the message's config lacks {', '.join(missing)}, which loss-transform={transform!r} needs")
    fallback = str(config["utility-fallback"])
    return Utility(float(config["utility-baseline"]), float(config["utility-margin"]), fallback)


NO_NEEDS: Final = Needs()
"""What a message asks for that names no need."""
