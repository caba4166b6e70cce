"""A deployment's grid, of which no reply can end the run: Flower decodes replies before a strategy sees them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, cast

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

_POLL_SECONDS = 1.0


def guarded(grid: Grid) -> Grid:
    """Guard a deployment's grid; another one is returned as it is.

    Parameters
    ----------
    grid : Grid
        Flower's. In a simulation replies stay in memory as they are, so there is nothing to decode.

    Returns
    -------
    Grid
        A `GuardedGrid` around Flower's ``HttpGrid``, else `grid`.
    """
    return GuardedGrid(grid) if is_deployed(grid) and not isinstance(grid, GuardedGrid) else grid


def is_deployed(grid: object) -> bool:
    """Whether a grid's nodes are other people's machines, and not this one's simulation."""
    # By name, since where the class lives is an internal of Flower's.
    return isinstance(grid, GuardedGrid) or any(kind.__name__ == "HttpGrid" for kind in type(grid).__mro__)


class GuardedGrid(Grid):
    """Pulls replies one by one, and turns one that cannot be decoded into an error reply of its sender.

    Flower's ``HttpGrid`` (1.42) confirms and decodes many replies in one call. One that is damaged on purpose raises
    there, ends the run, and takes with it the honest replies that were confirmed. A reply is also taken as the answer
    to the message that the SuperLink filed it under, whatever it says itself.

    Parameters
    ----------
    grid : Grid
        Flower's.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

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
        return cast(Iterable[Any], self._grid.get_nodes())

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
            Seconds to wait; None waits for all.

        Returns
        -------
        list of Message
            At most one per message, in the order in which they came.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        sent = list(messages)
        # Flower's list has None for a message that the SuperLink did not take.
        waiting = {i: m for i, m in zip(self.push_messages(sent), sent, strict=False) if i is not None}
        replies: list[Message] = []
        while True:
            began = time.monotonic()
            for number, question in list(waiting.items()):
                reply = self._pull(number, question)
                if reply is not None:
                    replies.append(reply)
                    del waiting[number]
            now = time.monotonic()
            if not waiting or (deadline is not None and now >= deadline):
                return replies
            # Asking after many replies shall not take more than half of the time.
            pause = max(_POLL_SECONDS, now - began)
            time.sleep(pause if deadline is None else min(pause, deadline - now))

    def _pull(self, number: str, question: Message) -> Message | None:
        try:
            replies = list(self._grid.pull_messages([number]))
            return _genuine(replies[0], number) if replies else None
        except Exception as error:  # Bytes from outside: a fault in them is the sender's.
            # If it is the connection or the run that has ended, this raises too.
            list(self._grid.get_node_ids())
            reason = f"its reply cannot be decoded: {type(error).__name__}: {error}"
            return Message(Error(code=ErrorCode.UNKNOWN, reason=reason), reply_to=question)


def _genuine(reply: object, number: str) -> Message:
    """Raise unless a decoded object is a reply to this message; Flower only checks its envelope."""
    if not isinstance(reply, Message):
        raise TypeError(f"it is a {type(reply).__name__}, not a Message")
    if reply.metadata.reply_to_message_id != number:
        raise ValueError("it says that it answers another message")
    if not reply.has_error() and not isinstance(reply.content, RecordDict):
        raise TypeError("it has no content")
    return reply
