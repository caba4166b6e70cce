"""Ends a deployed client's process that hangs, which Flower itself never does.

A SuperNode starts one process per message and waits for it for ever, across runs; only this process can end itself.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Context

from client_app.hosting import CLIENT_ID

ROUND_TIMEOUT = "round-timeout"
"""Run-config key (float): seconds that the server waits for a round's replies; whoever takes longer works in vain."""

_LONGEST = 1e8
"""Seconds; the timer cannot count much further."""


@contextmanager
def ended_after_round_timeout(context: Context) -> Iterator[None]:
    """End this process, with a traceback of all threads, if the block outlasts the round; deployed clients only."""
    limit = context.run_config.get(ROUND_TIMEOUT)
    if CLIENT_ID not in context.node_config or isinstance(limit, bool) or not isinstance(limit, int | float):
        yield
        return
    faulthandler.dump_traceback_later(
        min(max(1.0, float(limit)), _LONGEST), exit=True, file=sys.__stderr__ or sys.stderr
    )
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
