"""Read PEM certificates, and load them with their key into a TLS context.

All faults of a certificate that is read are ValueErrors, although the library raises other exceptions too.
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
            _ = each.not_valid_before_utc, each.not_valid_after_utc  # the library parses them at first access
    except _BAD as error:
        raise ValueError(str(error)) from error
    return found


def alternative_names(leaf: x509.Certificate) -> x509.SubjectAlternativeName:
    """Return the alternative names (SAN) of a certificate. Raises ValueError, also if it has none."""
    try:
        return leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except _BAD as error:
        raise ValueError(str(error)) from error


def load_pair(context: ssl.SSLContext, pem: bytes) -> None:
    """Load `pem`: leaf, chain and key. OpenSSL reads only files, so this uses a memory file; nothing reaches a disk.
    Raises ssl.SSLError, also if the key does not fit the certificate; ValueError for an encrypted key.
    """
    fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=_refuse_password)
    finally:
        os.close(fd)


def _refuse_password() -> str:
    """Refuse an encrypted key. By default OpenSSL would ask for its password at the terminal, and wait."""
    raise ValueError("the key is encrypted: it must have no password")
