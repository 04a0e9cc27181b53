"""Keys, certificates and a SuperLink's proxy for `vfl doctor` to check, and its findings."""

import datetime
import json
import ssl
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

from vfl_flower.tools.doctor import machine, network
from vfl_flower.tools.doctor.examine import examine
from vfl_flower.tools.doctor.finding import OK, Finding
from vfl_flower.transport.nodes.certificates import _general, write_for_host, write_for_supernode
from vfl_flower.transport.nodes.gate import NOT_KNOWN

HOST = "127.0.0.1"
PORTS = "9500-9599"


def label_holder(folder: Path) -> Path:
    """The folder of deploy/superlink.sh."""
    folder.mkdir(0o700)
    write_for_host(folder / "superlink", [HOST, "localhost", "*.bank.example"])
    write_for_host(folder / "loopback", ["localhost"])
    return folder


def party(folder: Path, certificate: Path | None = None) -> Path:
    """The folder of deploy/supernode.sh."""
    folder.mkdir(0o700)
    write_for_supernode(folder)
    if certificate:
        (folder / "superlink.crt").write_bytes(certificate.read_bytes())
    else:
        dated(folder, -1, 300)
        (folder / "superlink.key").unlink()
    return folder


def dated(folder: Path, first: float, last: float, host: str = "vfl.bank.example") -> None:
    """Write superlink.crt and its key, valid from so many days to so many days from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=first))
        .not_valid_after(now + datetime.timedelta(days=last, seconds=60))
        .add_extension(x509.SubjectAlternativeName([_general(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "superlink.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    write_key(folder / "superlink.key", key)


def write_key(file: Path, key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> None:
    """Write a private key in PEM, perhaps with a password."""
    lock = serialization.BestAvailableEncryption(password) if password else None
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        lock or serialization.NoEncryption(),
    )
    file.unlink(missing_ok=True)
    file.touch(0o600)
    file.write_bytes(text)


def found(*named: Path, superlink: str = "", ports: str = PORTS) -> dict[str, list[Finding]]:
    """Findings by what was checked."""
    by_check: dict[str, list[Finding]] = {}
    for each in examine(named, superlink, ports, None):
        by_check.setdefault(each.check, []).append(each)
    return by_check


class Proxy(ThreadingHTTPServer):
    """A SuperLink behind its proxy, as far as `vfl doctor` can tell.

    ahead : seconds that its clock is ahead of this machine's.
    status : of the answer to a call, if no SuperLink with a gate is there.
    known : the public keys that are registered.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Answers)
        self.ahead = 0.0
        self.dates = True
        self.status = 0
        self.known: set[bytes] = set()
        self.calls = 0

    @property
    def address(self) -> str:
        return f"{HOST}:{self.server_port}"

    def register(self, folder: Path) -> None:
        text = (folder / "supernode.pub").read_bytes()
        key = serialization.load_ssh_public_key(text)
        encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        self.known.add(key.public_bytes(encoding, form))

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that go."""


class _Answers(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + self.server.ahead)

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Date" or self.server.dates:
            super().send_header(keyword, value)

    def do_HEAD(self) -> None:
        self._answer(404, b"")

    def do_POST(self) -> None:
        self.server.calls += 1
        shown = b64decode(self.headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""))
        if self.server.status:
            self._answer(self.server.status, b"<html>")
        elif shown in self.server.known:
            self._answer(401, b'{"detail": "Invalid SuperNode authentication"}')
        else:
            self._answer(401, json.dumps({"code": NOT_KNOWN}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing."""


@contextmanager
def proxy(keys: Path) -> Iterator[Proxy]:
    """A proxy with the certificate of a label holder's folder."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "superlink.crt", keys / "superlink.key")
    with Proxy() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever, args=(0.005,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def in_thread(work: Callable[[], None]) -> Iterator[None]:
    """Do some work beside a test, to its end."""
    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read other clocks in little time, to less than a second; tests may run without bytecode."""
    monkeypatch.setattr(network, "_APART", 0.001)
    monkeypatch.setattr(machine, "compiled_modules", lambda: Finding("bytecode", OK, ""))
    without = SimpleNamespace(about=machine.about, left_over=lambda roles: [])  # processes are slow
    monkeypatch.setattr("vfl_flower.tools.doctor.examine.machine", without)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Return the folder of a label holder."""
    return label_holder(tmp_path / "keys")
