"""Aggregation rules as pure mathematics: one method per file, numpy and scipy only.

A rule is a frozen dataclass of hyper-parameters with one method, ``aggregate(updates, state) -> (Aggregate, state)``.
`RULES` is the registry: one line per method; strategies, run-config keys, docs and tests follow from it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from .fedavg import FedAvg
from .fedpcd import FedPCD
from .updates import Aggregate, State, Updates, client_order


class Rule(Protocol):
    """What every aggregation rule is: a frozen dataclass with this method."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    individual_updates: ClassVar[bool]
    """Whether the rule looks at single updates, which secure aggregation hides and central privacy cannot cover."""

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """One round: updates and memory in, step and memory out."""
        ...


RULES: dict[str, type[Rule]] = {
    "fedavg": FedAvg,
    "fedpcd": FedPCD,
}

__all__ = ["RULES", "Aggregate", "FedAvg", "FedPCD", "Rule", "State", "Updates", "client_order"]
