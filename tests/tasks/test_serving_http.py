"""The HTTP front of a service against strangers and callers: heads, bodies, connections, tokens."""

import asyncio
import logging
import os
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import psutil
import pytest
import uvicorn
from cryptography import x509
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tests.doctored import dated, in_thread, proxy
from tests.fleet import until
from tests.serving import TOKEN
from vfl_flower.client import Scores
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import is_secret
from vfl_flower.transport.http import certificate, guard, tokens
from vfl_flower.transport.http import listening as module
from vfl_flower.transport.http.certificate import Certificate
from vfl_flower.transport.http.guard import Guard
from vfl_flower.transport.http.listening import _network, listening
from vfl_flower.transport.http.tokens import Tokens
from vfl_flower.transport.nodes.certificates import self_signed

MINE = f"Authorization: Bearer {TOKEN}\r\n".encode()
OPEN = b"GET /open HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 2**24


class Front:
    """A listener before an application that counts its calls, and sockets that go to it."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[tuple[str, str, bytes]] = []
        self.statuses: Counter[tuple[int, str]] = Counter()
        self.tokens = folder / "tokens"
        self.tokens.write_text(f"bank {TOKEN}\n")
        self.tokens.chmod(0o600)
        self.port, self.url, self.tls = 0, "", False
        self._exits = ExitStack()
        self.running = threading.Event()  # until then, /slow waits
        self.slow = threading.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        self.calls.append((scope["method"], scope["path"], body))
        if scope["path"] == "/slow":
            self.slow.release()
            while not self.running.is_set():
                await asyncio.sleep(0.01)
        if scope["path"] == "/failing":
            raise RuntimeError("x" * 5000)
        content = b"." * LARGE if scope["path"] == "/large" else b"answered"
        await Response(content)(scope, receive, send)

    def count(self, status: int, caller: str) -> None:
        self.statuses[status, caller] += 1

    def socket(self, source: str = "127.0.0.1", tls: bool | None = None) -> socket.socket:
        """Return a new connection, which is closed at the end of the test."""
        made = socket.create_connection(("127.0.0.1", self.port), 60, source_address=(source, 0))
        if self.tls if tls is None else tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which reads no certificates
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            made = context.wrap_socket(made)
        return self._exits.enter_context(made)

    def ask(self, *parts: bytes, **more: Any) -> bytes:
        """Send bytes over a new connection; return what comes until the connection ends."""
        made = self.socket(**more)
        for part in parts:
            try:
                made.sendall(part)
            except OSError:  # it has ended
                break
        return rest(made)


def rest(made: socket.socket) -> bytes:
    """Return what comes until a connection ends."""
    found = bytearray()
    try:
        while part := made.recv(2**16):
            found += part
    except TimeoutError:
        raise
    except OSError:  # it was cut
        pass
    return bytes(found)


def status(found: bytes) -> int:
    return int(found.split(b" ")[1]) if found else 0


def is_open(made: socket.socket) -> bool:
    """Return whether a connection is still open, and nothing has come."""
    made.settimeout(0.0)
    try:
        return made.recv(1) != b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False
    finally:
        made.settimeout(60)


@contextmanager
def opened(
    folder: Path, tls: bool = False, given: Path | None = None, host: str = "127.0.0.1"
) -> Iterator[Front]:
    """Listen. A given folder has the certificate, as `doctored.dated` writes it."""
    front = Front(folder)
    serving: Any = SimpleNamespace(serve_address=f"{host}:0", serve_certificate="", serve_key="")
    if given:
        serving.serve_certificate = f"{given}/superlink.crt"
        serving.serve_key = f"{given}/superlink.key"
    elif tls:
        for name, content in zip(("key", "crt"), self_signed("127.0.0.1"), strict=True):
            (folder / name).write_bytes(content)
        serving.serve_certificate, serving.serve_key = f"{folder}/crt", f"{folder}/key"
    app = Guard(front, Tokens(front.tokens), ("/open",), front.count)
    with listening(app, serving) as front.url, front._exits:
        front.port, front.tls = int(front.url.rsplit(":", 1)[1]), tls or bool(given)
        try:
            yield front
        finally:
            front.running.set()


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    """A listener on a free port, without TLS."""
    with opened(tmp_path) as found:
        yield found


# --- one request at a time ----------------------------------------------------------------------


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_that_pipelines_gets_one_answer_and_is_cut(tmp_path: Path, tls: bool) -> None:
    with opened(tmp_path, tls) as front:
        found = front.ask(OPEN * 9000)  # more than 256 KiB
        assert found.count(b"HTTP/1.1 200") <= 1 == len(front.calls)


def test_an_early_request_is_not_read_and_the_first_gets_its_whole_answer(front: Front) -> None:
    made = front.socket()
    made.sendall(b"GET /slow HTTP/1.1\r\n" + MINE + b"\r\n")
    assert front.slow.acquire(timeout=60)
    made.sendall(OPEN + b"\0" * 100)
    front.running.set()
    found = rest(made)
    assert found.endswith(b"answered") and found.count(b"HTTP/1.1") == 1
    assert [path for _, path, _ in front.calls] == ["/slow"]
    assert front.ask(b"GET /open HTTP/1.0\r\n\r\n").endswith(b"answered")


def test_requests_one_after_the_other_share_a_connection(front: Front) -> None:
    made = front.socket()
    for number in range(3):
        made.sendall(b"POST /x HTTP/1.1\r\n" + MINE + b"Content-Length: 2\r\n\r\n{}\r\n")
        until(lambda number=number: len(front.calls) == number + 1)  # type: ignore[misc]
        assert made.recv(2**16).endswith(b"answered")
    assert is_open(made)


def test_an_upgrade_is_answered_as_any_other_request(front: Front) -> None:
    for protocol in (b"websocket", b"h2c"):
        head = b"GET /open HTTP/1.1\r\nConnection: Upgrade, close\r\nUpgrade: " + protocol
        found = front.ask(head + b"\r\n\r\n" + b"GET /open HTTP/1.1\r\n\r\n" * 100)
        assert found.count(b"HTTP/1.1 200") <= 1
        assert front.ask(head + b"\r\n\r\n").endswith(b"answered")
    assert len(front.calls) == 4


# --- heads and framing --------------------------------------------------------------------------

FILL = b"a" * 2**20
CHUNKED = b"POST /x HTTP/1.1\r\n" + MINE + b"Transfer-Encoding: chunked\r\n\r\n"
TOO_LONG = {
    "a long header": (b"GET /open HTTP/1.1\r\nX: " + FILL + b"\r\n\r\n", 431),
    "a long name": (b"GET /open HTTP/1.1\r\n" + FILL + b": x\r\n\r\n", 431),
    "a long path": (b"GET /" + FILL + b" HTTP/1.1\r\n\r\n", 431),
    "many headers": (b"GET /open HTTP/1.1\r\n" + b"a:\r\n" * 101 + b"\r\n", 431),
    "no end": (b"\r\n" * 2**15, 431),
    "another protocol": (b"\x16\x03\x01\x02\0\x01\0\x01", 400),
    "a path that is not ASCII": (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
    "two lengths": (CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"), 400),
    "a long extension": (CHUNKED + b"1;" + FILL + b"\r\nx\r\n0\r\n\r\n", 400),
    "small chunks": (CHUNKED + b"1\r\nx\r\n" * 9000 + b"0\r\n\r\n", 400),
    "a long trailer": (CHUNKED + b"0\r\nX: " + FILL + b"\r\n\r\n", 400),
    "many trailers": (CHUNKED + b"0\r\n" + b"a: b\r\n" * 9000 + b"\r\n", 400),
}


@pytest.mark.parametrize("attack", TOO_LONG)
def test_heads_and_framing_have_bounds(front: Front, attack: str) -> None:
    sent, due = TOO_LONG[attack]
    assert status(front.ask(sent)) in (due, 0)  # 0: it was cut while it sent
    until(lambda: front.statuses == Counter({(due, ""): 1}))
    assert front.calls == []


def test_long_heads_within_the_bounds_and_honest_chunks_are_served(front: Front) -> None:
    close = b"Connection: close\r\n"
    heads = b"X: " + b"a" * 15_000 + b"\r\n" + b"a: b\r\n" * 90
    assert front.ask(b"GET /open HTTP/1.1\r\n" + heads + close + b"\r\n").endswith(b"answered")
    chunks = [b"%x\r\n%s\r\n" % (len(each), each) for each in [b"y" * 1000] * 1000]
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\n" + close + b"\r\n")
    assert front.ask(head, *chunks, b"0\r\nX-Sum: 1\r\n\r\n").endswith(b"answered")
    assert [len(body) for *_, body in front.calls] == [0, 1_000_000]


def test_a_stranger_with_a_body_is_refused_before_it_is_read_and_sees_the_refusal(
    front: Front,
) -> None:
    long = b"Content-Length: 5000000\r\n"
    found = front.ask(b"POST /x HTTP/1.1\r\n" + long + b"\r\n", FILL, FILL, FILL, FILL, FILL)
    assert status(found) == 401
    found = front.ask(b"POST /x HTTP/1.1\r\nExpect: 100-continue\r\n" + long + b"\r\n" + FILL * 5)
    assert status(found) == 401 and b"100 Continue" not in found
    expects = b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    assert front.calls == []
    found = front.ask(b"POST /x HTTP/1.1\r\n" + MINE + expects + b"{}")  # the control
    assert found.startswith(b"HTTP/1.1 100 Continue") and found.endswith(b"answered")


def test_a_body_that_breaks_off_is_no_request(front: Front) -> None:
    made = front.socket()
    made.sendall(b"POST /x HTTP/1.1\r\n" + MINE + b"Content-Length: 14\r\n\r\n" + b'{"ids": [1]}')
    made.shutdown(socket.SHUT_WR)
    rest(made)
    assert front.ask(OPEN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert [path for _, path, _ in front.calls] == ["/open"]


def test_refused_calls_and_failures_write_few_log_lines(
    front: Front, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", False)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    for _ in range(200):
        front.ask(b"\0\r\n\r\n")
    assert front.statuses == Counter({(400, ""): 200})
    assert len(caplog.records) == 1 and "no HTTP" in caplog.text
    failing = b"GET /failing HTTP/1.0\r\n" + MINE + b"\r\n"
    for _ in range(400):
        assert status(front.ask(failing)) == 500
    assert 1 < len(caplog.records) < 400 and "RuntimeError in " in caplog.text
    assert sum(len(each.getMessage()) for each in caplog.records) < 110_000  # in the same minute


# --- connections --------------------------------------------------------------------------------


def begun(front: Front) -> dict[str, socket.socket]:
    """Connections that hold the service, each in its own way."""
    hello = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    sent = {
        "silent": b"",
        "half a head": b"GET /open HTTP/1.1\r\nX: ",
        "idle": OPEN,
        "reads no answer": b"GET /large HTTP/1.1\r\n" + MINE + b"\r\n",
        "HTTP/1.0": b"GET /large HTTP/1.0\r\nConnection: keep-alive\r\n" + MINE + b"\r\n",
    }
    found = {}
    for name, content in sent.items():
        found[name] = front.socket()
        found[name].sendall(content)
        if name == "idle":
            assert found[name].recv(2**16)
    if front.tls:
        found |= {each: front.socket(tls=False) for each in ("no handshake", "half a handshake")}
        found["half a handshake"].sendall(hello.read()[:50])
    until(lambda: len(front.calls) == 3)
    return found


@pytest.mark.one_by_day
@pytest.mark.parametrize("tls", [False, True])
def test_connections_that_wait_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setattr(module, "_SILENT", 0.5)
    monkeypatch.setattr(module, "_RATE", 2**30)
    with opened(tmp_path, tls) as front:
        made = begun(front)
        until(lambda: held(front) == 0)
        assert all(len(rest(each)) < LARGE for each in made.values())


def held(front: Front) -> int:
    """Return how many connections the listener has open."""
    found = psutil.Process().net_connections("tcp")
    return sum(bool(each.raddr) and each.laddr.port == front.port for each in found)


@pytest.mark.one_by_day
@pytest.mark.parametrize("tls", [False, True])
def test_connections_that_wait_stay_open_for_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    assert module._SILENT == 10  # as documented; a busy machine takes longer than that
    monkeypatch.setattr(module, "_SILENT", 600.0)
    with opened(tmp_path, tls) as front:  # the control: their time is not over
        made = begun(front)
        until(lambda: held(front) == len(made))
        assert front.ask(b"GET /open HTTP/1.0\r\n\r\n").endswith(b"answered")
        assert held(front) >= len(made)


def test_an_idle_connection_stays_open_for_the_documented_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only for uvicorn's own time for idle connections, here 0 seconds."""
    monkeypatch.setattr(uvicorn, "Config", partial(uvicorn.Config, timeout_keep_alive=0))
    with opened(tmp_path) as front:
        made = front.socket()
        for _ in range(3):
            made.sendall(OPEN)
            assert made.recv(2**16).endswith(b"answered")
            assert front.ask(OPEN.replace(b"1.1", b"1.0")).endswith(b"answered")  # a later turn
            assert is_open(made)


def test_a_head_that_comes_in_drops_does_not_last_longer(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENT", 0.4)
    made, sent = front.socket(), 0
    with pytest.raises(OSError):
        for sent in range(200):
            made.sendall(OPEN[sent % 10 : sent % 10 + 1])
            threading.Event().wait(0.02)
    assert 5 < sent < 100


def test_a_slow_body_of_a_caller_ends_with_408(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_BODY_SECONDS", 0.2)
    found = front.ask(b"POST /x HTTP/1.1\r\n" + MINE + b"Content-Length: 20\r\n\r\n{")
    assert status(found) == 408 and front.calls == []
    assert front.statuses == Counter({(408, "bank"): 1})


@pytest.mark.one_by_day
@pytest.mark.parametrize("tls", [False, True])
def test_strangers_connections_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setattr(module, "_CONNECTIONS", 8)
    call = b"GET /slow HTTP/1.1\r\nConnection: close\r\n" + MINE + b"\r\n"
    with opened(tmp_path, tls) as front:
        caller = front.socket("127.0.0.9")
        caller.sendall(call)
        assert front.slow.acquire(timeout=60)
        crowd = [front.socket(f"127.0.0.{2 + n // 3}", tls=tls and n % 2 == 0) for n in range(20)]
        assert front.ask(b"GET /open HTTP/1.0\r\n\r\n").endswith(b"answered")
        until(lambda: sum(is_open(each) for each in crowd) <= 7)
        assert is_open(crowd[-1])  # the oldest make room
        front.running.set()
        assert rest(caller).endswith(b"answered")


def test_an_address_has_half_of_the_connections_and_callers_are_not_cut(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONNECTIONS", 8)
    call = b"GET /slow HTTP/1.1\r\nConnection: close\r\n" + MINE + b"\r\n"
    with opened(front.tokens.parent) as full:
        callers = [full.socket("127.0.0.2") for _ in range(4)]
        for each in callers:
            each.sendall(call)
            assert full.slow.acquire(timeout=60)
        assert full.ask(OPEN, source="127.0.0.2") == b""  # its address is full of callers
        other = full.ask(b"GET /open HTTP/1.0\r\n\r\n", source="127.0.0.3")
        assert other.endswith(b"answered")
        full.running.set()
        assert all(rest(each).endswith(b"answered") for each in callers)


def test_an_address_has_half_of_the_connections_also_if_all_are_open(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONNECTIONS", 8)
    with opened(front.tokens.parent) as full:
        one, other = (
            [full.socket(address) for _ in range(4)] for address in ("127.0.0.2", "127.0.0.3")
        )
        for _ in range(8):  # each takes the place of an earlier one
            one.append(full.socket("127.0.0.2"))
        for each in other:
            each.sendall(b"GET /open HTTP/1.0\r\n\r\n")
            assert rest(each).endswith(b"answered")


def test_one_hosts_addresses_of_ipv6_count_as_one() -> None:
    assert _network("2001:db8::1") == _network("2001:db8::ffff:2") != _network("2001:db8:0:1::1")
    assert _network("::ffff:192.0.2.1") == _network("192.0.2.1") != _network("192.0.2.2")
    assert _network("fe80::1%eth0") == _network("fe80::2")


# --- tokens -------------------------------------------------------------------------------------

OLD, NEW = "leaked-token-of-enough-letters", "new-token-of-enough-letters-xx"
CHANGES: dict[str, Callable[[Path], None]] = {
    "others can read it": lambda path: write(path, f"bank {NEW}\n", 0o644),
    "its mode is changed": lambda path: path.chmod(0o640),
    "deleted": lambda path: path.unlink(),
    "a folder": lambda path: a_folder(path),
    "empty": lambda path: write(path, ""),
    "no caller": lambda path: write(path, "# nobody\n"),
    "a short token": lambda path: write(path, f"bank {NEW}\nother short\n"),
    "not text": lambda path: write(path, f"bank {NEW}\n", encoding="utf-16"),
    "others can change its folder": lambda path: path.parent.chmod(0o777),
}


def write(path: Path, text: str, mode: int = 0o600, encoding: str = "utf-8") -> None:
    path.unlink()
    path.write_text(text, encoding)
    path.chmod(mode)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", CHANGES)
def test_no_token_is_valid_while_the_file_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    monkeypatch.setattr(tokens, "_LOOK", 0.0)
    folder = tmp_path / "own"
    folder.mkdir(0o700)
    path = folder / "tokens"
    path.touch()
    write(path, f"bank {OLD}\n")
    found = Tokens(path)
    assert found.caller(OLD) == "bank" and found.are_usable()
    CHANGES[change](path)
    for _ in range(3):
        assert found.caller(OLD) is None and found.caller(NEW) is None and not found.are_usable()
    assert [each.levelname for each in caplog.records] == ["ERROR"]  # once
    folder.chmod(0o700)
    if path.is_dir():
        path.rmdir()
    path.touch()
    write(path, f"bank {NEW}\n")  # the control
    assert found.caller(NEW) == "bank" and found.caller(OLD) is None
    assert "valid again" in caplog.records[-1].message


def test_a_new_file_with_the_time_of_the_old_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_LOOK", 0.0)
    path = tmp_path / "tokens"
    path.touch()
    write(path, f"bank {OLD}\n")
    found, before = Tokens(path), path.stat()
    path.write_text(f"bank {NEW}\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found.caller(OLD) is None and found.caller(NEW) == "bank"


# --- the client ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://scores.bank.example:8080",
        "http://192.0.2.1",
        "http://localhost.bank.example",
        "http://127.0.0.1@scores.bank.example",
        "HTTP://0.0.0.0:80",
        "ftp://127.0.0.1",
        "127.0.0.1:8080",
        "http://[",
    ],
)
def test_the_client_sends_no_token_unencrypted(url: str) -> None:
    with pytest.raises(ConfigError, match="https://HOST:PORT"):
        Scores(url, TOKEN)


@pytest.mark.parametrize(
    "url", ["http://127.3.2.1:1", "http://[::1]:1", "http://LOCALHOST:1", "https://bank.example"]
)
def test_the_client_may_use_http_on_this_machine(url: str) -> None:
    Scores(url, TOKEN).close()


def test_the_client_follows_no_redirect_and_uses_no_proxy_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:%d/\r\nContent-Length: 0\r\n\r\n"
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_server(("127.0.0.1", 0)) as here,
    ):
        there = other.getsockname()[1]
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{there}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)

        def answer(server: socket.socket) -> None:
            with server.accept()[0] as made:
                made.recv(2**16)
                made.sendall(said % there)

        thread = threading.Thread(target=answer, args=(here,))
        thread.start()
        url = f"http://127.0.0.1:{here.getsockname()[1]}"
        with Scores(url, TOKEN) as scores, pytest.raises(VflError):
            scores.model()
        thread.join()
        other.settimeout(0.0)
        with pytest.raises(BlockingIOError):  # nobody came
            other.accept()
        other.settimeout(60)
        thread = threading.Thread(target=answer, args=(other,))
        thread.start()
        assert httpx.get(url).status_code == 307  # the control: the proxy of the environment
        thread.join()


# --- certificates -------------------------------------------------------------------------------

REFUSED = {
    "expired": ((-9, -1, "127.0.0.1"), r"superlink\.crt' expired on \d{4}-.*\. Renew it\.$"),
    "not valid yet": ((1, 9, "127.0.0.1"), r"is valid only from .* Correct this machine's clock"),
    "another address": ((-1, 9, "192.0.2.1"), r"names 192\.0\.2\.1, but .* names 127\.0\.0\.1\."),
    "another name": ((-1, 9, "a.invalid"), r"names a\.invalid, but serve-address names 127"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_certificate_that_callers_would_refuse_is_refused_at_the_start(
    tmp_path: Path, kind: str
) -> None:
    made, said = REFUSED[kind]
    dated(tmp_path, *made)
    with pytest.raises(ConfigError, match=said) as raised, opened(tmp_path, given=tmp_path):
        pass
    assert "\n" not in str(raised.value)
    dated(tmp_path, -1, 9, "127.0.0.1")  # the control
    with opened(tmp_path, given=tmp_path) as front:
        assert front.ask(OPEN.replace(b"1.1", b"1.0"))


def test_a_certificate_needs_a_name_and_may_have_any_if_all_addresses_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated(tmp_path, -1, 9, "scores.bank.example")
    with opened(tmp_path, given=tmp_path, host="0.0.0.0") as front:
        assert front.url == f"https://scores.bank.example:{front.port}"  # as callers may call it
    dated(tmp_path, -1, 9, "localhost")
    with opened(tmp_path, given=tmp_path):  # this name leads to the address
        pass
    monkeypatch.setattr(certificate, "names_of", lambda found: ["a.invalid", "localhost"])
    with opened(tmp_path, given=tmp_path):  # as the second one does
        pass
    monkeypatch.setattr(certificate, "names_of", lambda found: ["a.invalid", "b.invalid"])
    with pytest.raises(ConfigError, match="but serve-address"), opened(tmp_path, given=tmp_path):
        pass
    monkeypatch.setattr(certificate, "names_of", lambda found: [])
    with (
        pytest.raises(ConfigError, match="names no host, so callers refuse it"),
        opened(tmp_path, given=tmp_path, host="0.0.0.0"),
    ):
        pass


def shown(front: Front) -> str:
    """Return the certificate that a new caller sees."""
    return ssl.get_server_certificate(("127.0.0.1", front.port), timeout=60).strip()


def in_place(folder: Path) -> None:
    dated(folder, -1, 9, "127.0.0.1")


def renamed(folder: Path) -> None:
    new = folder / "new"
    new.mkdir()
    dated(new, -1, 9, "127.0.0.1")
    for each in new.iterdir():
        each.rename(folder / each.name)


def swapped(folder: Path) -> None:
    """Replace the files as Kubernetes does: by one link to another folder."""
    (folder / "..2").mkdir()
    dated(folder / "..2", -1, 9, "127.0.0.1")
    (folder / "..tmp").symlink_to("..2")
    (folder / "..tmp").rename(folder / "..data")


@pytest.mark.parametrize("rotate", [in_place, renamed, swapped])
def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rotate: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(module, "_LOOK", 0.01)
    folder = tmp_path / "secrets"
    folder.mkdir()
    if rotate is swapped:
        (folder / "..1").mkdir()
        dated(folder / "..1", -1, 9, "127.0.0.1")
        (folder / "..data").symlink_to("..1")
        for name in ("superlink.crt", "superlink.key"):
            (folder / name).symlink_to(f"..data/{name}")
    else:
        dated(folder, -1, 9, "127.0.0.1")
    with opened(tmp_path, given=folder) as front:
        old = (folder / "superlink.crt").read_text().strip()
        assert shown(front) == old
        made = front.socket()  # a connection goes on with the certificate that it has seen
        with monkeypatch.context() as patched:  # the control
            looked = threading.Event()
            patched.setattr(Certificate, "look", lambda self: looked.set())
            assert looked.wait(30)  # so no earlier look is under way
            rotate(folder)
            looked.clear()
            assert looked.wait(30) and shown(front) == old
        new = (folder / "superlink.crt").read_text().strip()
        until(lambda: shown(front) == new)
        assert new != old and is_open(made)


MENDED = "The service shows the certificate in its files again."


def test_a_service_goes_on_with_its_last_certificate_while_the_files_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "flwr.notice")
    dated(tmp_path, -1, 9, "127.0.0.1")
    file, key = tmp_path / "superlink.crt", tmp_path / "superlink.key"
    found = Certificate(file, key, "127.0.0.1")
    first, end = found.context, found.end
    text = file.read_text()

    def broken(change: Callable[[], Any], said: str) -> None:
        caplog.clear()
        change()
        for _ in range(3):
            found.look()
        assert found.context is first and found.end == end
        [record] = caplog.records
        assert "goes on with its last certificate" in record.getMessage()
        assert said in record.getMessage()

    broken(lambda: dated(tmp_path, -9, -1, "127.0.0.1"), "expired on")
    broken(lambda: dated(tmp_path, -1, 9, "192.0.2.1"), "serve-address names 127.0.0.1")
    broken(lambda: file.write_text(text), "belong together")  # the key is another one
    broken(file.unlink, "No such file")
    with monkeypatch.context() as odd:
        twice = x509.DuplicateExtension("Duplicate name", x509.ObjectIdentifier("2.5.29.17"))
        odd.setattr(certificate, "names_of", Mock(side_effect=twice))
        broken(lambda: dated(tmp_path, -1, 18, "127.0.0.1"), "Duplicate name")
    dated(tmp_path, -1, 19, "127.0.0.1")  # the control
    for _ in range(2):
        found.look()
    assert found.context is not first and found.end > end
    assert [each.getMessage() for each in caplog.records[1:]] == [MENDED]


def test_a_service_tells_once_that_its_certificate_has_expired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated(tmp_path, -1, 9, "127.0.0.1")
    found = Certificate(tmp_path / "superlink.crt", tmp_path / "superlink.key", "127.0.0.1")
    found.look()
    assert not caplog.records  # the control
    later = datetime.now(UTC) + timedelta(days=10)
    clock = SimpleNamespace(UTC=UTC, datetime=SimpleNamespace(now=lambda zone: later))
    monkeypatch.setattr(certificate, "datetime", clock)
    found.look()
    found.look()
    assert ["expired on" in each.getMessage() for each in caplog.records] == [True]


REASONS = {
    "expired": ((-9, -1, "127.0.0.1"), "its certificate has expired. Its operator renews it"),
    "not valid yet": ((1, 9, "127.0.0.1"), "its certificate is not valid yet. Correct the clocks"),
    "another address": ((-1, 9, "192.0.2.1"), "its certificate is for another address"),
    "another name": ((-1, 9, "a.example"), "its certificate is for another address"),
    "another certificate": ((-1, 9, "127.0.0.1"), r"is not the one in .*superlink\.crt"),
    "no authority": ((-1, 9, "127.0.0.1"), "is of no authority that this machine trusts"),
}


@pytest.mark.parametrize("kind", REASONS)
def test_the_client_names_the_true_reason_of_a_failed_connection(tmp_path: Path, kind: str) -> None:
    made, said = REASONS[kind]
    dated(tmp_path, *made)
    trusted: Path | str = tmp_path / "superlink.crt"
    with proxy(tmp_path) as server:
        url = f"https://{server.address}"
        if kind == "another certificate":
            dated(tmp_path, *made)
        if kind == "no authority":
            trusted = ""
        with Scores(url, TOKEN, trusted) as scores, pytest.raises(VflError, match=said) as raised:
            scores.model()
        assert "\n" not in str(raised.value) and "vfl serve" not in str(raised.value)
    dated(tmp_path, -1, 9, "127.0.0.1")
    with (
        proxy(tmp_path) as server,
        Scores(f"https://{server.address}", TOKEN, tmp_path / "superlink.crt") as scores,
        pytest.raises(VflError, match="not JSON"),  # the control: it has come through
    ):
        scores.model()


def test_the_client_tells_a_port_without_tls_and_a_useless_certificate(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as made:
                made.recv(100)
                made.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        url = f"https://127.0.0.1:{server.getsockname()[1]}"
        with (
            in_thread(answer),
            Scores(url, TOKEN) as scores,
            pytest.raises(VflError, match="does not speak TLS"),
        ):
            scores.model()
        with (
            Scores(url, TOKEN, timeout=0.1) as scores,
            pytest.raises(VflError, match=r"did not answer in 0\.1 seconds"),
        ):
            scores.model()
    for file in (tmp_path / "none", Path(__file__)):
        with pytest.raises(ConfigError, match=f"certificate = '{file}' cannot be used"):
            Scores(url, TOKEN, file)


# --- tokens that another program puts there -----------------------------------------------------


def test_tokens_of_a_secret_are_read_again_when_its_link_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_LOOK", 0.0)
    secret = tmp_path / "secrets"
    secret.mkdir(0o777)
    secret.chmod(0o3777)  # as Kubernetes mounts it
    for number, token in ((1, OLD), (2, NEW)):
        (secret / f"..{number}").mkdir(0o700)
        (secret / f"..{number}/serve.token").write_text(f"bank {token}\n")
        (secret / f"..{number}/serve.token").chmod(0o400)
    (secret / "..data").symlink_to("..1")
    (secret / "serve.token").symlink_to("..data/serve.token")
    (tmp_path / "keys").mkdir(0o700)
    (tmp_path / "keys/serve.token").symlink_to(secret / "serve.token")  # as superlink.sh does
    found = Tokens(tmp_path / "keys/serve.token")
    assert found.caller(OLD) == "bank" and found.caller(NEW) is None  # the control
    (secret / "..tmp").symlink_to("..2")
    (secret / "..tmp").rename(secret / "..data")
    assert found.caller(OLD) is None and found.caller(NEW) == "bank"
    secret.chmod(0o777)  # others could replace the link
    assert found.caller(NEW) is None


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o640, 0o644, 0o660, 0o604])
def test_a_secret_of_root_may_be_readable_by_this_users_own_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    def nobody(group: int) -> None:
        raise KeyError

    path = tmp_path / "serve.token"
    path.touch()
    path.chmod(mode)
    assert is_secret(path) == (mode == 0o400)  # the control: a file of this user
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    with monkeypatch.context() as patched:
        patched.setattr("grp.getgrgid", nobody)
        assert is_secret(path) == (mode in (0o400, 0o440, 0o640))
    members = SimpleNamespace(gr_name="users", gr_mem=["somebody"])
    monkeypatch.setattr("grp.getgrgid", lambda group: members)
    assert is_secret(path) == (mode == 0o400)
