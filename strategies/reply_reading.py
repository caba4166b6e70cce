"""How Flower 1.42's SuperLink hands out replies, object by object; imported only where there is one.

All that a reply unfolds to is counted before it is decoded: a few kilobytes can name the same megabyte any number of
times. Uses Flower's internals, as there is no public way to read one reply by itself.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from flwr.app import Message, RecordDict
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import PULL_MAX_TIME
from flwr.supercore.inflatable.inflatable_object import (
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

GRACE_SECONDS = 30.0
"""How long reading may go on after a deadline, for what was there in time; nothing is waited for any more then."""
_MIB = 2**20
_MOST_OBJECTS = 100_000
_MOST_PLAIN_BYTES = 16 * _MIB
"""Of all that is not the content of an array: names, shapes, metrics, lists of clients."""
_ROOM_BYTES = 64 * _MIB
_MOST_GROWTH = 8
"""Array bytes of a reply: at most so many times those of the question, and some room besides."""


class Envelope(NamedTuple):
    """What the SuperLink says about a reply: the ids of the message and of all objects of which it is made."""

    message_id: str
    tree: Any


def envelopes(grid: Any, numbers: Collection[str]) -> Iterator[tuple[str, Envelope]]:
    """Ask which replies have come.

    Parameters
    ----------
    grid : HttpGrid
        Flower's.
    numbers : collection of str
        Ids of the messages that are waiting for one.

    Yields
    ------
    str, Envelope
        The message that is answered, by what the SuperLink has checked, and the reply; at most one each.
    """
    if not numbers:
        return
    found = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=sorted(numbers)))
    asked = set(numbers)
    for envelope, tree in zip(found.messages_list, found.message_object_trees, strict=True):
        number = envelope.metadata.reply_to_message_id
        # Flower also hands out what a node, unasked, addresses to the server.
        if number in asked:
            asked.remove(number)
            yield number, Envelope(envelope.metadata.message_id, tree)


def read(grid: Any, question: Message, number: str, envelope: Envelope, deadline: float) -> Message:
    """Fetch, check and decode one reply.

    Parameters
    ----------
    grid : HttpGrid
        Flower's.
    question : Message
        What is answered; its size bounds the reply's.
    number : str
        The question's id.
    envelope : Envelope
        The reply.
    deadline : float
        Until when to wait for objects that the sender has not sent yet, by ``time.monotonic``.

    Raises
    ------
    Exception
        Of any kind, if it is damaged, too large or incomplete, or the connection is lost.
    """
    run_id, client = grid._run.run_id, grid._runtime_client
    most = _ROOM_BYTES + _MOST_GROWTH * _array_bytes(question)
    fetch = make_pull_object_fn_protobuf(client.PullObject, grid.node, run_id)
    pull = _Limited(fetch, most + _MOST_PLAIN_BYTES, deadline + GRACE_SECONDS)
    try:
        ids = [part.object_id for part in islice(iterate_object_tree(envelope.tree), _MOST_OBJECTS + 1)]
        if len(ids) > _MOST_OBJECTS:
            raise ValueError(f"it has more than {_MOST_OBJECTS} objects")
        contents = pull_objects(ids, pull, max_time=min(max(0.0, deadline - time.monotonic()), PULL_MAX_TIME))
    finally:
        # It is not asked for again, so that the SuperLink need not keep it.
        with contextlib.suppress(Exception):
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=grid.node, run_id=run_id, message_object_id=envelope.message_id)
            )
    check_unfolded_size(contents, most)
    message = inflate_object_from_contents(envelope.message_id, contents)
    if not isinstance(message, Message):
        raise TypeError(f"it is a {type(message).__name__}, not a Message")
    if message.metadata.reply_to_message_id != number:
        raise ValueError("it says that it answers another message")
    if not message.has_error() and not isinstance(message.content, RecordDict):
        raise TypeError("it has no content")
    message.metadata.__dict__["_message_id"] = envelope.message_id
    return message


def check_unfolded_size(contents: Mapping[str, bytes], most: int) -> None:
    """Refuse what would take more memory than it may once it is decoded.

    Parameters
    ----------
    contents : mapping of str to bytes
        Objects by id, as Flower stores them.
    most : int
        Array bytes allowed; all else together may have 16 MiB.

    Raises
    ------
    ValueError
        If there is more.
    """
    kinds = {name: get_object_head_values_from_object_content(content) for name, content in contents.items()}
    plain = sum(len(contents[name]) for name, (kind, _, _) in kinds.items() if kind != "ArrayChunk")
    if plain > _MOST_PLAIN_BYTES:
        raise ValueError(f"it has {plain} bytes besides its arrays, more than {_MOST_PLAIN_BYTES}")
    unfolded = 0
    for name, (kind, children, _) in kinds.items():
        if kind == "Array":
            chunks = json.loads(contents[name].split(b"\x00", 1)[1])["arraychunk_ids"]
            unfolded += sum(len(contents[children[index]]) for index in chunks)
    if unfolded > most:
        raise ValueError(f"its arrays have {unfolded} bytes, more than {most}")


def _array_bytes(message: Message) -> int:
    return sum(len(array.data) for record in message.content.array_records.values() for array in record.values())


class _Limited:
    """Fetches objects as long as they are not too large together, nor too late; called by several threads."""

    def __init__(self, fetch: Callable[[str], bytes], most: int, until: float) -> None:
        self._fetch, self._left, self._most, self._until = fetch, most, most, until
        self._lock = threading.Lock()

    def __call__(self, object_id: str) -> bytes:
        # The first to raise stops them all: Flower's threads would outlive the round, and keep the process alive.
        if time.monotonic() > self._until:
            raise TimeoutError(f"it could not be fetched within {GRACE_SECONDS:g} s of the deadline")
        content = self._fetch(object_id)
        with self._lock:
            self._left -= len(content)
            if self._left < 0:
                raise ValueError(f"it has more than {self._most} bytes")
        return content
