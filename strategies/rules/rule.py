"""What every aggregation rule is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .updates import Aggregate, State, Updates

ClientValue = bool | int | float | str


@dataclass(frozen=True)
class Rule:
    """Base of all rules: a subclass is a frozen dataclass of hyper-parameters with its own `aggregate`.

    The class attributes say what the glue must provide and what the tests must find; the docstring's *Needs* and
    *Guarantees* say the same in words.
    """

    individual_updates: ClassVar[bool] = True
    """Whether the rule looks at single updates, which secure aggregation hides and central privacy cannot cover."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What clients must deliver beyond their update: names out of `updates.NEEDS`."""
    guarantees: ClassVar[tuple[str, ...]] = ()
    """Properties that hold for every input (those about single or identical clients: without a history): names out of
    the table in ``tests/strategies/properties.py``."""

    def required(self) -> tuple[str, ...]:
        """The needs under these hyper-parameters; by default all that the class declares."""
        return self.needs

    def client_config(self) -> dict[str, ClientValue]:
        """Settings of the method's client side, sent with every training message; by default none."""
        return {}

    def aggregate(self, updates: Updates, state: State) -> tuple[Aggregate, State]:
        """One round: updates and memory in, step and memory out; the state passed in is never changed."""
        raise NotImplementedError(type(self).__name__)
