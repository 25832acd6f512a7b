"""Certificates of a test's own authority: for a server at 127.0.0.1 and for a client."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_AUTHORITY = "test authority"


@dataclass(frozen=True)
class Authority:
    """Files in PEM: the authority's certificate, and pairs of certificate and key."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path
    authority_key: ec.EllipticCurvePrivateKey

    def vouch(self, name: str, cert: Path, key_file: Path, *, valid_days: int = 1) -> None:
        """Write a certificate of this name, and its key. It ended where its days are below 0."""
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        leaf = (
            _builder(_name(name), _name(_AUTHORITY), key, valid_days)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(self.authority_key, hashes.SHA256())
        )
        cert.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )


def make_authority(folder: Path) -> Authority:
    """Make an authority and what it vouches for."""
    folder.mkdir()
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name(_AUTHORITY)
    ca = (
        _builder(ca_name, ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=False,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .sign(ca_key, hashes.SHA256())
    )
    made = Authority(
        ca=folder / "ca",
        server_cert=folder / "server",
        server_key=folder / "server_key",
        client_cert=folder / "client",
        client_key=folder / "key",
        authority_key=ca_key,
    )
    made.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    made.vouch("server", made.server_cert, made.server_key)
    made.vouch("client", made.client_cert, made.client_key)
    return made


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid_days: int = 1
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=3))
        .not_valid_after(now + dt.timedelta(days=valid_days))
    )
