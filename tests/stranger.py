"""Who has a SuperLink's certificate, as everybody may, and neither key nor secret."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.main import create_app
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from vfl_flower.runtimes.certificates import supernode_keys

_CALLS = """activate-node deactivate-node send-node-heartbeat pull-messages push-messages get-run
    get-fab pull-object push-object confirm-message-received"""
FLEET = {f"/v1/fleet/{call}" for call in _CALLS.split()}
"""What a SuperNode calls."""
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
    """What comes back for bytes that no client would send."""
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
    return dict(bare.request.headers)
