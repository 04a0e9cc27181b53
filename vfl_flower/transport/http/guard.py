"""Bearer tokens and bounds before an application that answers HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Lock

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vfl_flower.config.audit_log import AuditLog
from vfl_flower.transport.http.certificate import Certificate
from vfl_flower.transport.http.tokens import Tokens

STATUSES = (200, 400, 401, 404, 405, 408, 413, 422, 429, 431, 500, 503)
"""Statuses of answers, whose counters begin at zero."""

_MOST_BYTES = 2**20  # of a call's body
_BODY_SECONDS = 10.0  # within which a body must come
_DROPPED = 2**24  # bytes of a refused body that are read, so that the caller sees the refusal


class Guard:
    """Checks the token before it reads the body, and bounds the body's size and time.

    The guarded application finds the caller's name in its scope, as ``vfl_caller``. Anybody may
    read ``open_paths``. ``answered`` hears each answer's status, and the caller's name or an empty
    text.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: Tokens,
        open_paths: Collection[str] = (),
        answered: Callable[[int, str], None] = lambda status, caller: None,
    ) -> None:
        self._app, self._tokens, self._open, self.answered = app, tokens, open_paths, answered
        self.certificate: Certificate | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call, or refuse it."""
        inner = scope
        if scope["method"] == "HEAD":  # the server sends no body
            inner = {**scope, "method": "GET"}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answered(message["status"], scope.get("vfl_caller", ""))
            await send(message)

        if scope["path"] in self._open and inner["method"] == "GET":
            await self._app(inner, receive, sending)
            return
        headers = dict(scope["headers"])
        kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        caller = self._tokens.caller(token.strip()) if kind.lower() == "bearer" else None
        if caller is None:
            said = "Send a valid token: Authorization: Bearer TOKEN."
            await _refuse(receive, sending, 401, said)
            return
        scope["vfl_caller"] = inner["vfl_caller"] = caller  # the connection's rank depends on it
        size = headers.get(b"content-length", b"0")
        long = f"A body has at most {_MOST_BYTES} bytes."
        if not size.isdigit() or len(size) > 18 or int(size) > _MOST_BYTES:
            await _refuse(receive, sending, 413, long)
            return
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = await _body(receive)
        except TimeoutError:
            said = f"A body must come within {_BODY_SECONDS:g} seconds."
            await _refuse(None, sending, 408, said)
            return
        if body is None:  # the caller has gone
            return
        if len(body) > _MOST_BYTES:
            await _refuse(receive, sending, 413, long)
            return
        whole: Message = {"type": "http.request", "body": bytes(body), "more_body": False}
        parts = [whole]

        async def again() -> Message:
            return parts.pop() if parts else await receive()

        await self._app(inner, again, sending)


class Refusals:
    """Counts refused calls, for the audit log. `count` and `write` may be called in two threads.

    A `write` makes one line for all strangers, and one for each caller: else they could fill the
    disk.
    """

    def __init__(self, audit: AuditLog) -> None:
        self._audit, self._lock = audit, Lock()
        self._found: Counter[tuple[str, int]] = Counter()

    def count(self, status: int, caller: str) -> None:
        """Count a refused call; ``caller`` is empty if it has no valid token."""
        with self._lock:
            self._found[caller, status] += 1

    def write(self) -> None:
        """Write the calls since the last time. If the log fails, they are not counted again."""
        with self._lock:
            found, self._found = self._found, Counter()
        of: dict[str, dict[str, int]] = {}
        for (caller, status), calls in sorted(found.items()):
            of.setdefault(caller, {})[str(status)] = calls
        for caller, statuses in of.items():
            event, outcome = ("refused", "refused") if caller else ("stranger", "unauthorised")
            fields = {"caller": caller} if caller else {}
            calls = sum(statuses.values())
            self._audit.write(event, **fields, calls=calls, statuses=statuses, outcome=outcome)


async def _body(receive: Receive) -> bytearray | None:
    """Return the body of a call, or its begin if it is too long. None: the caller has gone."""
    body = bytearray()
    while len(body) <= _MOST_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message["body"]
        if not message["more_body"]:
            break
    return body


async def _refuse(receive: Receive | None, send: Send, status: int, sentence: str) -> None:
    """Refuse a call, and close its connection. With ``receive``, drop the rest of the body first.

    A caller that still sends would not see the refusal if the connection were closed at once.
    """
    said = orjson.dumps({"error": sentence})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(said)),
        (b"connection", b"close"),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": said, "more_body": receive is not None})
    if receive is None:
        return
    left = _DROPPED
    with suppress(TimeoutError):
        async with asyncio.timeout(_BODY_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body"):
                    break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
