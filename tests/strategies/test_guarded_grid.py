"""Replies that Flower cannot decode: what is behind a real HttpGrid here is a SuperLink in memory."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable

import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse, PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, validate_object_content
from flwr.supercore.run import Run, RunNotRunningException
from flwr.superlink.grid import HttpGrid

from strategies.guarded_grid import GuardedGrid, guarded, is_deployed
from strategies.inprocess import InProcessGrid
from strategies.logs import last_line
from tests.federations import run_legacy, run_message
from tests.support import assert_same_bits, hosted, initial_model, legacy_client, message_client

SITES = {11: "3", 12: "7", 13: "9"}
"""Node ids and the clients that they are."""
BAD = 12
Contents = dict[str, bytes]
Damage = Callable[[Message, Contents], bytes]
"""Bytes of a reply's object that replace those of the object of the same class."""


class SuperLinkInMemory:
    """Flower's Runtime API as far as a grid calls it; one site's training replies may be damaged."""

    def __init__(self, damage: Damage | None = None, app: ClientApp | None = None) -> None:
        self.app = app or message_client()
        self.damage = damage
        self.objects: Contents = {}
        self.replies: dict[str, tuple[object, object]] = {}
        self.replies_to: dict[str, str] = {}
        self.unasked: list[tuple[object, object]] = []
        self.lock = threading.Lock()
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
        with self.lock:
            for number in request.message_ids:
                if number in self.objects:
                    self._answer(number)
        found = list(self.unasked)
        found += [self.replies.pop(number) for number in request.message_ids if number in self.replies]
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
        envelope, root = _envelope(reply), reply.object_id
        if self.damage is not None and node == BAD and question.metadata.message_type == "train":
            contents, root = _replace(contents, root, self.damage(reply, contents))
            for content in contents.values():
                validate_object_content(content)  # Flower's SuperLink takes it
        self.objects |= contents
        self.replies[number], self.replies_to[number] = _addressed(envelope, contents, root), root
        del self.objects[number]


def _envelope(message: Message) -> tuple[object, object]:
    return message_to_proto(remove_content_from_message(message)), get_object_tree(message)


def _addressed(envelope: tuple[object, object], contents: Contents, root: str) -> tuple[object, object]:
    """Let an envelope refer to these objects."""
    message, tree = envelope
    message.metadata.message_id = tree.object_id = root
    tree.ClearField("children")
    tree.children.extend(type(tree)(object_id=name) for name in contents if name != root)
    return envelope


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


def _bomb(reply: Message, contents: Contents) -> bytes:
    # One chunk of the weights' 80 bytes, named a million times.
    body = {"dtype": "float32", "shape": [1], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 10**6}
    return _body(b"Array", contents, json.dumps(body).encode())


DAMAGES: dict[str, tuple[Damage, str]] = {
    "metrics without a value": (lambda r, c: _body(b"MetricRecord", c, b"\n\x03\n\x01a"), "AttributeError"),
    "metrics that are no protobuf": (lambda r, c: _body(b"MetricRecord", c, b"\xff" * 9), "DecodeError"),
    "arrays that are no protobuf": (lambda r, c: _body(b"ArrayRecord", c, b"\xff" * 9), "its reply cannot be read"),
    "a message that is no protobuf": (lambda r, c: _body(b"Message", c, b"\xff" * 9), "DecodeError"),
    "a message without content": (lambda r, c: _body(b"Message", c, b"", children=False), "IndexError"),
    "an array that unfolds": (_bomb, "its arrays have "),
    "too much besides arrays": (lambda r, c: _body(b"MetricRecord", c, bytes(2**24)), "bytes besides its arrays"),
    "another's label": (_relabelled, "says that it answers another message"),
}


def http_grid(damage: Damage | None = None, app: ClientApp | None = None) -> HttpGrid:
    """Flower's grid of a deployment."""
    grid = HttpGrid(token="t")
    grid._client = SuperLinkInMemory(damage, app)
    grid.set_run(Run.create_empty(1))
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


@pytest.mark.parametrize("damage", [None, DAMAGES["metrics without a value"][0]])
def test_what_a_node_sends_unasked_costs_nobody_the_round(damage: Damage | None) -> None:
    # Flower's SuperLink takes any registered node's message to the server, and hands it out with the replies.
    grid = http_grid()
    stray = Message(RecordDict({"metrics": MetricRecord({"a": 1.0})}), 1, "train")
    contents, root = {name: part.deflate() for name, part in get_all_nested_objects(stray).items()}, stray.object_id
    if damage is not None:
        contents, root = _replace(contents, root, damage(stray, contents))
    grid._client.objects |= contents
    grid._client.unasked.append(_addressed(_envelope(stray), contents, root))
    assert [r.accepted for r in run(grid).rounds] == [("3", "7", "9")] * 2


def test_the_older_api_is_guarded_too() -> None:
    names = list(initial_model())
    grid = http_grid(DAMAGES["metrics without a value"][0], legacy_client(names))
    run = run_legacy("fedpcd", rounds=1, grid=grid, fraction_fit=1.0)
    assert run.rounds[0].accepted == ("3", "9")
    assert [(j.client_id, j.kind) for j in run.rounds[0].rejections] == [("7", "error")]
    assert "its reply cannot be read" in run.rounds[0].rejections[0].reason


def test_a_reply_of_too_many_objects_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.reply_reading._MOST_OBJECTS", 2)
    (reply,) = guarded(http_grid()).send_and_receive([Message(RecordDict(), 11, "query")])
    assert reply.error.reason == "its reply cannot be read: ValueError: it has more than 2 objects"


def test_no_more_is_fetched_than_a_reply_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.reply_reading._ROOM_BYTES", 0)
    monkeypatch.setattr("strategies.reply_reading._MOST_PLAIN_BYTES", 100)
    (reply,) = guarded(http_grid()).send_and_receive([Message(RecordDict(), 11, "query")])
    assert reply.error.reason == "its reply cannot be read: ValueError: it has more than 100 bytes"


GONE = {"the run was stopped": RunNotRunningException(), "the connection is lost": ConnectionError("refused")}


@pytest.mark.parametrize("kind", GONE)
@pytest.mark.parametrize("while_doing", ["PullMessages", "PullObject"])
def test_the_end_of_the_run_or_the_connection_is_no_clients_fault(while_doing: str, kind: str) -> None:
    grid = http_grid()

    def gone(_: object) -> None:
        raise GONE[kind]

    for name in (while_doing, "GetNodes"):
        setattr(grid._client, name, gone)
    with pytest.raises(type(GONE[kind])):
        guarded(grid).send_and_receive([Message(RecordDict(), 11, "query")])


def test_the_wait_for_who_does_not_answer_ends_at_the_deadline_with_the_others_replies() -> None:
    grid = http_grid()
    runtime, pull = grid._client, grid._client.PullMessages
    runtime.PullMessages = lambda r: pull(type(r)(message_ids=[i for i in r.message_ids if i != number]))
    first, second = Message(RecordDict(), 11, "query"), Message(RecordDict(), 13, "query")
    number = first.object_id
    (reply,) = guarded(grid).send_and_receive([first, second], timeout=0.05)
    assert reply.metadata.src_node_id == 13
    assert guarded(grid).send_and_receive([first], timeout=0.0) == []
    (reply,) = guarded(grid).send_and_receive([second], timeout=0.0)
    assert reply.metadata.src_node_id == 13


def test_a_reply_whose_sender_stopped_in_the_middle_does_not_hold_up_the_others(monkeypatch) -> None:
    monkeypatch.setattr("strategies.guarded_grid._PATIENCE_SECONDS", 0.1)
    grid, stopped = http_grid(), threading.Event()
    runtime, pull = grid._client, grid._client.PullObject
    questions = [Message(RecordDict(), node, "query") for node in SITES]
    late = questions[0].object_id

    def pull_object(request):
        half = runtime.replies_to[late] == request.object_id and not stopped.is_set()
        return PullObjectResponse(object_found=True, object_available=False) if half else pull(request)

    runtime.PullObject = pull_object
    *others, unfinished = guarded(grid).send_and_receive(questions, timeout=0.5)
    assert {reply.metadata.src_node_id for reply in others} == {12, 13}
    assert "its reply cannot be read: ObjectPullError" in unfinished.error.reason
    assert unfinished.metadata.reply_to_message_id == late
    # Flower asks again after a second; a reply that is complete by then counts, and nobody waits for another.
    threading.Timer(0.2, stopped.set).start()
    replies = guarded(grid).send_and_receive(questions[:1], timeout=30.0)
    assert [reply.metadata.src_node_id for reply in replies] == [11]


def slow_grid(seconds: float) -> HttpGrid:
    """A grid that takes this long to fetch an object."""
    grid = http_grid()
    pull = grid._client.PullObject

    def slowly(request):
        time.sleep(seconds)
        return pull(request)

    grid._client.PullObject = slowly
    return grid


def test_replies_that_were_there_at_the_deadline_count_though_reading_them_takes_longer(monkeypatch) -> None:
    monkeypatch.setattr("strategies.guarded_grid._PATIENCE_SECONDS", 0.01)
    questions = [Message(RecordDict(), node, "query") for node in SITES]
    replies = guarded(slow_grid(0.2)).send_and_receive(questions, timeout=0.0)
    assert {reply.metadata.src_node_id for reply in replies} == set(SITES)


def test_reading_ends_when_the_time_for_it_is_over_and_leaves_no_thread(monkeypatch) -> None:
    monkeypatch.setattr("strategies.reply_reading.GRACE_SECONDS", 0.3)
    grid, before, began = slow_grid(0.2), set(threading.enumerate()), time.monotonic()
    # Two thousand objects that Flower would fetch to the last.
    pull = grid._client.PullMessages

    def many(request):
        answer = pull(request)
        for tree in answer.message_object_trees:
            tree.children.extend(type(tree)(object_id=tree.children[0].object_id) for _ in range(2000))
        return answer

    grid._client.PullMessages = many
    assert guarded(grid).send_and_receive([Message(RecordDict(), n, "query") for n in SITES], timeout=0.0) == []
    while (left := set(threading.enumerate()) - before) and time.monotonic() - began < 30:
        time.sleep(0.05)
    assert left == set()
    assert time.monotonic() - began < 30


def test_a_message_that_the_superlink_does_not_take_is_not_waited_for() -> None:
    grid = http_grid()
    grid.push_messages = lambda messages: ["" for _ in messages]
    assert guarded(grid).send_and_receive([Message(RecordDict(), 11, "query")]) == []


def test_the_grid_that_flower_deploys_is_guarded_once_and_a_simulations_is_left_as_it_is() -> None:
    assert importlib.import_module("flwr.superlink.runtime.run_serverapp").HttpGrid is HttpGrid
    once = guarded(http_grid())
    assert isinstance(once, GuardedGrid)
    assert guarded(once) is once
    in_process = InProcessGrid(message_client(), 1)
    assert guarded(in_process) is in_process
    assert [is_deployed(grid) for grid in (once, http_grid(), in_process, None)] == [True, True, False, True]


class OtherGrid:
    """A grid that is neither Flower's nor ours."""


def test_a_grid_of_an_unknown_kind_is_used_as_it_is_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    other = OtherGrid()
    assert guarded(other) is other
    assert "a damaged reply can end this run: FedPCD does not know OtherGrid" in caplog.text


def test_another_release_of_flower_that_cannot_be_guarded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "strategies.reply_reading", None)
    monkeypatch.delattr("strategies.reply_reading", raising=False)
    with pytest.raises(RuntimeError, match=r"this release of Flower .* install flwr 1\.42 on the server"):
        guarded(http_grid())
