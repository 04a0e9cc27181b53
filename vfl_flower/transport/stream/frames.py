"""Frames: Flower messages in Flower's own protobuf, in chunks if they are long.

Also the names and settings that both ends of a stream share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vfl_flower.config.errors import VflError

METHOD = "/vfl_flower.Stream/Exchange"
TOKEN = "vfl-token"
"""Name of the token in the metadata of a call and of its answer."""
NAME = "vfl-flower"
"""Name in the certificate. A party accepts one certificate, so any name serves."""
POLL = 0.5
"""Seconds between two looks for Flower's own messages, or two calls."""
_CHUNK = 2**20  # most bytes of a gRPC message
_LONG = b"\0"  # no Flower message begins with it
OPTIONS = [
    ("grpc.max_receive_message_length", _CHUNK),
    ("grpc.so_reuseport", 0),  # else two runs could listen on one port
    ("grpc.keepalive_time_ms", 10_000),  # notices a network that drops packets silently
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.lookahead_bytes", 2**22),  # a window of embeddings at once
    ("grpc.http2.max_frame_size", 2**22),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


def chunks(body: bytes) -> Iterator[bytes]:
    """Yield a frame whole, or if it is long, its length and then its pieces."""
    if len(body) <= _CHUNK:
        yield body
        return
    yield _LONG + len(body).to_bytes(8, "big")
    for start in range(0, len(body), _CHUNK):
        yield body[start : start + _CHUNK]


def frames(received: Iterable[bytes], largest: Callable[[], int]) -> Iterator[bytes]:
    """Yield the frames that chunks make up; refuse a frame above ``largest`` before it is read."""
    pieces: list[bytes] = []
    missing = 0
    for chunk in received:
        if missing:
            pieces.append(chunk)
            missing -= len(chunk)
            if missing < 0 or not chunk:
                raise VflError("a frame of another length than it said")
            if not missing:
                yield b"".join(pieces)
                pieces = []
        elif chunk.startswith(_LONG):
            if len(chunk) != 9:
                raise VflError("a frame without its length")
            missing = int.from_bytes(chunk[1:], "big")
            _check(missing, largest())
        else:
            _check(len(chunk), largest())
            yield chunk
    if missing:
        raise VflError("a frame of another length than it said")


def _check(size: int, most: int) -> None:
    if size > most:
        raise VflError(f"a frame of {size:,} bytes, above the limit of {most:,}")
