"""`vfl report --watch`: the page about runs, served on this machine while they go on.

The server has one page at a random path. It answers other paths with 404, without looking them up.
So other users of this machine, and other sites in the same browser, cannot read the page. The
server binds the loopback address only. It refuses requests that name another host, which prevents
DNS rebinding.
"""

from __future__ import annotations

import errno
import hmac
import secrets
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

from vfl_flower.config.errors import VflError
from vfl_flower.results.html import encoded, policy
from vfl_flower.results.report import report, waiting

_ADDRESS = "127.0.0.1"
_NAMES = (_ADDRESS, "localhost")  # hosts that a browser here, or behind a tunnel, names
_SECONDS = 10.0  # limit of a request


class Live:
    """The page about folders, rendered again after their files change."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = Lock()
        self._state: list[tuple[Path, int, int]] | None = None
        self._page = b""

    def page(self) -> bytes:
        """Return the current page, or a page that says why there is none yet."""
        with self._lock:
            state = self._files()
            if state != self._state or not self._page:
                try:
                    self._page = encoded(report(self._folders, live=True))
                except VflError as error:  # perhaps a line is just being written
                    if not self._page:
                        return encoded(waiting(str(error)))
                self._state = state
            return self._page

    def _files(self) -> list[tuple[Path, int, int]]:
        """Return path, time of writing and size of each file that the page shows."""
        found = []
        for folder in self._folders:
            for path in sorted(folder.rglob("*.json*")):
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    found.append((path, stat.st_mtime_ns, stat.st_size))
        return found


class Server(ThreadingHTTPServer):
    """Serves the page about folders at ``url``.

    Parameters
    ----------
    port : 0 for any free port.

    Raises
    ------
    VflError
        If the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        self.live = Live(folders)
        self.path = f"/{secrets.token_urlsafe(16)}/"
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except OSError as error:
            why = "is used by another program" if error.errno == errno.EADDRINUSE else "is refused"
            raise VflError(f"Port {port} {why}: name another with --port, or none.") from error
        self.url = f"http://{_ADDRESS}:{self.server_port}{self.path}"


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    timeout = _SECONDS
    server_version, sys_version = "vfl", ""

    def do_GET(self) -> None:
        """Answer with the page if the request names its path and this machine."""
        if not self._names_this_machine():
            self._answer(403, b"This page is only at 127.0.0.1.\n")
        elif not hmac.compare_digest(self.path.encode(), self.server.path.encode()):
            self._answer(404, b"There is no such page.\n")
        else:
            self._answer(200, self.server.live.page(), "text/html")

    do_HEAD = do_GET  # noqa: N815

    def _names_this_machine(self) -> bool:
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in _NAMES
        except ValueError:
            return False

    def _answer(self, status: int, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", f"{policy(live=True)}; frame-ancestors 'none'")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing on the terminal."""


def watch(folders: Sequence[Path], port: int) -> None:
    """Serve the page until Ctrl-C."""
    with suppress(KeyboardInterrupt), Server(folders, port) as server:
        print(f"report: {server.url} (Ctrl-C ends it)", flush=True)
        server.serve_forever()
