"""Serialised replies are judged before any of them is deserialised, in both of Flower's APIs."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Parameters, Status, bytes_to_ndarray, ndarray_to_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import strategies
from strategies import legacy
from strategies.inprocess import InProcessGrid
from strategies.model import Model
from strategies.protocol import ARRAYS, METRICS, NEWTON_DIRECTION, NUM_EXAMPLES
from strategies.replies import LONGEST_KEY, MOST_METRICS, Reply, screen
from strategies.rules import RULES
from strategies.wire import LONGEST_HEADER, WireError, check_arrays, read_header
from tests.federations import OURS, run_message
from tests.support import initial_model, message_client, train

WEIGHT = initial_model()["weight"]
NEWTON = next(name for name, rule in RULES.items() if NEWTON_DIRECTION in rule.needs)


def saved(array: np.ndarray) -> bytes:
    return ndarray_to_bytes(np.asarray(array))


def with_header(text: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """Bytes with a header of our own; the length is right."""
    line = text.encode("latin1") + b"\n"
    return b"\x93NUMPY" + version + len(line).to_bytes(2, "little") + line + data


def header(shape: str = "(5, 4)", descr: str = "'<f4'", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


def pickled() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Touch()] * 20, dtype=object).reshape(5, 4), allow_pickle=True)
    return buffer.getvalue()


class Touch:
    """Leaves a file behind where it is unpickled."""

    path = "unpickled"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.path),))


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "pickle in a header": (pickled, r"dtype '\|O'; only numbers of at most 8 bytes"),
    "bare pickle": (lambda: pickle.dumps(Touch()), "cannot be read: its bytes are no array"),
    "ten terabytes announced": (
        lambda: with_header(header("(1250000000000,)", "'<f8'"), bytes(160)),
        r"announces 10000000000000 bytes \(shape \(1250000000000,\), <f8\) and has 160",
    ),
    "product beyond 64 bits": (lambda: with_header(header("(4294967296, 4294967297)")), "announces 73786976"),
    "wide elements announced": (lambda: with_header(header(descr="'<U2500000000'")), "only numbers"),
    "a megabyte sent": (lambda: saved(np.zeros(262144, np.float32)), r"has 1048704 bytes, more than the 1184 that 20"),
    "a megabyte of header": (lambda: with_header(header() + " " * 60_000), "more than the 1184"),
    "long header": (lambda: b"\x93NUMPY\x01\x00\xff\xff" + bytes(500), "cannot be read"),
    "nothing": (lambda: b"", "cannot be read"),
    "magic only": (lambda: b"\x93NUMPY\x01\x00", "cannot be read"),
    "another version": (lambda: with_header(header(), WEIGHT.tobytes(), b"\x02\x00"), "cannot be read"),
    "zip archive": (lambda: b"PK\x03\x04" + bytes(100), "cannot be read"),
    "expression for a shape": (lambda: with_header(header("(5*4,)"), WEIGHT.tobytes()), "cannot be read"),
    "deep nesting": (lambda: with_header(header("(" * 400 + ")" * 400)), "cannot be read"),
    "negative lengths": (lambda: with_header(header("(-5, -4)"), WEIGHT.tobytes()), "cannot be read"),
    "structure": (lambda: with_header(header(descr="[('a', '<f4')]"), WEIGHT.tobytes()), "cannot be read"),
    "missing values": (lambda: saved(WEIGHT)[:-1], "announces 80 bytes .* and has 79"),
    "more values": (lambda: saved(WEIGHT) + b"\x00", "announces 80 bytes .* and has 81"),
    "transposed": (lambda: saved(WEIGHT.T.copy()), r"shape \(4, 5\), expected \(5, 4\)"),
    "integers": (lambda: saved(WEIGHT.astype(np.int64)), "dtype int64, expected a float32-like one"),
    "complex": (lambda: saved(WEIGHT.astype(np.complex64)), "dtype '<c8'"),
    "sixteen bytes": (lambda: with_header(header(descr="'<f16'"), bytes(320)), "dtype '<f16'"),
    "no such number": (lambda: with_header(header(descr="'<f1'"), bytes(20)), "does not exist"),
    "boolean of eight bytes": (lambda: with_header(header(descr="'<b8'"), bytes(160)), "does not exist"),
    "dates": (lambda: saved(np.zeros((5, 4), "M8[s]")), "only numbers"),
}  # fmt: skip


def tensors(**changes: bytes) -> dict[str, bytes]:
    return {**{name: saved(array) for name, array in train(initial_model(), 9, 0.1).items()}, **changes}


def as_message(data: dict[str, bytes], **more: dict[str, bytes]) -> Message:
    InProcessGrid(message_client(), 1)  # Flower's Message asks who makes it.
    records = {ARRAYS: data, **more}
    content = {
        key: ArrayRecord({n: Array("float32", (5, 4), "numpy.ndarray", b) for n, b in d.items()})
        for key, d in records.items()
    }
    return Message(RecordDict({**content, METRICS: MetricRecord({NUM_EXAMPLES: 5})}), 1, "train")


def message_reply(data: dict[str, bytes], method: str = "fedpcd", direction: dict[str, bytes] | None = None) -> Reply:
    strategy = strategies.METHODS[method](**OURS)
    strategy._model = Model(initial_model())
    message = as_message(data) if direction is None else as_message(data, **{NEWTON_DIRECTION: direction})
    return strategy._reply("9", message)


def legacy_reply(data: dict[str, bytes], method: str = "fedpcd", direction: dict[str, bytes] | None = None) -> Reply:
    strategy = legacy.METHODS[method](**OURS)
    strategy._model = Model(initial_model())
    sent = Parameters([*data.values(), *(direction or {}).values()], "numpy.ndarray")
    return strategy._reply("9", FitRes(Status(Code.OK, ""), sent, 5, {}))


BOTH = pytest.mark.parametrize("reply_of", [message_reply, legacy_reply], ids=["message", "legacy"])


def reason(reply: Reply) -> str:
    accepted, rejections = screen(Model(initial_model()), [reply], ["9"], 10.0)
    assert accepted == []
    assert rejections[0].kind == "invalid"
    assert len(rejections[0].reason) < 400
    return rejections[0].reason


@pytest.fixture
def nothing_is_deserialised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("numpy was asked to read it")

    monkeypatch.setattr(np, "load", refuse)
    monkeypatch.setattr(np.lib.format, "read_array", refuse)


@BOTH
@pytest.mark.parametrize("name", BAD)
def test_bytes_that_cannot_be_the_models_are_refused_with_the_arrays_name_and_numbers_and_never_read(
    reply_of: Callable[..., Reply],
    name: str,
    nothing_is_deserialised: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make, pattern = BAD[name]
    text = reason(reply_of(tensors(weight=make())))
    assert text.startswith("array 'weight' ")
    assert re.search(pattern, text), text
    assert list(tmp_path.iterdir()) == []


@BOTH
def test_what_numpy_saves_is_read_bit_for_bit(reply_of: Callable[..., Reply]) -> None:
    sent = train(initial_model(), 9, 0.1)
    for change in (np.asfortranarray, lambda a: a.astype(">f4"), lambda a: a.astype(np.float64)):
        reply = reply_of(tensors(weight=saved(change(sent["weight"]))))
        assert reply.unreadable is None
        assert reply.arrays is not None
        np.testing.assert_array_equal(reply.arrays["weight"], sent["weight"])
        assert {n: a.tobytes() for n, a in reply.arrays.items() if n != "weight"} == {
            n: a.tobytes() for n, a in sent.items() if n != "weight"
        }


def test_missing_and_unknown_arrays_are_named_before_any_is_read(nothing_is_deserialised: None) -> None:
    assert reason(message_reply({"weight": saved(WEIGHT)})).startswith("array names differ: missing [bn.num_batches")
    crowd = {f"{i:07d}" * 100: b"" for i in range(1000)}
    assert "unexpected [000000000" in reason(message_reply(tensors(**crowd)))
    assert "unexpected [array 8, array 9]" in reason(legacy_reply(tensors(a=b"", b=b"")))
    assert "missing [mask]" in reason(legacy_reply(dict(list(tensors().items())[:-1])))


def test_several_models_or_none_are_refused(nothing_is_deserialised: None) -> None:
    strategy = strategies.FedPCD(**OURS)
    strategy._model = Model(initial_model())
    assert reason(strategy._reply("9", as_message(tensors(), more=tensors()))) == "sent 2 array records, expected one"
    empty = Message(RecordDict({METRICS: MetricRecord({NUM_EXAMPLES: 5})}), 1, "train")
    assert reason(strategy._reply("9", empty)) == "sent no arrays"


@BOTH
@pytest.mark.parametrize(
    ("spoil", "pattern"),
    [
        (lambda d: {**d, "weight": with_header(header("(1250000000000,)", "'<f8'"))}, "'weight' announces 100000000"),
        (lambda d: {**d, "scale": saved(np.zeros((), np.int64))}, "'scale' of its 'newton-direction' has shape"),
        (lambda d: {**d, "half": saved(np.zeros(4, np.float16))}, r"\(4,\) and dtype float16, expected \(3,\)"),
    ],
)
def test_newton_directions_are_judged_like_the_model(
    reply_of: Callable[..., Reply], spoil: Any, pattern: str, nothing_is_deserialised: None
) -> None:
    model = Model(initial_model())
    direction = {name: saved(model.arrays[name]) for name in model.parameters}
    text = reason(reply_of(tensors(), NEWTON, spoil(direction)))
    assert re.search(pattern, text), text


def test_a_direction_that_no_rule_asked_for_is_not_read() -> None:
    reply = message_reply(tensors(), "fedpcd", {"weight": pickled()})
    assert reply.unreadable is None
    assert reply.newton_direction is None
    assert "differ from the model's parameters" in reason(message_reply(tensors(), NEWTON, {"weight": saved(WEIGHT)}))


def test_flower_itself_reads_no_pickles() -> None:
    # Should a later release of Flower do so, our check still comes first; this test then says that it has changed.
    for read in (bytes_to_ndarray, lambda data: Array("object", (5, 4), "numpy.ndarray", data).numpy()):
        with pytest.raises(ValueError, match="allow_pickle=False"):
            read(pickled())


def test_a_hostile_client_costs_itself_the_round_in_a_whole_run() -> None:
    def hostile(message: Message, context: Any) -> Message | None:
        if message.metadata.message_type != "train" or message.content["config"]["client-id"] != "2":
            return None
        reply = message_client()(message, context)
        reply.content[ARRAYS]["weight"].data = with_header(header("(1250000000000,)", "'<f8'"), bytes(160))
        return reply

    run = run_message("fedpcd", fraction_train=1.0, grid=InProcessGrid(message_client(), 3, intercept=hostile))
    for report in run.rounds:
        assert [(j.client_id, j.kind) for j in report.rejections] == [("2", "invalid")]
        assert "'weight' announces 10000000000000 bytes" in report.rejections[0].reason
        assert len(report.accepted) == 11


@pytest.mark.parametrize(
    ("metrics", "pattern"),
    [
        ({f"metric {i}": 1.0 for i in range(MOST_METRICS + 1)}, "sent 257 metrics, more than 256"),
        ({"x" * (LONGEST_KEY + 1): 1.0}, "name has 129 characters, more than 128"),
    ],
)
def test_metrics_are_bounded_in_number_and_in_the_length_of_their_names(metrics: dict, pattern: str) -> None:
    reply = Reply("9", train(initial_model(), 9, 0.1), 5, metrics)
    assert pattern in reason(reply)
    from strategies.evaluation import evaluation_report

    report = evaluation_report(1, [Reply("9", metrics={**metrics, NUM_EXAMPLES: 5})], ("9",), NUM_EXAMPLES)
    assert report.metrics == {}
    assert "more than" in report.rejections[0].reason


@pytest.mark.parametrize("value", [10**5000, [1.0] * 10**6, "x" * 10**6], ids=["digits", "list", "text"])
def test_a_clients_own_words_are_cut_short_in_reasons(value: object) -> None:
    assert "num-examples" in reason(Reply("9", train(initial_model(), 9, 0.1), value))
    error = screen(Model(initial_model()), [Reply("9", error="x" * 10**6)], ["9"], 10.0)[1][0]
    assert len(error.reason) == 1000


@given(st.binary(max_size=300), st.integers(0, 50))
@settings(max_examples=300)
def test_arbitrary_bytes_are_refused_or_read_as_numpy_does(data: bytes, size: int) -> None:
    for sent in (data, b"\x93NUMPY\x01\x00" + data, with_header(header(), data)):
        found = None
        with contextlib.suppress(WireError):
            found = read_header("w", sent, size)
        if found is not None:
            assert len(sent) <= LONGEST_HEADER + 8 * size
            read = bytes_to_ndarray(sent)
            assert (read.shape, read.dtype) == (found.shape, found.dtype)


@given(
    hnp.arrays(
        st.sampled_from(["f2", "<f4", ">f4", "f8", "i1", "<i8", ">u2", "?"]),
        hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4),
    ),
    st.booleans(),
)
def test_every_array_of_numbers_that_numpy_saves_is_understood(array: np.ndarray, fortran: bool) -> None:
    sent = np.asfortranarray(array) if fortran else array
    found = read_header("w", saved(sent), array.size)
    assert (found.shape, found.dtype) == (sent.shape, sent.dtype)


def test_the_models_own_arrays_pass() -> None:
    model = Model(initial_model())
    check_arrays(model, {name: saved(array) for name, array in model.arrays.items()})
