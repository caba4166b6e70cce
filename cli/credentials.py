"""Certificates and node keys of a federation, in the forms that Flower's programs read."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3650
"""Validity of the authority's certificate."""

_SKEW = dt.timedelta(hours=1)  # machines whose clocks are a little behind accept a new certificate too


def new_authority() -> tuple[bytes, bytes]:
    """Make a certificate authority.

    Returns
    -------
    tuple of bytes
        Its private key (PKCS #8) and its self-signed certificate, both PEM.
    """
    key = _new_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "FedPCD federation authority")])
    builder = _certificate(name, name, key.public_key(), key.public_key(), AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return _private_pem(key), _pem(builder.sign(key, hashes.SHA384()))


def new_server_certificate(
    authority_key: bytes, authority_certificate: bytes, hosts: Sequence[str], days: int
) -> tuple[bytes, bytes]:
    """Make the SuperLink's key and certificate.

    Parameters
    ----------
    authority_key, authority_certificate : bytes
        PEM, from `new_authority`.
    hosts : sequence of str
        DNS names and IP addresses under which the SuperLink is reached; the first is the subject too.
    days : int
        Validity; not beyond the authority's.

    Returns
    -------
    tuple of bytes
        The private key and the certificate, both PEM.

    Raises
    ------
    ValueError
        If the certificate would outlive its authority, or the key is not the authority's.
    """
    issuer_key = load_pem_private_key(authority_key, None)
    issuer = x509.load_pem_x509_certificate(authority_certificate)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey) or issuer_key.public_key() != issuer.public_key():
        raise ValueError("the authority's key and certificate do not belong together")
    key = _new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    builder = _certificate(subject, issuer.subject, key.public_key(), issuer_key.public_key(), days)
    if _end(days) > issuer.not_valid_after_utc:
        left = (issuer.not_valid_after_utc - _now()).days
        raise ValueError(f"{days} days are too many: the authority's own certificate ends in {left} days")
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    builder = builder.add_extension(names, critical=False)
    return _private_pem(key), _pem(builder.sign(issuer_key, hashes.SHA384()))


def hosts_of(certificate: bytes) -> list[str]:
    """Names and addresses for which a server certificate (PEM) is valid."""
    loaded = x509.load_pem_x509_certificate(certificate)
    names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def new_node_key(comment: str) -> tuple[bytes, bytes]:
    """Make a SuperNode's key pair.

    Returns
    -------
    tuple of bytes
        The private key and the public key's line, both in OpenSSH's form, the only one that Flower reads.
    """
    key = _new_key()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, public + f" {comment}\n".encode()


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    days: int,
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_now() - _SKEW).not_valid_after(_end(days))
    # Both identifiers: without them Python's strict verification, the default from 3.13 on, refuses the chain.
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _end(days: int) -> dt.datetime:
    return _now() - _SKEW + dt.timedelta(days=days)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
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


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
