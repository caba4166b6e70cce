"""What the command reports without a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """The command line, a preset or the app folder is wrong; the text says which and what to do."""


class RunError(Exception):
    """The run started and did not complete; the text is the reason that Flower gave."""
