"""Bearer tokens and bounds before an application that answers HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vfl_flower.label_holder.serving.tokens import Tokens

_MOST_BYTES = 2**20  # of a call's body
_BODY_SECONDS = 10.0  # within which a body must come


class Guard:
    """Checks the token before it reads the body, and bounds the body's size and time.

    Parameters
    ----------
    app : the guarded application. It finds the caller's name in its scope, as ``vfl_caller``.
    open_paths : paths that anybody may read.
    strange : is called for each call without a valid token.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: Tokens,
        open_paths: Collection[str] = (),
        strange: Callable[[], None] = lambda: None,
    ) -> None:
        self._app, self._tokens, self._open, self._strange = app, tokens, open_paths, strange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call, or refuse it."""
        if scope["type"] != "http" or (scope["path"] in self._open and scope["method"] == "GET"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        caller = self._tokens.caller(token.strip()) if kind.lower() == "bearer" else None
        if caller is None:
            self._strange()
            await _refuse(scope, send, 401, "Send a valid token: Authorization: Bearer TOKEN.")
            return
        size = headers.get(b"content-length", b"0")
        if not size.isdigit() or int(size) > _MOST_BYTES:
            await _refuse(scope, send, 413, f"A body has at most {_MOST_BYTES} bytes.")
            return
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = await _body(receive)
        except TimeoutError:
            await _refuse(scope, send, 408, f"A body must come within {_BODY_SECONDS:g} seconds.")
            return
        if body is None:
            await _refuse(scope, send, 413, f"A body has at most {_MOST_BYTES} bytes.")
            return
        whole: Message = {"type": "http.request", "body": body, "more_body": False}
        parts = [whole]

        async def again() -> Message:
            return parts.pop() if parts else await receive()

        scope["vfl_caller"] = caller
        await self._app(scope, again, send)


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a call; None if it is too long."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _MOST_BYTES:
            return None
        if not message.get("more_body"):
            return bytes(body)


async def _refuse(scope: Scope, send: Send, status: int, sentence: str) -> None:
    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    # The rest of a long body is read and dropped for some seconds, so that the caller sees this.
    headers = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}.get(status)
    response = Response(
        orjson.dumps({"error": sentence}), status, headers, media_type="application/json"
    )
    await response(scope, nothing, send)
