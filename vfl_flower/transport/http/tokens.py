"""Bearer tokens of the callers of a service."""

import hashlib
import hmac
import secrets
import time
from pathlib import Path

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import check_own, is_secret, told, write_whole
from vfl_flower.config.logs import notice
from vfl_flower.config.options import ServingConfig

_FILE = "serve.token"
_LOOK = 1.0  # seconds between two looks at the file
_SHORTEST = 20  # letters


class Tokens:
    """The callers in a file, ``NAME TOKEN`` in each line. The file may change at any time.

    While the changed file cannot be used, no token is valid: it may lack one that has leaked. A
    missing file is made, with one caller. Refuse a file that others can read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            check_own(path.parent)
            with told(path):
                write_whole(path, f"default {secrets.token_urlsafe(32)}\n".encode())
        self._version: tuple[int, ...] = ()
        self._names: dict[bytes, str] = {}
        self._read()

    def are_usable(self) -> bool:
        """Return whether the file can be used."""
        self._look()
        return bool(self._names)

    def caller(self, token: str) -> str | None:
        """Return the name of the caller with this token; None if nobody has it.

        It compares digests, so that the time does not depend on the token.
        """
        self._look()
        shown, found = _digest(token), None
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, shown):
                found = name
        return found

    def _look(self) -> None:
        """Read the file again if it has changed since the last look, a second ago or more."""
        if time.monotonic() < self._looked + _LOOK:
            return
        usable = bool(self._names)
        try:
            self._read()
        except ConfigError as error:
            self._names, self._version = {}, ()
            if usable:
                notice.error("No token is valid until this is mended: %s", error)
        else:
            if not usable:
                notice.warning("The tokens in %s are valid again.", self.path)

    def _read(self) -> None:
        self._looked = time.monotonic()
        try:
            about = self.path.stat()
            if not is_secret(self.path):
                raise ConfigError(f"Other users can read {self.path}. Run `chmod 600 {self.path}`.")
            check_own(self.path)
            # A copy may have the time of another file, and a change of the mode changes only ctime.
            version = about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
            if version == self._version:
                return
            lines = self.path.read_text().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path} cannot be read as a file of tokens: {error}.") from None
        names: dict[bytes, str] = {}
        for number, line in enumerate(lines, 1):
            name, _, token = line.strip().partition(" ")
            if not name or name.startswith("#"):
                continue
            if len(token.strip()) < _SHORTEST:
                raise ConfigError(
                    f"Line {number} of {self.path} has no token of {_SHORTEST} letters or more. "
                    "Write NAME TOKEN, as in `bank $(openssl rand -hex 32)`."
                )
            names[_digest(token.strip())] = name
        if not names:
            raise ConfigError(f"{self.path} has no token. Write NAME TOKEN in a line.")
        self._names, self._version = names, version


def tokens_of(serving: ServingConfig, folder: Path) -> Tokens:
    """Return the tokens in the file of ``serve-token``, or in the run's results folder."""
    named = serving.serve_token
    return Tokens(Path(named).expanduser() if named else folder / _FILE)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
