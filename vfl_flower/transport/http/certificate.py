"""The TLS certificate of a service, and its private key, in files that may change at any time."""

import datetime
import ipaddress
import socket
import ssl
from pathlib import Path

from cryptography import x509

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import notice
from vfl_flower.transport.nodes.certificates import names_host, names_of

_UNREADABLE = x509.DuplicateExtension, x509.UnsupportedGeneralNameType  # no ValueError


class Certificate:
    """The certificate that a service shows to its callers, until its files have a newer one.

    A link may lead to the PEM files, and be replaced as in Kubernetes. ``context`` is for
    handshakes that begin now. Callers name the service ``host``. ``end`` is in Unix time, seconds.
    Refuse a certificate that callers would refuse: expired, not valid yet, or of another host.
    """

    def __init__(self, file: Path, key: Path, host: str) -> None:
        self._file, self._key = file, key
        self._host = self.host = host
        self._version: tuple[object, ...] = ()
        self._told = ""
        self._read()

    def look(self) -> None:
        """Use the certificate in the files, if it has changed. Go on with the last one otherwise.

        Call it every second. It logs once what is wrong, and once that it is mended.
        """
        try:
            self._read()
        except ConfigError as error:
            if str(error) != self._told:
                notice.error("The service goes on with its last certificate: %s", error)
            self._told = str(error)
        else:
            if self._told:
                notice.info("The service shows the certificate in its files again.")
            self._told = ""

    def _read(self) -> None:
        try:
            about = [each.stat() for each in (self._file, self._key)]
            version = (*((each.st_ino, each.st_size, each.st_mtime_ns) for each in about),)
            if version != self._version:
                found = x509.load_pem_x509_certificates(self._file.read_bytes())[0]
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.options |= ssl.OP_NO_RENEGOTIATION
                # A key with a password is refused: nobody is there to type it.
                context.load_cert_chain(self._file, self._key, password="")
                self._check_dates(found)
                self._check_names(names_of(found))
                self._version, self._found, self.context = version, found, context
                self.end = found.not_valid_after_utc.timestamp()
            self._check_dates(self._found)
        except (OSError, ValueError, *_UNREADABLE) as error:
            raise ConfigError(
                f"serve-certificate and serve-key cannot be used: {error}. Name PEM files that "
                "belong together."
            ) from None

    def _check_dates(self, found: x509.Certificate) -> None:
        now, said = datetime.datetime.now(datetime.UTC), f"serve-certificate = '{self._file}'"
        if now > found.not_valid_after_utc:
            ended = f"{found.not_valid_after_utc:%Y-%m-%d}"
            raise ConfigError(f"{said} expired on {ended}, and callers refuse it. Renew it.")
        if now < found.not_valid_before_utc:
            raise ConfigError(
                f"{said} is valid only from {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC. "
                "Correct this machine's clock, or name another certificate."
            )

    def _check_names(self, names: list[str]) -> None:
        """Check that callers can name the host, and note how.

        Nobody knows how they name a host that listens on all its addresses.
        """
        said = f"serve-certificate = '{self._file}' names {', '.join(names[:3]) or 'no host'}"
        if not names:
            raise ConfigError(f"{said}, so callers refuse it. Name one that has a host name.")
        if _is_any(self._host):
            self.host = names[0]
        elif not names_host(names, self._host) and _addresses(self._host).isdisjoint(
            set().union(*map(_addresses, names))
        ):
            raise ConfigError(
                f"{said}, but serve-address names {self._host}. Name a certificate for this host, "
                "or have one of its names lead here."
            )


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _addresses(host: str) -> set[str]:
    try:
        return {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
