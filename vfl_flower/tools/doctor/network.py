"""Checks of the network: the SuperLink's proxy and its clock, a party's key, stream ports.

Nothing secret leaves this machine, except one signed call over TLS that the certificate vouches
for. The call does nothing at the SuperLink.
"""

import json
import math
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from cryptography import x509

from vfl_flower.config.checks import proxy_of
from vfl_flower.config.errors import ConfigError
from vfl_flower.tools.doctor.credentials import expiry
from vfl_flower.tools.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING, Finding
from vfl_flower.transport.flower_internals import CLOCK_AHEAD, CLOCK_BEHIND, signature
from vfl_flower.transport.nodes.gate import FLEET, NOT_KNOWN

_SECONDS = 10.0  # within which a connection must open
_ASKED = 6  # times that the clock is read: answers name whole seconds
_APART = 0.2  # seconds
_DRIFT = 5.0  # seconds that a clock may be behind without a warning
_WRONG = 60.0  # seconds behind that nobody's clock is who keeps it
_WITHOUT_DATES = ssl.VerifyFlags(0x200000)  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME
_CALL = f"{FLEET}get-run"


class Address(NamedTuple):
    """Host and port of a SuperLink."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def address(text: str) -> Address:
    """Return the address HOST:PORT that a user names."""
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.port and parts.netloc == text and "@" not in text:
            return Address(parts.hostname, parts.port)
    except ValueError:
        pass
    raise ConfigError(f"--superlink {text!r} is not HOST:PORT, such as vfl.bank.example:8000.")


def about(
    where: Address, folder: Path, is_party: bool, ahead: tuple[float, float] | None
) -> Iterator[Finding]:
    """Yield the findings about a SuperLink, as parties reach it; `measured` returned ``ahead``."""
    trust = folder / "superlink.crt"
    yield from proxy_to(where.host)
    try:
        with closing(_connection(where, None)) as made:
            made.connect()
    except OSError as error:
        yield Finding("port", PROBLEM, unreachable(where, error))
        yield Finding("clock", UNKNOWN, "Nobody answers whose clock could be compared.")
        return
    time_of = clock(where, ahead)
    port = certified(where, trust, is_party, ahead)
    yield port
    yield time_of
    if port.result != PROBLEM:
        context = _context(trust, is_party, ahead)
        yield from _fleet(where, context, folder if is_party else None, time_of.result)


def unreachable(where: Address, error: OSError) -> str:
    """Say why nobody answers at an address, and what to do."""
    if proxy := proxy_of(where.host):
        said = f"{where} cannot be reached through the proxy {_name_of(proxy)} ({error})."
        return f"{said} Have the proxy allow it, or name the host in no_proxy."
    if isinstance(error, socket.gaierror):
        return f"No machine is called {where.host}. Correct the name, or the name server."
    if isinstance(error, ConnectionRefusedError):
        return f"{where} refuses connections. The label holder starts deploy/superlink.sh."
    if isinstance(error, TimeoutError):
        return f"{where} does not answer within {_SECONDS:g} s. Open the port in the firewalls."
    return f"{where} cannot be reached ({error.strerror or error}). Mend the network."


def _context(
    trust: Path, is_party: bool, ahead: tuple[float, float] | None = None
) -> ssl.SSLContext:
    """Return the authorities to trust. Dates count only if both clocks agree."""
    context = ssl.create_default_context(cafile=str(trust))
    if not is_party:  # the label holder's folder may lack the authority of its certificate
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if ahead and abs(ahead[0]) > _WRONG:
        context.verify_flags |= _WITHOUT_DATES
    return context


_REASONS = {  # OpenSSL's numbers of verification errors
    9: "shows a certificate that is not valid yet. Correct the clocks.",
    10: "shows an expired certificate. The label holder renews it (how-to guide: rotate keys).",
    62: "shows a certificate for another host name. Use a name that it has, or renew it.",
    64: "shows a certificate for another address. Use a name that it has, or renew it.",
}


def certified(
    where: Address, trust: Path, is_party: bool, ahead: tuple[float, float] | None = None
) -> Finding:
    """Check that a server has the certificate that parties trust."""
    other = f"shows a certificate that {trust} does not vouch for"
    other += (
        ". Ask the label holder for its superlink.crt."
        if is_party
        else ". Restart deploy/superlink.sh, which loads the present one."
    )
    try:
        context = _context(trust, is_party, ahead)
    except (OSError, ssl.SSLError):
        return Finding("port", PROBLEM, f"{trust} is not a certificate that TLS can use.")
    try:
        with closing(_connection(where, context)) as made:
            made.connect()
            secure: Any = made.sock
            shown = secure.getpeercert(binary_form=True) or b""
    except ssl.SSLCertVerificationError as error:
        return Finding("port", PROBLEM, f"{where} {_REASONS.get(error.verify_code, other)}")
    except (ssl.SSLError, OSError) as error:
        said = f"{where} does not speak TLS ({type(error).__name__}). Correct the port."
        return Finding("port", PROBLEM, said)
    result, said = expiry(x509.load_der_x509_certificate(shown), ahead[0] if ahead else 0.0)
    return Finding("port", result, f"{where} answers over TLS. Its certificate {said}.")


def measured(where: Address) -> tuple[float, float] | None:
    """Return by how many seconds this clock is ahead of a server's, if it tells the time, ± error.

    Clocks may be why the certificate is refused, so it is not checked.
    """
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which reads no certificates
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    try:
        with closing(_connection(where, trust)) as connection:
            low, high = _difference(connection)
    except (OSError, HTTPException, ValueError, TypeError):
        return None
    return (low + high) / 2, abs(high - low) / 2


def clock(where: Address, found: tuple[float, float] | None) -> Finding:
    """Compare this machine's clock with the dates of a server's answers, which were `measured`."""
    if found is None:
        return Finding("clock", UNKNOWN, f"{where} does not tell the time.")
    ahead, error_of = found
    said = f"This clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} {where}"
    said += f" (± {error_of:.1f} s)."
    if -_DRIFT <= ahead <= CLOCK_AHEAD / 2:
        return Finding("clock", OK, said)
    said += (
        f" Flower refuses calls from {CLOCK_AHEAD} s ahead and {CLOCK_BEHIND} s behind. Have NTP "
        "set both clocks."
    )
    wrong = ahead >= CLOCK_AHEAD or ahead <= -_WRONG
    return Finding("clock", PROBLEM if wrong else WARNING, said)


def _difference(connection: HTTPConnection) -> tuple[float, float]:
    """Return bounds of how far this clock is ahead of a server's, whose dates are in seconds."""
    low, high = -math.inf, math.inf
    for number in range(_ASKED):
        time.sleep(_APART * (number > 0))
        asked = time.time()
        connection.request("HEAD", "/")
        with connection.getresponse() as reply:
            reply.read()
        date = parsedate_to_datetime(str(reply.headers["Date"])).timestamp()
        low, high = max(low, asked - date - 1), min(high, time.time() - date)
    return low, high


def _fleet(
    where: Address, context: ssl.SSLContext, party: Path | None, clock_is: str
) -> Iterator[Finding]:
    """Yield whether a SuperLink is behind its proxy, and whether it knows a party's key."""
    try:
        status, code = _call(where, context, {})
    except (OSError, HTTPException) as error:
        said = f"{where} does not answer calls ({type(error).__name__})."
        yield Finding("SuperLink", UNKNOWN, said)
        return
    if code != NOT_KNOWN:
        down = status in (502, 503, 504)
        said = "its SuperLink does not answer. The label holder starts deploy/superlink.sh again"
        said = said if down else f"it answers HTTP {status}, so it is not deploy/superlink.sh"
        yield Finding("SuperLink", PROBLEM if down else UNKNOWN, f"{where} answers, but {said}.")
        return
    yield Finding("SuperLink", OK, f"The SuperLink behind {where} answers.")
    if party and clock_is == PROBLEM:
        said = "Flower refuses a wrong clock as it refuses an unknown key. Set the clock first."
        yield Finding("registration", UNKNOWN, said)
    elif party:
        yield _registered(where, context, party / "supernode.key", clock_is == UNKNOWN)


def _registered(where: Address, context: ssl.SSLContext, key: Path, clock_unknown: bool) -> Finding:
    try:
        _, code = _call(where, context, signature(key.read_bytes()))
    except (OSError, HTTPException, ValueError, TypeError) as error:
        said = f"{key} could not be shown to {where} ({type(error).__name__})."
        return Finding("registration", UNKNOWN, said)
    if code != NOT_KNOWN:
        return Finding("registration", OK, f"{where} knows the key {key}.")
    said = (
        f"{where} does not know {key}{', or refuses this clock' * clock_unknown}. The label holder "
        "runs `flwr supernode register supernode.pub vfl`."
    )
    return Finding("registration", PROBLEM, said)


def _call(where: Address, context: ssl.SSLContext, headers: dict[str, str]) -> tuple[int, object]:
    """Make a call that asks for nothing; return the status and Flower's code of the answer."""
    kind = {"Content-Type": "application/x-protobuf"}
    with closing(_connection(where, context)) as connection:
        connection.request("POST", _CALL, b"", {**kind, **headers})
        reply = connection.getresponse()
        with suppress(ValueError, AttributeError):
            return reply.status, json.loads(reply.read(1 << 16)).get("code")
        return reply.status, None


def free_ports(ports: range) -> Finding:
    """Check that a run finds a free port for streams on this machine."""
    free = [port for port in ports if _is_free(port)]
    name = f"{ports[0]}-{ports[-1]}"
    if free:
        said = f"{len(free)} of {len(ports)} ports in {name} are free; a run takes {free[0]}."
        return Finding("stream ports", OK, said)
    said = f"No port in {name} is free. End the programs that use them, or set stream-ports."
    return Finding("stream ports", PROBLEM, said)


def _is_free(port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True


def stream_port(host: str, ports: range) -> Finding:
    """Check whether a party reaches the first port for streams. Only a run listens there."""
    where = Address(host, ports[0])
    try:
        with closing(_connection(where, None)) as made:
            made.connect()
    except ConnectionRefusedError:
        said = f"{where} refuses: no run listens now. Check again while one does."
        return Finding("stream port", UNKNOWN, said)
    except TimeoutError:
        said = f"{where} does not answer. Open the ports {ports[0]}-{ports[-1]} in the firewalls."
        return Finding("stream port", WARNING, said)
    except OSError as error:
        return Finding("stream port", PROBLEM, unreachable(where, error))
    return Finding("stream port", OK, f"{where} answers: a run listens, and this party reaches it.")


def proxy_to(host: str) -> Iterator[Finding]:
    """Yield through which proxy a party reaches a label holder, if there is any."""
    if proxy := proxy_of(host):
        said = f"A SuperNode and its streams call {host} through the proxy {_name_of(proxy)}."
        yield Finding("proxy", OK, f"{said} The proxy must allow CONNECT to their ports.")


def _connection(where: tuple[str, int], context: ssl.SSLContext | None) -> HTTPConnection:
    """Return a connection as a party makes it, with TLS or without. It is not open yet."""
    proxy = proxy_of(where[0])
    parts = urlsplit(proxy) if proxy else None
    first = (str(parts.hostname), parts.port or 80) if parts else where
    made = (
        HTTPSConnection(*first, timeout=_SECONDS, context=context)
        if context
        else HTTPConnection(*first, timeout=_SECONDS)
    )
    if parts:
        pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        words = f"Basic {b64encode(pair.encode()).decode()}"
        made.set_tunnel(*where, {"Proxy-Authorization": words} if parts.username else None)
    return made


def _name_of(proxy: str) -> str:
    """Return host and port of a proxy, without its password."""
    parts = urlsplit(proxy)
    return f"{parts.hostname}:{parts.port or 80}"
