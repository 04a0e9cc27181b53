"""Frames: Flower messages as bytes, and what is refused of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import grpc
import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from hypothesis import given
from hypothesis import strategies as st

from tests.stream.nodes import FIRST, RUN
from vfl_flower.config.errors import VflError
from vfl_flower.transport import flower_internals
from vfl_flower.transport.flower_internals import Framed, from_bytes, to_bytes, with_records
from vfl_flower.transport.messages import DescribeOrder, EvaluateOrder, TrainOrder, Upload
from vfl_flower.transport.stream import frames as framing
from vfl_flower.transport.stream.frames import chunks, frames
from vfl_flower.transport.stream.messages import SessionOrder
from vfl_flower.transport.wire import read_order, read_reply, to_failure, to_message, to_reply


def no_limit() -> int:
    """No limit."""
    return 2**31


def near_multiples(size: int) -> st.SearchStrategy[bytes]:
    """Bodies about as long as some pieces of that size; short ones begin as messages do."""
    lengths = st.builds(lambda n, d: max(1, n * size + d), st.integers(0, 4), st.integers(-1, 1))
    bodies = lengths.flatmap(lambda length: st.binary(min_size=length, max_size=length))
    return bodies.map(lambda body: body if len(body) > size else b"\n" + body[1:])


@given(st.lists(near_multiples(16), max_size=6))
def test_frames_are_what_the_chunks_were_made_of(bodies: list[bytes]) -> None:
    with patch.object(framing, "_CHUNK", 16):
        sent = [chunk for body in bodies for chunk in chunks(body)]
        assert all(len(chunk) <= 16 for chunk in sent)
        assert list(frames(sent, no_limit)) == bodies


@given(near_multiples(16).filter(lambda body: len(body) > 16), st.binary(min_size=1))
def test_a_frame_of_another_length_than_it_said_is_refused(body: bytes, more: bytes) -> None:
    with patch.object(framing, "_CHUNK", 16):
        head, *pieces = chunks(body)
        with pytest.raises(VflError, match="another length"):
            list(frames([head, *pieces[:-1], pieces[-1] + more], no_limit))
        with pytest.raises(VflError, match="another length"):
            list(frames([head, b"", *pieces], no_limit))


@given(near_multiples(16).filter(lambda body: len(body) > 16))
def test_a_frame_that_ends_too_early_is_refused(body: bytes) -> None:
    with patch.object(framing, "_CHUNK", 16):
        received: list[bytes] = []
        with pytest.raises(VflError, match="another length"):
            received += frames(list(chunks(body))[:-1], no_limit)
        assert received == []


@pytest.mark.parametrize("length", [1001, 600_000_000, 2**40, 2**64 - 1])
def test_a_frame_above_the_limit_is_refused_by_its_length(length: int) -> None:
    def received() -> Iterator[bytes]:
        yield b"\0" + length.to_bytes(8, "big")
        raise AssertionError("it was waited for")

    with pytest.raises(VflError, match=f"frame of {length:,} bytes, above the limit of 1,000"):
        list(frames(received(), lambda: 1000))


def test_a_frame_in_one_piece_is_refused_above_the_limit_too() -> None:
    limits = iter([1000, 999])
    assert list(frames([b"\n" * 1000], lambda: next(limits))) == [b"\n" * 1000]
    with pytest.raises(VflError, match="frame of 1,000 bytes, above the limit of 999"):
        list(frames([b"\n" * 1000], lambda: next(limits)))


def test_a_compressed_chunk_is_not_unpacked_beyond_its_limit() -> None:
    got: list[int] = []

    def note(received: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for chunk in received:
            got.append(len(chunk))
            yield b""

    class Noting(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(note)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Noting()], options=framing.OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    options, gzip = [("grpc.enable_http_proxy", 0)], grpc.Compression.Gzip
    with grpc.insecure_channel(f"127.0.0.1:{port}", options, gzip) as channel:
        call: Any = channel.stream_stream("/x/y")
        assert list(call(iter([b"0" * framing._CHUNK]))) == [b""]  # the control
        with pytest.raises(grpc.RpcError, match="Decompressed message larger than max"):
            list(call(iter([b"0" * 2**26])))
    server.stop(None)
    assert got == [framing._CHUNK]


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
    sent = to_message(order, FIRST, ttl=60)
    sent.metadata.__dict__["_message_id"] = "stream-1"
    (frame,) = frames(chunks(to_bytes(sent)), no_limit)
    message = from_bytes(frame)
    assert plain(message) == plain(sent)
    received = read_order(message, type(order))
    assert {**vars(received), "arrays": 0} == {**vars(order), "arrays": 0}
    assert received.arrays.keys() == order.arrays.keys()
    for name, array in order.arrays.items():
        assert received.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(received.arrays[name], array)
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
    assert isinstance(call, Framed) and call.parts is not None
    assert frame == to_bytes(with_records(call))
    received = from_bytes(frame)
    assert isinstance(received, Framed) and received.parts is not None
    assert received.content == call.content and received.parts is None
    reply = to_reply(Upload(party=1, exchange=3, arrays=order.arrays), received)
    body = to_bytes(reply)
    assert isinstance(reply, Framed) and body == to_bytes(with_records(reply))


def test_records_that_a_mod_has_changed_are_sent() -> None:
    call = to_message(EvaluateOrder(exchange=1), FIRST, ttl=60, call=True)
    received = from_bytes(to_bytes(call))
    for message in (call, received):
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
