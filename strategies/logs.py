"""What both Flower APIs write to Flower's log."""

from __future__ import annotations

import re
from logging import INFO, WARNING

from flwr.common.logger import log

from .reports import Rejection

_WRAPPER = re.compile(r"^(?:.*Exception \w+ occurred\. Message: )?(.*?)(?:'>)?$")

_LONGEST = 10_000
"""Characters of an error text that are looked at."""


def log_rejections(what: str, accepted: int, rejections: tuple[Rejection, ...]) -> None:
    """Log how many replies count, and why each of the others does not."""
    log(INFO, "%s: %s replies count, %s do not", what, accepted, len(rejections))
    for rejection in rejections:
        log(WARNING, "\t> client %s (%s): %s", rejection.client_id, rejection.kind, _printable(rejection.reason))


def last_line(text: str | None) -> str:
    """Return what an error text ends with: in simulation a reason is a whole traceback."""
    # The end is what counts, and it is a stranger who decides how long the text is.
    lines = [line.strip() for line in (text or "")[-_LONGEST:].strip().splitlines() if line.strip()]
    # Flower wraps a client's exception: "Exception ClientAppException occurred. Message: ...'>".
    return _printable(_WRAPPER.sub(r"\1", lines[-1]) if lines else "unknown error")


def _printable(text: str) -> str:
    """A client's words without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
