"""What of a simulation's log a user reads: everything but the lines that look like faults and are none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

COLOUR = re.compile(r"\x1b\[[0-9;]*m")

NOISE = re.compile(
    r"""
    INFO\ :\s*                                                          # Flower separates its blocks by empty records
    | WARNING\ :\s+Since\ flwr\ [0-9.]+,\ default\ simulated\ SuperNodes\ changed\ .*  # logged whatever the size is
    | INFO\ :\s+To\ change\ federation\ size,\ use\ the\ following\ command:
    | INFO\ :\s+flwr\ federation\ simulation-config\ .*                 # the command, for a SuperLink that goes away
    | Successfully\ installed\ .*\ to\ /tmp/fedpcd-.*                   # a folder that goes away too
    | (\(ClientAppActor\ pid=.*\)\ )?WARNING\ :\s+Manually\ terminating\ ClientAppActor  # the regular end of a worker
    | (\(.*\ pid=.*\)\ )?.*/ray/.*:\ FutureWarning:\ .*                 # addressed to Flower, which calls Ray
    """,
    re.VERBOSE,
)
"""Lines left out, matched as a whole and without colours."""

WARNED_CODE = re.compile(r"(\(.* pid=.*\) )?\s+warnings\.warn\(")
"""The second line of a Python warning."""


def readable(lines: Iterable[str], *, coloured: bool) -> Iterator[str]:
    """Leave out the noise, and the colours where they would show as control characters.

    Parameters
    ----------
    lines : iterable of str
        The log, line by line.
    coloured : bool
        Whether the reader is a terminal.

    Yields
    ------
    str
        The lines that remain, as they came in.
    """
    after_noise = False
    for line in lines:
        plain = COLOUR.sub("", line)
        text = plain.rstrip()
        noise = NOISE.fullmatch(text) is not None
        if not noise and not (after_noise and WARNED_CODE.fullmatch(text)):
            yield line if coloured else plain
        after_noise = noise
