"""Refuses Flower's wrappers for central differential privacy, whose guarantee this package's rules would void."""

from __future__ import annotations

import sys

_PRIVACY_MODULES = (
    "flwr.serverapp.strategy.dp_",
    "flwr.server.strategy.dp",
    "flwr.server.strategy.dpfedavg_",
)


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
    caller = sys._getframe(2).f_locals.get("self")
    module = type(caller).__module__
    if module.startswith(_PRIVACY_MODULES):
        raise CentralPrivacyError(
            f"{type(caller).__name__} adds noise that is calibrated to an average of clipped updates; this strategy's "
            "step is not such an average, so the privacy guarantee would be void. Remove the wrapper, and use local "
            "differential privacy on the clients (flwr.clientapp.mod.LocalDpMod), which this strategy supports."
        )
