"""Proxies that the environment names: who uses which one, and connections through them.

A SuperNode calls by httpx, which reads https_proxy and all_proxy, in small or capital letters.
Streams call by gRPC, which reads grpc_proxy, https_proxy and http_proxy, in small letters alone.
"""

import os
import ssl
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPSConnection
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from vfl_flower.config.checks import direct_to_loopback, is_loopback
from vfl_flower.tools.doctor.finding import OK, WARNING, Finding

SECONDS = 10.0
"""Limit of a connection."""


def of_supernode(host: str) -> str:
    """Return the proxy through which a SuperNode calls a host; empty if it calls directly."""
    known = {} if is_loopback(host) or proxy_bypass(host) else getproxies_environment()
    return known.get("https") or known.get("all") or ""


def of_streams(host: str) -> str:
    """Return the proxy through which streams call a host; empty if they call directly."""
    names = ("grpc_proxy", "https_proxy", "http_proxy")
    named = next((found for name in names if (found := os.environ.get(name))), "")
    direct = direct_to_loopback(os.environ)["no_grpc_proxy"].split(",")  # as SuperNodes set it
    skips = any(each.strip() and host.endswith(each.strip()) for each in direct)
    return "" if skips or is_loopback(host) else named


def about(host: str) -> Iterator[Finding]:
    """Yield through which proxy a party reaches a label holder, if there is any."""
    calls, streams = of_supernode(host), of_streams(host)
    if not calls and not streams:
        return
    said = f"A SuperNode calls {host} {_through(calls)}, and streams {_through(streams)}."
    if calls == streams:
        yield Finding("proxy", OK, f"{said} The proxy must allow CONNECT to their ports.")
        return
    said += (
        " Set https_proxy in small letters, which both read, or name the host in no_proxy, so that "
        "both call it directly."
    )
    yield Finding("proxy", WARNING, said)


def connection(
    where: tuple[str, int], proxy: str, context: ssl.SSLContext | None
) -> HTTPConnection:
    """Return a connection, with TLS or without, perhaps through a proxy. It is not open yet."""
    parts = urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else None
    first = (str(parts.hostname), parts.port or 80) if parts else where
    made = (
        HTTPSConnection(*first, timeout=SECONDS, context=context)
        if context
        else HTTPConnection(*first, timeout=SECONDS)
    )
    if parts:
        pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        words = f"Basic {b64encode(pair.encode()).decode()}"
        made.set_tunnel(*where, {"Proxy-Authorization": words} if parts.username else None)
    return made


def name_of(proxy: str) -> str:
    """Return host and port of a proxy, without its password."""
    parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return f"{parts.hostname}:{parts.port or 80}"


def _through(proxy: str) -> str:
    return f"through the proxy {name_of(proxy)}" if proxy else "directly"
