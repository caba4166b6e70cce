"""A deployment's grid, of which no reply can end the run: Flower decodes replies before a strategy sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from logging import WARNING
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 1.0
"""How long one reply may keep the others waiting; it is then read beside them."""
_LONGEST_REASON = 1000


def is_deployed(grid: object) -> bool:
    """Whether a grid's nodes are other people's machines, and not this one's simulation."""
    # By name, since where Flower's class lives is an internal.
    return not any(kind.__name__ in ("InMemoryGrid", "InProcessGrid") for kind in type(grid).__mro__)


def guarded(grid: Grid) -> Grid:
    """Guard a deployment's grid.

    Parameters
    ----------
    grid : Grid
        Flower's.

    Returns
    -------
    Grid
        A `GuardedGrid` around Flower's ``HttpGrid``. In a simulation replies stay in memory as they are, so there is
        nothing to guard; a grid of another kind is warned about and returned as it is.

    Raises
    ------
    RuntimeError
        If this release of Flower reads replies in a way that is not known here.
    """
    if isinstance(grid, GuardedGrid) or not is_deployed(grid):
        return grid
    if not any(kind.__name__ == "HttpGrid" for kind in type(grid).__mro__):
        _warn(type(grid).__name__)
        return grid
    return GuardedGrid(grid)


@cache
def _warn(kind: str) -> None:
    log(WARNING, "a damaged reply can end this run: FedPCD does not know %s", kind)


class GuardedGrid(Grid):
    """Reads every reply by itself, and turns one that cannot be read into an error reply of its sender.

    Flower's ``HttpGrid`` (1.42) reads many replies in one call. One that is damaged on purpose raises there, ends the
    run, and takes with it the honest replies that were confirmed; one whose sender stopped in the middle of sending
    holds up all others for minutes, deadline or not; a small one may unfold to any size.

    Parameters
    ----------
    grid : HttpGrid
        Flower's.
    """

    def __init__(self, grid: Grid) -> None:
        try:
            from . import reply_reading
        except ImportError as error:
            raise RuntimeError(
                "this release of Flower keeps replies in another way than 1.42, and FedPCD cannot guard a deployment "
                f"against damaged ones ({error}): install flwr 1.42 on the server, or a newer FedPCD"
            ) from error
        self._grid = grid
        self._envelopes, self._read = reply_reading.envelopes, reply_reading.read
        self._grace = reply_reading.GRACE_SECONDS

    def set_run(self, run: Any) -> None:
        """As the grid inside."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """As the grid inside."""
        return self._grid.run

    def create_message(self, *args: Any, **keywords: Any) -> Message:
        """As the grid inside."""
        return self._grid.create_message(*args, **keywords)

    def get_node_ids(self) -> Iterable[int]:
        """As the grid inside."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """As the grid inside."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the grid inside."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the grid inside: unguarded, since an error reply can only be made where the question is known."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for the replies.

        Parameters
        ----------
        messages : iterable of Message
            To one node each.
        timeout : float, optional
            Seconds to wait; None waits for all. Replies that are there in time may be read half a minute longer.

        Returns
        -------
        list of Message
            At most one per message, in the order in which they came.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        sent = list(messages)
        # Flower's list has an empty id for a message that the SuperLink did not take.
        waiting = {i: m for i, m in zip(self.push_messages(sent), sent, strict=False) if i}
        arriving: dict[str, _Arrival] = {}
        replies: list[Message] = []
        while True:
            for number, envelope in self._envelopes(self._grid, waiting.keys() - arriving.keys()):
                arriving[number] = _Arrival(self._reader(waiting[number], number, envelope, deadline))
                arriving[number].join(max(0.0, min(_PATIENCE_SECONDS, deadline + self._grace - time.monotonic())))
            last = time.monotonic() >= deadline
            for arrival in arriving.values() if last else ():
                arrival.join(max(0.0, deadline + self._grace - time.monotonic()))
            over = [number for number, arrival in arriving.items() if not arrival.is_alive()]
            replies += [self._outcome(arriving.pop(number), waiting.pop(number)) for number in over]
            if not waiting or last:
                return replies
            time.sleep(max(0.0, min(_POLL_SECONDS, deadline - time.monotonic())))

    def _reader(self, question: Message, number: str, envelope: Any, deadline: float) -> Callable[[], Message]:
        return lambda: self._read(self._grid, question, number, envelope, deadline)

    def _outcome(self, arrival: _Arrival, question: Message) -> Message:
        """The reply, or an error in its place."""
        error = arrival.error
        if arrival.reply is not None:
            return arrival.reply
        if not isinstance(error, Exception):  # Flower's sign that the run was stopped is none.
            raise error or RuntimeError("a reply was read without an outcome")
        # If it is the connection that has ended, this raises too; else it is bytes from outside, the sender's fault.
        list(self._grid.get_node_ids())
        reason = f"its reply cannot be read: {type(error).__name__}: {error}"[:_LONGEST_REASON]
        return Message(Error(code=ErrorCode.UNKNOWN, reason=reason), reply_to=question)


class _Arrival(threading.Thread):
    """Reads one reply."""

    def __init__(self, read: Callable[[], Message]) -> None:
        super().__init__(daemon=True, name="reply")
        self._read = read
        self.reply: Message | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Read, and keep what comes of it."""
        try:
            self.reply = self._read()
        except BaseException as error:
            self.error = error
