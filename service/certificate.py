"""Read certificates from PEM. Whatever is wrong with one raises ValueError; the library has other exceptions, too."""

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
