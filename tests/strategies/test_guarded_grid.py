"""Replies that Flower cannot decode: what is behind a real HttpGrid here is a SuperLink in memory."""

from __future__ import annotations

import hashlib
import importlib
import types
from collections.abc import Callable

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse, PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, validate_object_content
from flwr.superlink.grid import HttpGrid, InMemoryGrid

from strategies.guarded_grid import GuardedGrid, guarded, is_deployed
from strategies.inprocess import InProcessGrid
from strategies.logs import last_line
from tests.federations import run_message
from tests.support import assert_same_bits, hosted, message_client

SITES = {11: "3", 12: "7", 13: "9"}
"""Node ids and the clients that they are."""
BAD = 12
Contents = dict[str, bytes]
Damage = Callable[[Message, Contents], bytes]
"""Bytes of a reply's object that replace those of the object of the same class."""


class SuperLinkInMemory:
    """Flower's Runtime API as far as a grid calls it; one site's training replies may be damaged."""

    def __init__(self, damage: Damage | None = None) -> None:
        self.app = message_client()
        self.damage = damage
        self.objects: Contents = {}
        self.replies: dict[str, tuple[object, object]] = {}
        self.nodes = list(SITES)
        self.configs = {node: {"client-id": client} for node, client in SITES.items()}

    def GetNodes(self, _: object) -> GetNodesResponse:  # noqa: N802
        return GetNodesResponse(nodes=[NodeInfo(node_id=node) for node in self.nodes])

    def PushMessages(self, request) -> PushAppMessagesResponse:  # noqa: N802
        self.trees = list(request.message_object_trees)
        return PushAppMessagesResponse(
            message_ids=[m.metadata.message_id for m in request.messages_list],
            objects_to_push={o for tree in self.trees for o in _ids(tree)},
        )

    def PushObject(self, request) -> PushObjectResponse:  # noqa: N802
        self.objects[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def PullMessages(self, request) -> PullAppMessagesResponse:  # noqa: N802
        for number in request.message_ids:
            if number in self.objects:
                self._answer(number)
        found = [self.replies.pop(number) for number in request.message_ids if number in self.replies]
        return PullAppMessagesResponse(messages_list=[m for m, _ in found], message_object_trees=[t for _, t in found])

    def PullObject(self, request) -> PullObjectResponse:  # noqa: N802
        return PullObjectResponse(
            object_found=True, object_available=True, object_content=self.objects[request.object_id]
        )

    def ConfirmMessageReceived(self, _: object) -> None:  # noqa: N802
        pass

    def _answer(self, number: str) -> None:
        question = inflate_object_from_contents(number, self.objects, keep_object_contents=True)
        assert isinstance(question, Message)
        question.metadata.__dict__["_message_id"] = number
        node = question.metadata.dst_node_id
        reply = self.app(question, Context(1, node, self.configs[node], RecordDict(), {}))
        contents = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        root = reply.object_id
        if self.damage is not None and node == BAD and question.metadata.message_type == "train":
            contents, root = _replace(contents, root, self.damage(reply, contents))
            for content in contents.values():
                validate_object_content(content)  # Flower's SuperLink takes it
        self.objects |= contents
        envelope = message_to_proto(remove_content_from_message(reply))
        envelope.metadata.message_id = root
        tree = get_object_tree(reply)
        tree.ClearField("children")
        tree.object_id = root
        tree.children.extend(type(tree)(object_id=name) for name in contents if name != root)
        self.replies[number] = (envelope, tree)
        del self.objects[number]


def _ids(tree) -> set[str]:
    return {tree.object_id, *(name for child in tree.children for name in _ids(child))}


def _class_of(content: bytes) -> bytes:
    return content.split(b" ", 1)[0]


def _replace(contents: Contents, root: str, new: bytes) -> tuple[Contents, str]:
    """Put an object in the place of the first of its class, and give all that refer to it their new ids."""
    old = next(name for name, content in contents.items() if _class_of(content) == _class_of(new))
    renamed = {old: new}
    while renamed:
        name, content = renamed.popitem()
        del contents[name]
        fresh = hashlib.sha256(content).hexdigest()
        root = fresh if name == root else root
        for parent in [p for p, c in contents.items() if name.encode() in c]:
            renamed[parent] = contents[parent].replace(name.encode(), fresh.encode())
        contents[fresh] = content
    return contents, root


def _body(of: bytes, contents: Contents, body: bytes, *, children: bool = True) -> bytes:
    head = next(c for c in contents.values() if _class_of(c) == of).split(b"\x00", 1)[0].split(b" ")
    return b" ".join([head[0], head[1] if children else b"", str(len(body)).encode()]) + b"\x00" + body


def _relabelled(reply: Message, contents: Contents) -> bytes:
    reply.metadata.__dict__["_reply_to_message_id"] = "0" * 64
    return reply.deflate()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "metrics without a value": (lambda r, c: _body(b"MetricRecord", c, b"\n\x03\n\x01a"), "AttributeError"),
    "metrics that are no protobuf": (lambda r, c: _body(b"MetricRecord", c, b"\xff" * 9), "DecodeError"),
    "arrays that are no protobuf": (lambda r, c: _body(b"ArrayRecord", c, b"\xff" * 9), "its reply cannot be decoded"),
    "a message that is no protobuf": (lambda r, c: _body(b"Message", c, b"\xff" * 9), "DecodeError"),
    "a message without content": (lambda r, c: _body(b"Message", c, b"", children=False), "IndexError"),
    "another's label": (_relabelled, "says that it answers another message"),
}


def http_grid(damage: Damage | None = None) -> HttpGrid:
    """Flower's grid of a deployment."""
    grid = HttpGrid(token="t")
    grid._client = SuperLinkInMemory(damage)
    grid._run = types.SimpleNamespace(run_id=1)
    return grid


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.guarded_grid._POLL_SECONDS", 0.0)
    InProcessGrid(message_client(), 1)  # Flower's messages are made in a task's name


def run(grid) -> object:
    return run_message("fedpcd", rounds=2, grid=grid, fraction_train=1.0, min_available_nodes=3)


def test_a_deployments_grid_gives_the_bits_of_the_in_process_grid() -> None:
    sites = [{"client-id": client} for client in SITES.values()]
    assert hosted(sites[0])["hosting"] == "own"
    in_process = run(InProcessGrid(message_client(), node_configs=sites))
    assert_same_bits(run(http_grid()).model, in_process.model)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_reply_that_flower_cannot_decode_costs_its_sender_the_round_and_nobody_else(kind: str) -> None:
    damage, reason = DAMAGES[kind]
    rounds = run(http_grid(damage)).rounds
    assert [r.accepted for r in rounds] == [("3", "9")] * 2
    for r in rounds:
        assert [(j.client_id, j.kind) for j in r.rejections] == [("7", "error")]
        assert reason in r.rejections[0].reason
        assert len(last_line(r.rejections[0].reason)) < 500


def test_without_the_guard_it_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.message.guarded", lambda grid: grid)
    with pytest.raises(AttributeError, match="NoneType"):
        run(http_grid(DAMAGES["metrics without a value"][0]))


def test_of_a_deployment_one_site_that_calls_itself_simulated_does_not_shut_out_the_others() -> None:
    grid = http_grid()
    grid._client.nodes = [99, *SITES]
    grid._client.configs[99] = {"partition-id": 0, "num-partitions": 1}
    assert [r.accepted for r in run(grid).rounds] == [("3", "7", "9")] * 2


class RunGoneError(Exception):
    """What Flower raises when the run was stopped, or the connection is lost for good."""


def test_the_end_of_the_run_or_the_connection_is_no_clients_fault() -> None:
    grid = http_grid()

    def gone(_: object) -> None:
        raise RunGoneError

    for name in ("PullMessages", "GetNodes"):
        setattr(grid._client, name, gone)
    question = Message(RecordDict(), 11, "query")
    with pytest.raises(RunGoneError):
        guarded(grid).send_and_receive([question], timeout=1.0)


def test_the_wait_for_who_does_not_answer_ends_at_the_deadline_with_the_others_replies() -> None:
    grid = http_grid()
    runtime = grid._client
    runtime.PullMessages, pull = (
        (lambda r: pull(r) if number not in r.message_ids else PullAppMessagesResponse()),
        (runtime.PullMessages),
    )
    first, second = Message(RecordDict(), 11, "query"), Message(RecordDict(), 13, "query")
    number = first.object_id
    (reply,) = guarded(grid).send_and_receive([first, second], timeout=0.05)
    assert reply.metadata.src_node_id == 13
    assert guarded(grid).send_and_receive([first], timeout=0.0) == []


def test_a_message_that_the_superlink_does_not_take_is_not_waited_for() -> None:
    grid = http_grid()
    grid.push_messages = lambda messages: [None for _ in messages]
    assert guarded(grid).send_and_receive([Message(RecordDict(), 11, "query")]) == []


def test_the_grid_that_flower_deploys_is_guarded_once_and_a_simulations_is_left_as_it_is() -> None:
    assert importlib.import_module("flwr.superlink.runtime.run_serverapp").HttpGrid is HttpGrid
    once = guarded(http_grid())
    assert isinstance(once, GuardedGrid)
    assert guarded(once) is once
    in_process = InProcessGrid(message_client(), 1)
    assert guarded(in_process) is in_process
    assert [is_deployed(grid) for grid in (once, http_grid(), in_process, None)] == [True, True, False, False]
    assert not issubclass(InMemoryGrid, HttpGrid)
