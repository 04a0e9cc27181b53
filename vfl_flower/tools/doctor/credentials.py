"""Checks of keys, certificates, and the folders that have them."""

import datetime
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from vfl_flower.config.errors import SharedError, VflError
from vfl_flower.config.files import check_own, is_secret
from vfl_flower.records import ledger
from vfl_flower.tools.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING, Finding, many, some
from vfl_flower.transport.nodes.certificates import names_host, names_of

_SOON = 30  # days in which the other side has to get the next certificate
_RENEW = "Renew it, and give the new superlink.crt to all parties (how-to guide: rotate keys)."
_ASK = "Ask the label holder for its superlink.crt, and compare its digest by telephone."


def of_label_holder(folder: Path, host: str, ahead: float) -> Iterator[Finding]:
    """Yield the findings about the certificates and key of a SuperLink, whose host may be empty."""
    certificate, key = folder / "superlink.crt", folder / "superlink.key"
    yield lifetime(certificate, _RENEW, ahead=ahead)
    yield hosts(certificate, host)
    yield pair(key, lambda: _certificates(certificate)[0].public_key())
    inner = folder / "loopback.crt"
    if inner.exists():
        yield lifetime(inner, "Restart deploy/superlink.sh, which makes a new one.", ahead=ahead)


def of_party(folder: Path, ahead: float) -> Iterator[Finding]:
    """Yield the findings about a SuperNode's key, and the certificate that it trusts."""
    yield lifetime(folder / "superlink.crt", _ASK, of_any=True, ahead=ahead)
    public = folder / "supernode.pub"
    yield pair(
        folder / "supernode.key", lambda: serialization.load_ssh_public_key(public.read_bytes())
    )


def lifetime(file: Path, remedy: str, of_any: bool = False, ahead: float = 0.0) -> Finding:
    """Check when the certificates in a file, or any one of them, expire."""
    try:
        found = _certificates(file)
    except (OSError, ValueError) as error:
        return Finding("certificate", PROBLEM, f"{_why(file, error)} {remedy}")
    choose = max if of_any else min
    result, said = expiry(choose(found, key=lambda each: each.not_valid_after_utc), ahead)
    needs = result not in (OK, UNKNOWN)
    return Finding("certificate", result, f"{file} {said}.{f' {remedy}' * needs}")


def expiry(certificate: x509.Certificate, ahead: float = 0.0) -> tuple[str, str]:
    """Return a result, and until when a certificate is valid as the end of a sentence.

    It is not judged if the clock of the other side, by ``ahead`` seconds, disagrees.
    """
    now = datetime.datetime.now(datetime.UTC)
    mine = _judged(certificate, now)
    if mine[0] != _judged(certificate, now - datetime.timedelta(seconds=ahead))[0]:
        return UNKNOWN, "cannot be judged until the clock is right"
    return mine


def _judged(certificate: x509.Certificate, now: datetime.datetime) -> tuple[str, str]:
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < first:
        return PROBLEM, f"is valid only from {first:%Y-%m-%d}, if this machine's clock is right"
    if now > last:
        return PROBLEM, f"expired on {last:%Y-%m-%d}"
    days = (last - now).days
    if days < _SOON:
        return WARNING, f"expires on {last:%Y-%m-%d}, in {days} days"
    return OK, f"is valid until {last:%Y-%m-%d}"


def hosts(file: Path, host: str) -> Finding:
    """Check that a certificate names the host that parties connect to."""
    try:
        names = names_of(_certificates(file)[0])
    except (OSError, ValueError) as error:
        return Finding("host name", PROBLEM, f"{_why(file, error)} {_RENEW}")
    said = f"{file.name} names {some(names) or 'no host'}"
    if host and not names_host(names, host):
        return Finding("host name", PROBLEM, f"{said}, and not {host}. {_RENEW}")
    if not names:
        return Finding("host name", PROBLEM, f"{said}, so no party accepts it. {_RENEW}")
    return Finding("host name", OK, f"{said}.")


def pair(key: Path, public: Callable[[], PublicKeyTypes]) -> Finding:
    """Check that a private key can be read, and belongs to a public key."""
    again = f"Restore {key.name} from a backup, or renew both (how-to guide: rotate keys)."
    try:
        text = key.read_bytes()  # in PEM, or as OpenSSH writes
        is_ssh = b"OPENSSH PRIVATE KEY" in text
        load = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
        mine = _bytes(load(text, None).public_key())
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        return Finding("key", PROBLEM, f"{_why(key, error)} {again}")
    try:
        theirs = _bytes(public())
    except FileNotFoundError as error:
        return Finding("key", PROBLEM, f"{error.filename} is missing. {again}")
    except (OSError, ValueError, UnsupportedAlgorithm):
        return Finding("key", PROBLEM, f"The public half of {key} cannot be read. {again}")
    if mine != theirs:
        return Finding("key", PROBLEM, f"{key} does not belong to its public half. {again}")
    return Finding("key", OK, f"{key} belongs to its public half.")


def _bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _certificates(file: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(file.read_bytes())


def _why(file: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{file} is missing."
    return f"{file} cannot be read ({type(error).__name__})."


_GIB = 2**30
_LEAST = 0.1 * _GIB  # bytes for logs, histories and checkpoints of small models
_OTHERS = 0o077
_SECRET = ("*.key", "*.secret", "*.token", "*.draws", "credentials.yaml")
_SEALED = (
    *("*.state", "*.key", "*.draws", "*.ids", "*.uploads", "*.predictions", "*.explained"),
    *("withdrawn", "alignments/*.npz", "sets/*.npz"),
)


def about(folder: Path, private: bool) -> Iterator[Finding]:
    """Yield the findings about space, and permissions: others may not even list a private one."""
    yield _permissions(folder, private)
    yield from _secret_files(folder)
    yield space(folder)


def _permissions(folder: Path, private: bool) -> Finding:
    try:
        check_own(folder)
    except SharedError as error:
        return Finding("folder", PROBLEM, str(error))
    if not os.access(folder, os.W_OK):
        sentence = f"{folder} cannot be written to. Give it to the user who runs this software."
        return Finding("folder", PROBLEM, sentence)
    mode = folder.stat().st_mode & 0o777
    if private and mode & _OTHERS:
        sentence = f"Others can list {folder} (mode {mode:04o}). Run `chmod 700 {folder}`."
        return Finding("folder", WARNING, sentence)
    return Finding("folder", OK, f"Nobody else can change {folder}.")


def _secret_files(folder: Path) -> Iterator[Finding]:
    found = {file for pattern in _SECRET for file in folder.glob(pattern)}
    files = sorted(file for file in found if file.exists())  # a link may lead nowhere
    shared = [file for file in files if not is_secret(file)]
    for file in shared:
        mode = file.stat().st_mode & 0o777
        said = f"Others can read {file} (mode {mode:04o}). Run `chmod 600 {file}`, and replace it."
        yield Finding("secrets", PROBLEM, said)
    if files and not shared:
        names = ", ".join(file.name for file in files)
        yield Finding("secrets", OK, f"Only its owner can read {names}.")


def space(folder: Path) -> Finding:
    """Check the free space: a file that is replaced needs its size once more."""
    free = shutil.disk_usage(folder).free
    largest = max((each.stat().st_size for each in folder.iterdir() if each.is_file()), default=0)
    least = max(_LEAST, 2 * largest)
    left = f"{folder} has {free / _GIB:.1f} GiB free"
    if free < least:
        said = f"{left}, and a run needs {least / _GIB:.1f} GiB. Delete old files."
        return Finding("space", PROBLEM, said)
    if free < 10 * least:
        said = f"{left}, and should have {10 * least / _GIB:.1f} GiB. Delete old files."
        return Finding("space", WARNING, said)
    return Finding("space", OK, f"{left}.")


def sealed_files(folder: Path) -> Finding:
    """Check the checksums of the files that a party or a label holder keeps."""
    files = sorted({file for pattern in _SEALED for file in folder.glob(pattern)})
    damaged = []
    for file in files:
        try:
            ledger.check(file)
        except FileNotFoundError:
            continue  # a run has just replaced it
        except (OSError, VflError):
            damaged.append(file.name)
    if damaged:
        said = f"{folder}: {some(damaged)} cannot be read, or is damaged. Restore a backup."
        return Finding("states", PROBLEM, said)
    return Finding("states", OK, f"{many(len(files), 'file')} in {folder} are whole.")
