"""Frames: Flower messages as bytes, and what is refused of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from hypothesis import given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from tests.stream.nodes import FIRST, RUN
from vfl_flower.config.errors import VflError
from vfl_flower.transport import flower_internals
from vfl_flower.transport.flower_internals import Framed, from_bytes, to_bytes, with_records
from vfl_flower.transport.messages import DescribeOrder, EvaluateOrder, TrainOrder, Upload
from vfl_flower.transport.stream import frames as framing
from vfl_flower.transport.stream.frames import Messages
from vfl_flower.transport.stream.messages import SessionOrder
from vfl_flower.transport.wire import Call, read_order, read_reply, to_failure, to_message, to_reply


def ends() -> tuple[ClientProtocol, Messages]:
    """The protocol of a party, and the label holder's end that reads what it sends."""
    server = ServerProtocol(max_size=(None, framing.FRAME), state=State.OPEN, logger=framing.MUTE)
    return ClientProtocol(parse_uri("wss://x/"), state=State.OPEN), Messages(server)


def sent(client: ClientProtocol, *bodies: bytes) -> list[bytes]:
    messages = Messages(client)
    return [b"".join(client.data_to_send()) for body in bodies for _ in messages.frames(body)]


def received(end: Messages, data: bytes, largest: int = 2**31) -> list[Any]:
    return list(end.received(data, largest))


def near_multiples(size: int) -> st.SearchStrategy[bytes]:
    """Bodies about as long as some pieces of that size."""
    lengths = st.builds(lambda n, d: max(1, n * size + d), st.integers(0, 4), st.integers(-1, 1))
    return lengths.flatmap(lambda length: st.binary(min_size=length, max_size=length))


@given(st.lists(near_multiples(16), max_size=6), st.integers(1, 40))
def test_messages_are_what_the_frames_were_made_of(bodies: list[bytes], piece: int) -> None:
    with patch.object(framing, "FRAME", 16):
        client, end = ends()
        data = b"".join(sent(client, *bodies))
        pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
        assert [body for each in pieces for body in received(end, each)] == bodies


@given(near_multiples(16).filter(lambda body: len(body) > 16), st.data())
def test_a_message_counts_when_its_last_frame_is_in(body: bytes, data: st.DataObject) -> None:
    with patch.object(framing, "FRAME", 16):
        client, end = ends()
        bits = b"".join(sent(client, body))
        at = data.draw(st.integers(0, len(bits) - 1))
        assert received(end, bits[:at]) == [] and received(end, bits[at:]) == [body]


@pytest.mark.parametrize("length", [1001, 600_000_000, 2**40, 2**63 - 1])
@pytest.mark.parametrize("whole", [True, False])
def test_a_frame_above_the_limit_is_refused_by_its_length(length: int, whole: bool) -> None:
    _, end = ends()
    head = bytes([0x82 if whole else 0x02, 0xFF]) + length.to_bytes(8, "big")
    with pytest.raises(VflError, match=rf"^an invalid frame \(frame with {length} bytes exceeds"):
        received(end, head, largest=1000)


def test_many_frames_of_one_message_are_refused_above_the_limit_too() -> None:
    client, end = ends()
    with patch.object(framing, "FRAME", 100):
        pieces = sent(client, b"\n" * 1100)
    for each in pieces[:-1]:
        assert received(end, each, largest=1000) == []
    with pytest.raises(VflError, match="frame with 100 bytes after reading 1000 bytes exceeds"):
        received(end, pieces[-1], largest=1000)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x82\x01\n", "incorrect masking"),
        (b"\xc2\x81\0\0\0\0\n", "reserved bits must be 0"),  # compressed
        (b"\x83\x80\0\0\0\0", "invalid opcode"),
        (b"\x80\x80\0\0\0\0", "unexpected continuation frame"),
        (b"\x02\x80\0\0\0\0\x82\x80\0\0\0\0", "expected a continuation frame"),
        (b"\x89\xfe\x01\x00" + bytes(4 + 256), "control frame too long"),
        (b"\x88\x81\0\0\0\0\0", "close frame too short"),
    ],
)
def test_an_invalid_frame_is_refused(data: bytes, why: str) -> None:
    _, end = ends()
    with pytest.raises(VflError, match=rf"^an invalid frame \({why}\)$"):
        received(end, data)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_messages_or_are_refused(data: bytes) -> None:
    _, end = ends()
    try:
        assert sum(map(len, received(end, data))) <= len(data)
    except VflError as error:
        assert "\n" not in str(error)


def plain(message: Message) -> dict[str, Any]:
    return {key: value for key, value in vars(message.metadata).items() if value}


ORDERS = [
    DescribeOrder(outputs=10),
    TrainOrder(
        exchange=3,
        epoch=2,
        first=5,
        steps=4,
        coordinated=False,
        arrays={
            "gradient": np.arange(12.0, dtype=np.float32).reshape(3, 4),
            "none": np.zeros((0, 4), np.float32),
            "bits": np.arange(256, dtype=np.uint8),
            "scalar": np.array(1.5, np.float16),
            "long": np.arange(2**17, dtype=np.int64),
        },
    ),
    EvaluateOrder(exchange=2**40),
    SessionOrder(address="[::1]:1", certificate="é\n", token="", keep=True),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_a_message_is_the_same_after_its_way_through_bytes(order: Any) -> None:
    made = to_message(order, FIRST, ttl=60)
    made.metadata.__dict__["_message_id"] = "stream-1"
    client, end = ends()
    (frame,) = received(end, b"".join(sent(client, to_bytes(made))))
    message = from_bytes(frame)
    assert plain(message) == plain(made)
    got = read_order(message, type(order))
    assert {**vars(got), "arrays": 0} == {**vars(order), "arrays": 0}
    assert got.arrays.keys() == order.arrays.keys()
    for name, array in order.arrays.items():
        assert got.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(got.arrays[name], array)
    upload = Upload(party=1, exchange=3, peak_memory_mb=0.5, arrays=order.arrays)
    reply = from_bytes(to_bytes(to_reply(upload, message)))
    assert reply.metadata.reply_to_message_id == "stream-1"
    assert (reply.metadata.src_node_id, reply.metadata.run_id) == (FIRST, RUN)
    assert read_reply(reply, Upload).peak_memory_mb == 0.5


def test_an_error_is_the_same_after_its_way_through_bytes() -> None:
    message = to_message(ORDERS[0], FIRST, ttl=60)
    error = from_bytes(to_bytes(Message(Error(code=3, reason="gone"), reply_to=message)))
    assert (error.error.code, error.error.reason) == (3, "gone")
    with pytest.raises(VflError, match=r"^failed: too few rows$"):
        read_reply(from_bytes(to_bytes(to_failure("too few rows", message))), Upload)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(VflError, match="no Flower message"):
        from_bytes(body)


@given(st.data())
def test_a_message_with_an_altered_byte_is_refused_or_another(data: st.DataObject) -> None:
    body = bytearray(to_bytes(to_message(ORDERS[2], FIRST, ttl=60)))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        read_order(from_bytes(bytes(body)), EvaluateOrder)
    except VflError as error:
        assert "\n" not in str(error)


# --- without Flower's records --------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_a_frame_has_the_bytes_that_flower_makes_of_its_records(order: Any) -> None:
    call = to_message(order, FIRST, ttl=60, call=True)
    call.metadata.__dict__["_message_id"] = "stream-1"
    frame = to_bytes(call)
    assert isinstance(call, Framed) and call.payload is not None
    assert frame == to_bytes(with_records(call))
    got = from_bytes(frame)
    assert isinstance(got, Framed) and got.payload is not None
    assert got.content == call.content and got.payload is None
    reply = to_reply(Upload(party=1, exchange=3, arrays=order.arrays), got)
    body = to_bytes(reply)
    assert isinstance(reply, Framed) and body == to_bytes(with_records(reply))


@pytest.mark.parametrize("value", [1, 1.0, True, 2**63, -1, ""])
def test_a_remembered_scalar_keeps_its_type(value: Any) -> None:
    """Equal numbers of several types are different bytes."""
    reply = to_message(EvaluateOrder(exchange=1, number=value), FIRST, ttl=60, call=True)
    assert to_bytes(reply) == to_bytes(reply) == to_bytes(with_records(reply))


def test_a_frame_takes_arrays_without_a_copy_and_refuses_what_protobuf_could_not_read() -> None:
    long = np.arange(60, dtype=np.float32).reshape(12, 5)
    for array, shares in ((long, True), (long.T, False)):
        order = TrainOrder(**{**vars(ORDERS[1]), "arrays": {"long": array}})
        call = to_message(order, FIRST, ttl=60, call=True)
        assert isinstance(call, Call)
        assert np.shares_memory(np.asarray(call.pieces()[1][-1]), long) == shares
        assert len(to_bytes(call)) > array.nbytes
        with (
            patch.object(flower_internals, "_LARGEST", array.nbytes),
            pytest.raises(VflError, match="too large for protobuf"),
        ):
            to_bytes(call)


def test_records_that_a_mod_has_changed_are_sent() -> None:
    call = to_message(EvaluateOrder(exchange=1), FIRST, ttl=60, call=True)
    for message in (call, from_bytes(to_bytes(call))):
        message.content.config_records["scalars"]["exchange"] = 2
        assert read_order(message, EvaluateOrder).exchange == 2
        assert read_order(from_bytes(to_bytes(message)), EvaluateOrder).exchange == 2


SMALL_ORDER = TrainOrder(
    exchange=3,
    epoch=2,
    first=5,
    steps=4,
    coordinated=False,
    arrays={"gradient": np.ones((2, 3), np.float32), "bits": np.arange(5, dtype=np.uint8)},
)


def outcome(read: Any, body: bytes) -> Any:
    """Return the content of an order that is read, or the sentence of its refusal."""
    try:
        order = read_order(read(body), TrainOrder)
    except (VflError, ValueError) as error:  # an error has no content
        return str(error)
    arrays = {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in order.arrays.items()}
    return {**vars(order), "arrays": arrays}


def by_flower(body: bytes) -> Message:
    """The message, read by Flower's own functions."""
    try:
        return message_from_proto(ProtoMessage.FromString(body))
    except Exception:
        raise VflError("a frame that is no Flower message") from None


def altered(frame: bytes, at: int, by: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ by]) + frame[at + 1 :]


def differences() -> int:
    """How many altered frames of a small order are read otherwise than by Flower's records."""
    frame = to_bytes(to_message(SMALL_ORDER, FIRST, ttl=60, call=True))
    bodies = [altered(frame, at, by) for at in range(len(frame)) for by in (1, 2, 8, 64, 128)]
    bodies += [frame[:length] for length in range(len(frame))]
    return sum(outcome(from_bytes, each) != outcome(by_flower, each) for each in [frame, *bodies])


def test_an_altered_frame_is_read_or_refused_as_flowers_records_would_be() -> None:
    assert differences() == 0


def test_the_comparison_finds_a_reader_that_leaves_a_check_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = flower_internals._parts_from_proto

    def careless(proto: Any) -> Any:
        parts = read(proto)
        return parts and parts._replace(scalars={**parts.scalars, "coordinated": True})

    monkeypatch.setattr(flower_internals, "_parts_from_proto", careless)
    assert differences() > 100
