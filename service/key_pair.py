"""A key and its certificates into a TLS context. OpenSSL reads files only; these bytes reach no disk."""

import os
import ssl


def load_pair(context: ssl.SSLContext, pem: bytes) -> None:
    """`pem`: leaf, chain and key. Raises ssl.SSLError, also of a key that is another's."""
    fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
