"""Who a client is: the number in its certificate, and the list of certificates that are revoked."""

from __future__ import annotations

import datetime
import ipaddress
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import grpc
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from ...errors import UserError
from ...fileio import read_regular

REVOKED = "revoked.txt"
_CLIENT = re.compile(r"client-(0|[1-9][0-9]{0,8})")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_MAKE_KEYS = "create keys with `defedavg deploy keys`"

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class Identity:
    """A client, and the SHA-256 fingerprint of its certificate; empty without TLS."""

    client: int
    fingerprint: str


def identity_of(auth_context: Mapping[str, Sequence[bytes]]) -> Identity:
    """Return whose certificate a connection has; any other connection raises ``ValueError``."""
    names = auth_context.get("x509_common_name", ())
    pems = auth_context.get("x509_pem_cert", ())
    if len(names) != 1 or len(pems) != 1:
        raise ValueError("the connection has no certificate of a client")
    found = _CLIENT.fullmatch(names[0].decode(errors="replace"))
    if found is None:
        raise ValueError("the certificate is not that of a client")
    der = ssl.PEM_cert_to_DER_cert(pems[0].decode())
    return Identity(int(found[1]), sha256(der).hexdigest())


class RevocationList:
    """The lines of a file: ``client-3`` for every certificate of a client, or the fingerprint of one certificate.

    The file may be missing, and may change while the server runs. A ``#`` starts a comment.
    """

    def __init__(self, path: Path | None, log_line: Callable[[str], None] = print) -> None:
        self._path, self._log_line = path, log_line
        self._entries: frozenset[str] = frozenset()
        self._stamp: object = None
        self.read_again()

    def read_again(self) -> bool:
        """Read the file if it has changed; return whether it has."""
        if self._path is None:
            return False
        try:
            found = self._path.stat()
            stamp: object = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return False
            text = read_regular(self._path).decode(errors="replace")
        except FileNotFoundError:
            stamp, text = None, ""
            if self._stamp is None:
                return False
        except OSError as error:
            self._log_line(f"{self._path} cannot be read: {error.strerror or error}; the list read before stays valid")
            return False
        self._stamp, self._entries = stamp, self._parsed(text)
        return True

    def _parsed(self, text: str) -> frozenset[str]:
        lines = [line.split("#")[0].strip().lower() for line in text.splitlines()]
        for line in lines:
            if line and not _CLIENT.fullmatch(line) and not _FINGERPRINT.fullmatch(line):
                self._log_line(f"{self._path}: {line[:80]!r} is neither client-N nor a SHA-256 fingerprint")
        return frozenset(lines)

    def __contains__(self, identity: Identity) -> bool:
        return f"client-{identity.client}" in self._entries or identity.fingerprint in self._entries


def server_credentials(keys: Path) -> Any:
    """Return the server's credentials from a folder of ``deploy keys``; clients must have a certificate of its CA."""
    key, certificate, ca = (_read(keys / name) for name in ("server.key", "server.crt", "ca.crt"))
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=True)


def client_credentials(keys: Path) -> Any:
    """Return a client's credentials from its own folder of ``deploy keys``."""
    key, certificate, ca = (_read(keys / name) for name in ("client.key", "client.crt", "ca.crt"))
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)


def check_keys(keys: Path, owner: str) -> None:
    """Refuse a folder whose files are not the key, the certificate and the CA of a ``server`` or a ``client``."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificate

    def load(name: str, reader: Callable[[bytes], Loaded]) -> Loaded:
        data = _read(keys / name)
        try:
            return reader(data)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise UserError(f"{keys / name} is not a key or a certificate; {_MAKE_KEYS}") from None

    key = load(f"{owner}.key", lambda data: load_pem_private_key(data, None))
    own, ca = (load(name, load_pem_x509_certificate) for name in (f"{owner}.crt", "ca.crt"))
    if own.public_key() != key.public_key():
        raise UserError(f"{keys / owner}.crt is not the certificate of {owner}.key; {_MAKE_KEYS}")
    try:
        own.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise UserError(f"{keys / owner}.crt is not of the CA in {keys / 'ca.crt'}; {_MAKE_KEYS}") from None
    if own.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise UserError(f"{keys / owner}.crt expired on {own.not_valid_after_utc:%Y-%m-%d}; {_MAKE_KEYS}")


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        hint = _MAKE_KEYS
        if path.name == "client.key" and (path.parent / "client-0").is_dir():
            hint = f"{path.parent} has the keys of all clients: give the folder of one, such as {path.parent}/client-0"
        elif path.name == "server.key" and (path.parent / "client.key").exists():
            hint = f"{path.parent} is the folder of a client: give the one that `defedavg deploy keys` created"
        raise UserError(f"{path} cannot be read: {error.strerror or error}; {hint}") from None


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise UserError(f"{address!r} is not an address; write HOST:PORT, such as 127.0.0.1:9092")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_loopback(address: str) -> None:
    """Refuse plain text to or from another machine."""
    host, _ = host_and_port(address)
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UserError(f"--insecure sends plain text, but {host} is not a loopback address; use --keys")
