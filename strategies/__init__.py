"""Fair aggregation for Flower: FedPCD and its baselines as strategies of the Message API.

``from fedpcd import FedPCD`` in a project that installed the wheel, ``from strategies import FedPCD`` inside this
repository. The same classes for Flower's older API are in ``legacy``, the mathematics in ``rules``.
"""

from __future__ import annotations

from .engine import Options
from .message import MessageStrategy, strategy_class
from .replies import MissingNeedError, SecureAggregationError
from .reports import EvaluationReport, Rejection, RoundReport
from .roster import RosterError
from .rules import RULES
from .wrapping import CentralPrivacyError

METHODS: dict[str, type[MessageStrategy]] = {name: strategy_class(rule) for name, rule in RULES.items()}
"""Every strategy by its name in run-config; each is also an attribute of this package, e.g. ``FedPCD``."""

_CLASSES = {strategy.__name__: strategy for strategy in METHODS.values()}

__all__ = [  # the strategies' names come from the registry of rules
    "METHODS",
    "CentralPrivacyError",
    "EvaluationReport",
    "MessageStrategy",
    "MissingNeedError",
    "Options",
    "Rejection",
    "RosterError",
    "RoundReport",
    "SecureAggregationError",
    *_CLASSES,
]


def __getattr__(name: str) -> type[MessageStrategy]:
    try:
        return _CLASSES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_CLASSES})
