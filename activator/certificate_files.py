"""Certificates that somebody else issues and renews, as files: read at start, and again when they change.

A directory, and each directory in it, may hold a pair: `tls.crt` and `tls.key` (as Kubernetes mounts a secret), or
`fullchain.pem` and `privkey.pem` (as ACME clients leave them). Which name a pair is for is what its certificate says.
"""

import asyncio
import datetime
import logging
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from cryptography import x509

from activator.authority import server_context

log = logging.getLogger(__name__)

PAIRS: Final = (("tls.crt", "tls.key"), ("fullchain.pem", "privkey.pem"))
MAX_PAIRS: Final = 10_000
LOOK_AGAIN_S: Final = 1.0

_State = tuple[tuple[str, int, int, int], ...]


class BadCertificate(ValueError):
    """A pair can't be shown to anybody; the text names it and says why."""


class CertificateFiles:
    """Used from one event loop; files are read off it."""

    def __init__(self, directory: Path, protocols: Sequence[str] = ("http/1.1",)) -> None:
        """Raises BadCertificate."""
        self._directory = directory
        self._protocols = list(protocols)
        self._state = _state(directory)
        self._by_name, self.ends = _load(directory, self._protocols)  # the end of the one that ends first

    def __repr__(self) -> str:
        return f"<CertificateFiles {self._directory} names={len(self._by_name)}>"

    def choose(self, name: str) -> ssl.SSLContext | None:
        """For a name in lower case: its own pair, then one for all names beside it (RFC 6125, 6.4.3)."""
        return self._by_name.get(name) or self._by_name.get("*." + name.partition(".")[2])

    async def look(self) -> None:
        """Read again what has changed. A set that is not whole, as within a renewal, leaves the one before it."""
        state = await asyncio.to_thread(_state, self._directory)
        if state == self._state:
            return
        self._state = state  # as it was before it is read: what changes meanwhile is seen by the next look
        try:
            self._by_name, self.ends = await asyncio.to_thread(_load, self._directory, self._protocols)
        except BadCertificate as bad:
            log.warning("certificates stay as they were", extra={"why": str(bad)})
        else:
            log.info("certificates were read again", extra={"names": len(self._by_name)})

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            await self.look()


def _pairs(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Raises OSError."""
    below = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    for place in (directory, *below):
        for certificate, key in PAIRS:
            if (place / certificate).exists():
                yield place / certificate, place / key


def _state(directory: Path) -> _State:
    """What changes when a file is written or replaced; () where nothing can be seen."""
    try:
        files = [path for pair in _pairs(directory) for path in pair if path.exists()]
        seen = [(str(path), path.stat()) for path in files]
    except OSError:
        return ()
    return tuple((name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in seen)


def _load(directory: Path, protocols: list[str]) -> tuple[dict[str, ssl.SSLContext], datetime.datetime]:
    """Raises BadCertificate."""
    found: dict[str, ssl.SSLContext] = {}
    ends: list[datetime.datetime] = []
    try:
        pairs = list(_pairs(directory))
    except OSError as error:
        raise BadCertificate(f"{directory}: {error.strerror}") from error
    if not 0 < len(pairs) <= MAX_PAIRS:
        raise BadCertificate(f"{directory}: holds {len(pairs)} pairs of 1 to {MAX_PAIRS}")
    for certificate, key in pairs:
        try:
            chain = certificate.read_bytes()
            leaf = x509.load_pem_x509_certificates(chain)[0]
            names = _names(leaf)
            context = server_context(key.read_bytes() + b"\n" + chain)
            context.set_alpn_protocols(protocols)
        except (OSError, ValueError, x509.ExtensionNotFound) as error:  # ssl.SSLError is an OSError
            raise BadCertificate(f"{certificate}: {error}") from error
        found |= dict.fromkeys(names, context)
        ends.append(leaf.not_valid_after_utc)
    return found, min(ends)


def _names(leaf: x509.Certificate) -> list[str]:
    alternative = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [name.lower() for name in alternative.get_values_for_type(x509.DNSName)]
