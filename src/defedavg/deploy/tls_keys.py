"""``defedavg deploy keys``: a private CA, a server certificate, and a certificate for each client.

The name in a client's certificate is its identity for the gRPC server. Flower registers the client's public key
instead, and needs the same key in OpenSSH's format.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import UserError
from ..fileio import writing

DAYS = 365
Key = ec.EllipticCurvePrivateKey


def make_keys(folder: Path, clients: int, hosts: tuple[str, ...]) -> list[Path]:
    """Write the keys of a CA and of a server, and a folder client-N with the files of each client.

    client-N.key and client-N.pub are the same client's key for Flower. Only this user can read the private keys. The
    folder appears when it is complete.
    """
    if folder.exists():
        raise UserError(f"{folder} already exists; choose another name, or remove it")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # only this user can enter it
        try:
            made = _make_keys(scratch, clients, hosts)
            scratch.rename(folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return [folder / path.relative_to(scratch) for path in made]


def _make_keys(folder: Path, clients: int, hosts: tuple[str, ...]) -> list[Path]:
    ca_key, server_key = _key(), _key()
    ca = _certificate("defedavg CA", ca_key, None, ca_key, ())
    server = _certificate("defedavg server", server_key, ca, ca_key, hosts)
    ca_data = ca.public_bytes(Encoding.PEM)
    made = [*_write_pair(folder, "ca", ca_key, ca), *_write_pair(folder, "server", server_key, server)]
    for client in range(clients):
        own, key = folder / f"client-{client}", _key()
        with writing(own):
            own.mkdir(mode=0o700)
        made.append(_write(own / "ca.crt", ca_data))
        made += _write_pair(own, "client", key, _certificate(f"client-{client}", key, ca, ca_key, ()))
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        made.append(_write(folder / f"client-{client}.key", secret, secret=True))
        made.append(_write(folder / f"client-{client}.pub", public + b"\n"))
    return made


def _write_pair(folder: Path, name: str, key: Key, certificate: x509.Certificate) -> list[Path]:
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    written = _write(folder / f"{name}.key", secret, secret=True)
    return [written, _write(folder / f"{name}.crt", certificate.public_bytes(Encoding.PEM))]


def _key() -> Key:
    return ec.generate_private_key(ec.SECP384R1())


def _write(path: Path, data: bytes, *, secret: bool = False) -> Path:
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
    return path


def _certificate(
    name: str, key: Key, issuer: x509.Certificate | None, signer: Key, hosts: tuple[str, ...]
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    authority = issuer is None
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not authority,
                key_cert_sign=authority,
                crl_sign=authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    if hosts:
        built = built.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    if not authority:
        # A client's certificate cannot be used as that of a server, nor a server's as that of a client.
        usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        built = built.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return built.sign(signer, hashes.SHA384())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
