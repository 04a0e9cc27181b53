"""Listen for streams at the addresses and ports of the configuration."""

from __future__ import annotations

import ipaddress
import re
import socket

from vfl_flower.config.checks import is_loopback
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import RunningConfig


def check(running: RunningConfig) -> None:
    """Refuse, by `ConfigError`, an invalid address or range of ports."""
    host_and_port(running.stream_address)
    port_range(running)


def host_and_port(address: str) -> tuple[str, int | None]:
    """Return host and port of a ``stream-address``."""
    matched = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9_.-]+))(?::(\d+))?", address)
    host = (matched[1] or matched[2]) if matched else address
    port = int(matched[3]) if matched and matched[3] else None
    try:
        known = (matched is not None and matched[2]) or ipaddress.ip_address(host).version == 6
    except ValueError:
        known = False
    if known and (port is None or 1 <= port < 2**16):
        return host, port
    raise ConfigError(
        f"stream-address = {address!r} is no address. Give a host name or an IP address. Add "
        "a colon and a port if parties connect to another port than the one listened on."
    )


def port_range(running: RunningConfig) -> range:
    """Return the ports of ``stream-ports``."""
    matched = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", running.stream_ports)
    first = int(matched[1]) if matched else 0
    last = int(matched[2] or matched[1]) if matched else 0
    if not 1 <= first <= last < 2**16:
        raise ConfigError(
            f"stream-ports = {running.stream_ports!r} must be a port, or a range such as "
            "'9500-9599'."
        )
    return range(first, last + 1)


def listen(running: RunningConfig, waiting: int) -> tuple[socket.socket, str]:
    """Listen on the first free port; return the socket, and the address for the parties.

    ``waiting`` connections may wait to be accepted.
    """
    host, announced = host_and_port(running.stream_address)
    interface = "" if not is_loopback(host) else host.replace("localhost", "127.0.0.1")
    every = not interface and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if every or ":" in interface else socket.AF_INET
    for port in port_range(running):
        try:
            bound = socket.create_server(
                (interface, port), family=family, backlog=waiting, dualstack_ipv6=every
            )
        except OSError:
            continue
        return bound, f"{f'[{host}]' if ':' in host else host}:{announced or port}"
    raise ConfigError(
        f"No port of stream-ports = {running.stream_ports!r} is free on "
        f"{interface or 'this machine'}: name others."
    )
