"""Certificates of a cluster: one authority, one certificate for each node, made and checked. No I/O.

Every connection is mutual: a node shows the same certificate whether it serves or calls, and trusts nobody
whom the cluster's own authority has not signed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tenplexfs.errors import InvalidError

__all__ = ["Pair", "check_pair", "hosts_of", "make_authority", "make_node"]

_AUTHORITY_DAYS = 3650
_SKEW = timedelta(hours=1)  # clocks of machines differ; a fresh certificate should be good everywhere


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, both PEM."""

    certificate: bytes
    key: bytes


def make_authority(now: datetime) -> Pair:
    """Returns a new authority, good for ten years from ``now``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("tenplexfs authority")
    builder = (
        _builder(name, name, key, now, _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _pair(builder.sign(key, hashes.SHA256()), key)


def make_node(authority: Pair, node: str, hosts: Sequence[str], now: datetime, *, days: int) -> Pair:
    """Returns the certificate of ``node``, for callers that reach it as one of ``hosts`` or by its name.

    Raises:
        InvalidError: The authority cannot sign, or a host is no name or address.
    """
    issuer, issuer_key = _certificate(authority, "authority"), _key(authority, "authority")
    key = ec.generate_private_key(ec.SECP256R1())
    try:
        names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys((node, *hosts))])
    except ValueError as error:
        raise InvalidError(f"node {node}: hosts {', '.join(hosts)}: {error}") from error
    builder = (
        _builder(_name(node), issuer.subject, key, now, days)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
    )
    return _pair(builder.sign(issuer_key, hashes.SHA256()), key)


def check_pair(pair: Pair, authority: bytes, now: datetime, *, what: str) -> None:
    """Checks that ``pair`` is whole, signed by ``authority`` (PEM) and good at ``now``.

    Raises:
        InvalidError: What is wrong with it, and what to do.
    """
    certificate, key = _certificate(pair, what), _key(pair, what)
    signer = _certificate(Pair(authority, b""), f"{what}, its authority")
    if certificate.public_key() != key.public_key():
        raise InvalidError(f"{what}: the key is of another certificate; copy both again")
    try:
        certificate.verify_directly_issued_by(signer)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise InvalidError(
            f"{what}: not signed by the authority beside it; make it anew with tls init --renew"
        ) from error
    for each, whose in ((certificate, what), (signer, f"{what}: the authority")):
        if now < each.not_valid_before_utc:
            raise InvalidError(
                f"{whose}: not valid before {_time(each.not_valid_before_utc)}, and it is {_time(now)}: "
                "is a clock wrong?"
            )
        if now > each.not_valid_after_utc:
            raise InvalidError(
                f"{whose}: expired {_time(each.not_valid_after_utc)}, and it is {_time(now)}; "
                "make it anew with tls init --renew"
            )


def hosts_of(certificate: bytes) -> tuple[str, ...]:
    """Returns the names and addresses that ``certificate`` (PEM) is for."""
    try:
        names = (
            x509.load_pem_x509_certificate(certificate)
            .extensions.get_extension_for_class(x509.SubjectAlternativeName)
            .value
        )
    except (ValueError, x509.ExtensionNotFound):
        return ()
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return (*names.get_values_for_type(x509.DNSName), *addresses)


def _builder(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not host or any(not (c.isascii() and (c.isalnum() or c in "-._")) for c in host):
            raise ValueError(f"{host!r} is no host name or address") from None
        return x509.DNSName(host)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )


def _certificate(pair: Pair, what: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pair.certificate)
    except ValueError as error:
        raise InvalidError(f"{what}: no certificate in PEM") from error


def _key(pair: Pair, what: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pair.key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidError(f"{what}: no private key in PEM") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidError(f"{what}: need an elliptic-curve key, as tls init makes")
    return key


def _time(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
