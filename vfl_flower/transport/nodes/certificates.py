"""Keys and certificates: of a run, of a SuperLink and of SuperNodes.

python -m vfl_flower.transport.nodes.certificates host FILE HOST...
python -m vfl_flower.transport.nodes.certificates supernode FOLDER
"""

import datetime
import ipaddress
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def self_signed(*hosts: str) -> tuple[bytes, bytes]:
    """Return a private key and its self-signed certificate for hosts, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    # Else TLS does not tell this certificate from an earlier one for the same hosts.
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=365))
        .add_extension(x509.SubjectAlternativeName(map(_general, hosts)), critical=False)
        .add_extension(own, critical=False)
        .add_extension(issuer, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses of a certificate."""
    try:
        kind = x509.SubjectAlternativeName
        found = certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return []
    return [str(each.value) for each in found if isinstance(each, x509.DNSName | x509.IPAddress)]


def names_host(names: list[str], host: str) -> bool:
    """Return whether a certificate with these names is for a host."""
    return host in names or f"*.{host.partition('.')[2]}" in names


def supernode_keys() -> tuple[bytes, bytes]:
    """Return a private and a public key of a SuperNode, in the format of OpenSSH."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public


def write_for_host(file: Path, hosts: list[str]) -> None:
    """Write FILE.key, and the public FILE.crt."""
    key, certificate = self_signed(*hosts)
    _write_private(file.with_suffix(".key"), key)
    file.with_suffix(".crt").write_bytes(certificate)


def write_for_supernode(folder: Path) -> None:
    """Write supernode.key, and supernode.pub, for the SuperLink to register."""
    private, public = supernode_keys()
    _write_private(folder / "supernode.key", private)
    (folder / "supernode.pub").write_bytes(public)


def _write_private(path: Path, text: bytes) -> None:
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(text)


if __name__ == "__main__":
    if sys.argv[1] == "host":
        write_for_host(Path(sys.argv[2]), sys.argv[3:])
    else:
        write_for_supernode(Path(sys.argv[2]))
