"""Refuses Flower's wrappers for central differential privacy, whose guarantee this package's rules would void."""

from __future__ import annotations

import sys
from typing import NoReturn

_PRIVACY_MODULES = (
    "flwr.serverapp.strategy.dp_",
    "flwr.server.strategy.dp",
    "flwr.server.strategy.dpfedavg_",
)

_DEPTH = 12
"""Frames to look at: subclasses on either side may call on."""


class CentralPrivacyError(RuntimeError):
    """The strategy was wrapped for central differential privacy."""


def refuse_privacy_wrapper() -> None:
    """Raise if the strategy's method was called by one of Flower's differential-privacy wrappers.

    Such a wrapper adds noise that is calibrated to the mean of clipped updates; a direction that solves a program
    may change by far more when one client changes, so the promised privacy would not hold.

    Raises
    ------
    CentralPrivacyError
        Naming the wrapper.
    """
    frame = sys._getframe(1).f_back
    for _ in range(_DEPTH):
        if frame is None:
            return
        caller, frame = frame.f_locals.get("self"), frame.f_back
        if any(base.__module__.startswith(_PRIVACY_MODULES) for base in type(caller).__mro__):
            _refuse(caller)


def _refuse(wrapper: object) -> NoReturn:
    raise CentralPrivacyError(
        f"{type(wrapper).__name__} adds noise that is calibrated to an average of clipped updates; this strategy's "
        "step is not such an average, so the privacy guarantee would be void. Remove the wrapper, and use local "
        "differential privacy on the clients (flwr.clientapp.mod.LocalDpMod), which this strategy supports."
    )
