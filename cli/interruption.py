"""Ctrl-C, SIGTERM and a closed terminal: end in order, once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that would end Python at once; SIGHUP comes when the terminal is closed."""


@contextmanager
def orderly_termination() -> Iterator[None]:
    """Unwind at SIGTERM and SIGHUP, so that the SuperLink and its processes are ended; exit code 128 + number.

    A signal that whoever started this process ignores, as ``nohup`` does with SIGHUP, stays ignored.
    """
    heeded = [number for number in TERMINATIONS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _terminate) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP, for a cleanup that must not be cut short by an impatient second one."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals do not arrive here
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *TERMINATIONS)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    for other in TERMINATIONS:  # a closing terminal sends SIGHUP twice: the kernel and the shell
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)
