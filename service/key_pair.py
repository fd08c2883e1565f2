"""A key and its certificates into a TLS context. OpenSSL reads files only; these bytes reach no disk."""

import os
import ssl


def load_pair(context: ssl.SSLContext, pem: bytes) -> None:
    """`pem`: leaf, chain and key. Raises ssl.SSLError, also of a key that is another's; ValueError of a locked one."""
    fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=_refuse)
    finally:
        os.close(fd)


def _refuse() -> str:
    """Called for the password of an encrypted key. By itself OpenSSL asks for it at the terminal, and waits."""
    raise ValueError("the key is encrypted: it must have no password")
