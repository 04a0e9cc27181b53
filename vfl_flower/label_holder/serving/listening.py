"""Listen for HTTP within a block, by uvicorn in a separate thread."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.options import ServingConfig
from vfl_flower.transport.stream.listen import is_loopback

_SILENT = 10.0  # seconds within which a connection must begin a call
_CONNECTIONS = 1000
_ENDING = 10  # seconds that the end waits for calls under way


class _Protocol(HttpToolsProtocol):
    """Closes a connection that sends no whole head of a call for some seconds."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(_SILENT, self._close_silent)

    def on_headers_complete(self) -> None:
        self._timer.cancel()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._timer.cancel()
        self._timer = self.loop.call_later(_SILENT, self._close_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _close_silent(self) -> None:
        if self.transport and not self.transport.is_closing():
            self.transport.close()


@contextmanager
def listening(app: ASGIApp, serving: ServingConfig) -> Iterator[str]:
    """Listen within the block; yield the URL.

    Raises
    ------
    ConfigError
        If the address is taken or invalid, or would send answers unencrypted over a network. Also
        if the certificate cannot be used.
    """
    host, port = _address(serving.serve_address)
    if bool(serving.serve_certificate) != bool(serving.serve_key):
        raise ConfigError("serve-certificate and serve-key belong together: give both or none.")
    tls = bool(serving.serve_certificate)
    if not tls and not is_loopback(host):
        raise ConfigError(
            f"serve-address = {serving.serve_address!r} would send answers unencrypted. Give "
            "serve-certificate and serve-key, or listen on 127.0.0.1 behind a proxy."
        )
    files = [
        str(Path(each).expanduser()) for each in (serving.serve_certificate, serving.serve_key)
    ]
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=_ENDING,
        ssl_certfile=files[0] if tls else None,
        ssl_keyfile=files[1] if tls else None,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"serve-certificate and serve-key cannot be used: {error}. Name PEM files that belong "
            "together."
        ) from None
    server = uvicorn.Server(config)
    with _bound(host, port, serving.serve_address) as bound:
        thread = Thread(target=_run, args=(server, bound), name="serving", daemon=True)
        thread.start()
        while thread.is_alive() and not server.started:
            thread.join(0.01)
        if not thread.is_alive():
            raise VflError("The service could not listen. Its log says why.")
        shown = bound.getsockname()[1]
        try:
            yield f"http{'s' * tls}://{f'[{host}]' if ':' in host else host}:{shown}"
        finally:
            server.should_exit = True
            thread.join(_ENDING + 5)


def _run(server: uvicorn.Server, bound: socket.socket) -> None:
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[bound]))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"serve-address = {text!r} must be HOST:PORT, such as 127.0.0.1:8080.")
    return host, int(port)


@contextmanager
def _bound(host: str, port: int, said: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only with this protocol does asyncio send each part of an answer at once (TCP_NODELAY).
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
            bound.listen()  # until then, another process may bind the address too
        except OSError as error:
            raise ConfigError(
                f"serve-address = {said!r} cannot be used: {error.strerror}. Name another."
            ) from None
        yield bound
