"""A stranger: it has a SuperLink's certificate, as anybody may, and no key and no secret."""

import socket
import ssl
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.main import create_app
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from vfl_flower.transport.nodes.certificates import supernode_keys

_CALLS = """activate-node deactivate-node send-node-heartbeat pull-messages push-messages get-run
    get-fab pull-object push-object confirm-message-received"""
FLEET = {f"/v1/fleet/{call}" for call in _CALLS.split()}  # paths that a SuperNode calls
_LOGIN = "get-login-details get-auth-tokens refresh-auth-tokens"
WITHOUT_TOKEN = {f"/v1/control/{call}" for call in _LOGIN.split()}
"""Control calls that Flower serves before it asks for a token; they give nothing here."""


def superlink_routes() -> list[tuple[str, str]]:
    """Every method and path that Flower's SuperLink serves."""
    found = create_app().openapi()["paths"]
    return [(method.upper(), path) for path, each in found.items() for method in each]


def call(port: int, certificate: Path, method: str, path: str, **headers: str) -> httpx.Response:
    """One call on loopback, as protobuf; every message may be empty."""
    trust = ssl.create_default_context(cafile=str(certificate))
    own = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE, **headers}
    return httpx.request(method, f"https://127.0.0.1:{port}{path}", headers=own, verify=trust)


def raw(port: int, certificate: Path, text: bytes) -> bytes:
    """Return the answer to bytes that no client would send."""
    trust = ssl.create_default_context(cafile=str(certificate))
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        trust.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        secure.settimeout(30)
        secure.sendall(text)
        answer = b""
        while piece := secure.recv(65536):
            answer += piece
    return answer


def signature_of_nobody() -> dict[str, str]:
    """The headers of a SuperNode with a key that nobody has registered."""
    return signed_by(load_ssh_private_key(supernode_keys()[0], None))


def signed_by(key: Any) -> dict[str, str]:
    """The headers of a SuperNode that has this private key."""
    bare: Any = SimpleNamespace(request=httpx.Request("POST", "https://here"))
    nothing: Any = lambda context: None  # noqa: E731
    NodeAuthHttpInterceptor(key, key.public_key()).intercept(bare, nothing)
    own = bare.request.headers.items()
    return {name: value for name, value in own if name.startswith("flwr-")}


def begun(
    port: int, certificate: Path, path: str, size: int, sent: int, **headers: str
) -> ssl.SSLSocket:
    """A call that announces a body of some size and has sent a part; errors of sending are not."""
    trust = ssl.create_default_context(cafile=str(certificate))
    plain = socket.create_connection(("127.0.0.1", port), 30)
    secure = trust.wrap_socket(plain, server_hostname="127.0.0.1")
    own = {"Host": "x", "Content-Type": PROTOBUF_MEDIA_TYPE, "Content-Length": str(size), **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in own.items())
    # A field that no message has: protobuf keeps it.
    secure.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode())
    with suppress(OSError):
        secure.sendall(b"\x7a" + _length(size - 1) + bytes(sent))
    return secure


def _length(size: int) -> bytes:
    """Of a field of protobuf, in five bytes, which are part of it."""
    rest = size - 5
    return bytes(((rest >> 7 * at) & 127) | (128 if at < 4 else 0) for at in range(5))
