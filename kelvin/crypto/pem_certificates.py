"""Certificates in PEM: read, and with their key put into a TLS context.

Whatever is wrong with one that is read raises ValueError; the library has other exceptions, too.
"""

import os
import ssl

from cryptography import x509

_BAD = (x509.DuplicateExtension, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType, x509.InvalidVersion)


def read_chain(pem: bytes) -> list[x509.Certificate]:
    """Return the certificates in `pem`, at least one. Raises ValueError."""
    try:
        found = x509.load_pem_x509_certificates(pem)
        for each in found:
            _ = each.not_valid_before_utc, each.not_valid_after_utc  # the library reads them when they are asked for
    except _BAD as error:
        raise ValueError(str(error)) from error
    return found


def alternative_names(leaf: x509.Certificate) -> x509.SubjectAlternativeName:
    """Return the names that a certificate is for. Raises ValueError, also where it has none."""
    try:
        return leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except _BAD as error:
        raise ValueError(str(error)) from error


def load_pair(context: ssl.SSLContext, pem: bytes) -> None:
    """Load `pem`: leaf, chain and key. OpenSSL reads files only; these bytes reach no disk.

    Raises ssl.SSLError, also of a key that is another's; ValueError of a locked one.
    """
    fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=_refuse_password)
    finally:
        os.close(fd)


def _refuse_password() -> str:
    """Called for the password of an encrypted key. By itself OpenSSL asks for it at the terminal, and waits."""
    raise ValueError("the key is encrypted: it must have no password")
