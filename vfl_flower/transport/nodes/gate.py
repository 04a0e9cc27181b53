"""Gate of a SuperLink's Fleet API: it reads a body only for a registered key.

Flower 1.42 reads and parses a whole body, of any size, before it looks at the key that signed the
call. The gate asks for key and signature first, which are in the call's headers. It then reads as
much as an honest SuperNode sends, within the time that an honest SuperNode takes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from threading import Lock
from typing import Any, NamedTuple

from vfl_flower.transport.nodes.strangers import Strangers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET = "/v1/fleet/"
_ACTIVATE, _ASK = "activate-node", "pull-messages"
_NEWS = ("/v1/runtime/push-messages", "/v1/runtime/push-object")  # of a run, to a SuperNode
_MOMENT = 0.03  # seconds after the last such call, in which the next one comes
HELD = 1.0  # most seconds for which a question for messages is held
NOT_KNOWN = 2004
"""Code of the answer to an unregistered key. By it a SuperNode ends, and prints the sentence."""
_ANSWER_TO_STRANGERS = {
    "code": NOT_KNOWN,
    "detail": "Failed to activate SuperNode: its key is not registered, or its clock is wrong by "
    "minutes. Have the label holder register the key, and check the clock.",
}


class Limit(NamedTuple):
    """Limits of one call."""

    size: int  # bytes of the body, at most
    seconds: float  # in which the whole body must have come


_SMALL = Limit(16 << 10, 30.0)
LIMITS = {
    "push-object": Limit(6 << 20, 300.0),  # Flower cuts arrays into pieces of 5 MiB
    "push-messages": Limit(1 << 20, 60.0),  # the ids of all pieces: 1 MiB names 70 GB
}
AT_ONCE = 4  # calls of one kind that a key may have under way; a SuperNode has two at most


class Bell:
    """Holds SuperNodes' questions for messages until a run sends one, for at most a second."""

    def __init__(self) -> None:
        self._rung, self._news = 0, asyncio.Event()
        self._heard: dict[bytes, int] = {}  # by caller: the rings before its last wait ended
        self._soon: asyncio.TimerHandle | None = None

    async def wait(self, caller: bytes, receive: Receive) -> bool:
        """Wait for a ring, unless there was one since the caller's last wait.

        Return whether the caller is still there: Flower gives a message once, and it would be lost.
        """
        if self._heard.get(caller) == self._rung:
            news, gone = map(asyncio.ensure_future, (self._news.wait(), _gone(receive)))
            try:
                await asyncio.wait((news, gone), timeout=HELD, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return False
            finally:
                news.cancel()
                gone.cancel()
        self._heard[caller] = self._rung
        return True

    def ring_soon(self) -> None:
        """Ring in a moment: a node may not ask for objects before they are there."""
        if self._soon:
            self._soon.cancel()
        self._soon = asyncio.get_running_loop().call_later(_MOMENT, self._ring)

    def _ring(self) -> None:
        self._rung += 1
        self._news.set()
        self._news = asyncio.Event()


class Gate:
    """ASGI middleware that refuses a call before it reads the body, unless a known key signs it."""

    def __init__(self, app: App, caller: Callable[[Scope], bytes | None]) -> None:
        self._app = app
        self._caller = caller
        self._under_way: Counter[tuple[bytes, str]] = Counter()
        self._bell = Bell()
        self._strangers = Strangers("Refused calls that no registered key has signed")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            await self._pass_on(scope, receive, send)
            return
        call = scope["path"].removeprefix(FLEET)
        key = await asyncio.to_thread(self._caller, scope)
        if key is None:
            self._strangers.refused()
            await _answer(send, 412 if call == _ACTIVATE else 401, _ANSWER_TO_STRANGERS)
        elif self._under_way[key, call] >= AT_ONCE:
            await _answer(send, 503, {"detail": "Too many calls at once. Try again."})
        else:
            self._under_way[key, call] += 1
            try:
                asks = key if call == _ASK else None
                await self._serve(LIMITS.get(call, _SMALL), scope, receive, send, asks)
            finally:
                self._under_way[key, call] -= 1
                self._under_way += Counter()  # drop zeros

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call that is no SuperNode's. Ring if it has brought a part of a message."""

        async def noted(message: MutableMapping[str, Any]) -> None:
            if message.get("status") == 200 and scope["path"] in _NEWS:
                self._bell.ring_soon()
            await send(message)

        await self._app(scope, receive, noted)

    async def _serve(
        self, limit: Limit, scope: Scope, receive: Receive, send: Send, asks: bytes | None
    ) -> None:
        """Read the body within its limit, and hand it on in one piece; hold a key's question."""
        try:
            async with asyncio.timeout(limit.seconds):
                body = await _read(limit.size, receive)
        except TimeoutError:
            await _answer(send, 408, {"detail": "The body did not come in time."})
            return
        except ValueError:
            await _answer(send, 413, {"detail": f"The body has more than {limit.size} bytes."})
            return
        if body is None or (asks and not await self._bell.wait(asks, receive)):
            return  # the caller has gone
        pieces = [{"type": "http.request", "body": body, "more_body": False}]
        del body

        async def again() -> MutableMapping[str, Any]:
            return pieces.pop() if pieces else await receive()

        await self._app(scope, again, send)


async def _gone(receive: Receive) -> None:
    """Wait until a caller goes whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(size: int, receive: Receive) -> bytes | None:
    """Return a whole body, None if the caller goes; `ValueError` if it has more bytes."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > size:
            raise ValueError
        if not message.get("more_body", False):
            return bytes(body)


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    """Answer a call whose body stays unread, and close the connection."""
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class LogBudget(logging.Filter):
    """Bounds a SuperLink's log: it cuts long lines, and leaves out too many.

    Refused calls get no lines; the gate logs their number.
    """

    LINE = 1000  # characters
    TRACE = 8000  # characters, as which a traceback counts
    A_MINUTE = 100_000  # characters

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._since = time.monotonic()
        self._left = self.A_MINUTE
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written; shorten it, or add how many were not."""
        text = record.getMessage()
        if record.name == "uvicorn.access" and FLEET in text and text.endswith((" 401", " 412")):
            return False
        with self._lock:
            now = time.monotonic()
            if now >= self._since + 60:
                self._since, self._left = now, self.A_MINUTE
            size = min(len(text), self.LINE) + (self.TRACE if record.exc_info else 0)
            if size > self._left:
                self._dropped += 1
                return False
            self._left -= size
            dropped, self._dropped = self._dropped, 0
        if len(text) > self.LINE or dropped:
            said = f" (lines left out before this one: {dropped})" if dropped else ""
            record.msg, record.args = text[: self.LINE] + said, ()
        return True
