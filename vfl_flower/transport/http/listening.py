"""Listen for HTTP within a block, by uvicorn in a separate thread.

uvicorn parses all requests that a connection sends, of any size, before the application sees a
token. So `_Connection` bounds what it parses, and `_Door` decides who may connect.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from threading import Thread
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vfl_flower.config.checks import is_loopback
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.options import ServingConfig
from vfl_flower.transport.http.certificate import Certificate
from vfl_flower.transport.http.guard import Guard
from vfl_flower.transport.nodes.gate import LogBudget
from vfl_flower.transport.nodes.strangers import Strangers

logging.getLogger("uvicorn.error").addFilter(LogBudget())  # a failed call is told at length

_SILENT = 10.0  # seconds within which a connection must send a whole head
_RATE = 2**16  # bytes a second at which a caller must at least take an answer, after that time
_HEAD = 2**14  # bytes of a head; and bytes of a body's framing: chunk sizes, extensions, trailers
_HEADERS = 100
_CONNECTIONS = 1000  # half of them from one address, at most
_ENDING = 10  # seconds that the end waits for calls under way
_LOOK = 1.0  # seconds between two looks at the certificate's files

_SAID = {
    400: "Send whole HTTP/1.1 requests, one after the other.",
    431: f"The head of a request has at most {_HEAD} bytes and {_HEADERS} headers.",
}


class _Connection(HttpToolsProtocol):
    """One connection: one request at a time, within bounds of bytes and seconds.

    A connection that sends a request before it has the last answer gets that answer, and is closed.
    """

    def __init__(self, door: _Door, address: str) -> None:
        super().__init__(door.server.config, door.server.server_state, {})
        self._door, self.address = door, address
        self.opening: asyncio.Task[None] | None = None
        self._timer = self.loop.call_soon(lambda: None)
        self._in_head, self._left = True, _HEAD  # bytes that may come before or around a body
        self._last = False  # whether no further bytes are parsed

    @property
    def worth(self) -> int:
        """Return 2 while a caller's request is under way, 1 after it, 0 without a valid token."""
        if self.cycle is None or "vfl_caller" not in self.cycle.scope:
            return 0
        return 1 if self.cycle.response_complete else 2

    def cut(self) -> None:
        """Close the connection at once, also within a handshake."""
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._door.open.pop(self, None)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._is_busy:
            super().shutdown()
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        while data and not self._last:
            size = self._left if self._in_head else _HEAD
            part, data = data[:size], data[size:]
            self._left -= len(part)
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade as upgrade:  # the request is answered as any other
                data = part[upgrade.args[0] :] + data
            except httptools.HttpParserError:
                self._end(431 if self._in_head and len(self.headers or ()) >= _HEADERS else 400)
            else:
                if self._left <= 0:
                    self._end(431 if self._in_head else 400)
        if self._last and not self.transport.is_closing():
            self.flow.pause_reading()

    def on_message_begin(self) -> None:
        if self._is_busy or self.flow.write_paused:
            raise ValueError("The last request is not answered yet.")  # ends the parser
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are ignored
            if len(self.headers) >= _HEADERS:
                raise ValueError("Too many headers.")
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head, self._left = False, _HEAD
        self._timer.cancel()
        if not self.parser.should_keep_alive():  # uvicorn knows no list such as "close, TE"
            self.headers.append(CLOSE_HEADER)

    def on_body(self, body: bytes) -> None:
        self._left += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._left = True, _HEAD

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._await_head()
        if self.transport.is_closing():
            return
        if self.cycle.more_body:  # nobody reads the rest
            self._last = True
            self.transport.close()
        else:
            self.flow.resume_reading()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        """Cut the connection unless it takes its answer, and sends the next head, in time."""
        self._timer.cancel()
        seconds = _SILENT + self.transport.get_write_buffer_size() / _RATE
        self._timer = self.loop.call_later(seconds, self.cut)

    def _end(self, status: int) -> None:
        """Parse nothing more. Close the connection after the answer that is due."""
        self._last = True
        if self._is_busy and not self.cycle.more_body:  # the next request came too early
            self.headers.append(CLOSE_HEADER)
            self.cycle.keep_alive = False
            return
        if self._is_busy:  # its body is not HTTP
            if self.cycle.response_started:
                self.cut()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._await_head()
        self._door.refused.refused()
        self._door.app.answered(status, "")
        said = b'{"error":"%s"}' % _SAID[status].encode()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s"
            % (status, HTTPStatus(status).phrase.encode(), len(said), said)
        )
        self.transport.close()


class _Door:
    """Accepts connections, up to a number in all, and half of it from one address.

    If there are too many, the oldest connection without a valid token makes room.
    """

    def __init__(self, server: uvicorn.Server, bound: socket.socket, app: Guard) -> None:
        self.server, self._bound, self.app = server, bound, app
        self.open: dict[_Connection, None] = {}  # the oldest first
        self.refused = Strangers("Requests that are no HTTP, or have too large a head")
        self._cut = Strangers("Connections that were cut, since too many were open")
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # streams and files need some too
        self._most = _CONNECTIONS if files < 0 else min(_CONNECTIONS, files // 2)

    async def serve(self) -> None:
        """Serve until the server should exit."""
        tasks = [asyncio.create_task(each) for each in (self._accept(), self._look())]
        await self.server.serve(sockets=[])
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _look(self) -> None:
        """Use a renewed certificate. Its names may be looked up, so others do not wait."""
        while self.app.certificate:
            await asyncio.sleep(_LOOK)
            await asyncio.to_thread(self.app.certificate.look)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.server.should_exit:
            try:
                accepted, peer = await loop.sock_accept(self._bound)
            except OSError:  # such as too many open files
                await asyncio.sleep(0.1)
                continue
            connection = _Connection(self, _network(peer[0]))
            if self.server.should_exit or not self._makes_room(connection.address):
                accepted.close()
                continue
            self.open[connection] = None
            connection.opening = loop.create_task(self._begin(accepted, connection))
            await asyncio.sleep(0)  # begin it, and serve the others, before the next one

    async def _begin(self, accepted: socket.socket, connection: _Connection) -> None:
        tls: dict[str, Any] = {}
        if self.app.certificate:
            tls = {"ssl": self.app.certificate.context, "ssl_handshake_timeout": _SILENT}
            tls["ssl_shutdown_timeout"] = 1.0
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: connection, accepted, **tls)
        except OSError:  # no handshake
            pass
        finally:
            if connection.transport is None:
                self.open.pop(connection, None)

    def _makes_room(self, address: str) -> bool:
        """Return whether one more connection may be open, after another one is cut if need be."""
        crowd = list(self.open)
        if len(crowd) < self._most // 2:
            return True
        same = [each for each in crowd if each.address == address]
        if len(same) >= self._most // 2:
            crowd = same
        elif len(crowd) < self._most:
            return True
        self._cut.refused()
        least = min(crowd, key=lambda each: each.worth)
        if least.worth == 2:
            return False
        del self.open[least]
        least.cut()
        return True


def _network(host: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address, which one host may own."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
        return str(address.ipv4_mapped)
    return str(address)


@contextmanager
def listening(app: Guard, serving: ServingConfig) -> Iterator[str]:
    """Listen within the block; yield the URL.

    Refuse an address that is taken or invalid, or would send answers unencrypted over a network.
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
    shown = host
    if tls:
        certificate, key = map(Path, (serving.serve_certificate, serving.serve_key))
        app.certificate = Certificate(certificate.expanduser(), key.expanduser(), host)
        shown = app.certificate.host
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_ENDING,
    )
    server = uvicorn.Server(config)
    with _bound(host, port, serving.serve_address) as bound:
        thread = Thread(target=_run, args=(server, bound, app), name="serving", daemon=True)
        thread.start()
        while thread.is_alive() and not server.started:
            thread.join(0.01)
        if not thread.is_alive():
            raise VflError("The service could not listen. Its log says why.")
        try:
            yield (
                f"http{'s' * tls}://{f'[{shown}]' if ':' in shown else shown}:"
                f"{bound.getsockname()[1]}"
            )
        finally:
            server.should_exit = True
            thread.join(_ENDING + 5)


def _run(server: uvicorn.Server, bound: socket.socket, app: Guard) -> None:
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_Door(server, bound, app).serve())


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"serve-address = {text!r} must be HOST:PORT, such as 127.0.0.1:8080.")
    return host, int(port)


@contextmanager
def _bound(host: str, port: int, said: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit this: each part of an answer is sent at once.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.setblocking(False)
        try:
            bound.bind((host, port))
            bound.listen(2048)  # until then, another process may bind the address too
        except OSError as error:
            raise ConfigError(
                f"serve-address = {said!r} cannot be used: {error.strerror}. Name another."
            ) from None
        yield bound
