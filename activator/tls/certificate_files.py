"""Load certificates that others issue and renew from files, and reload them when they change.

A directory and each directory in it may hold a pair: `tls.crt` and `tls.key` (as Kubernetes mounts a secret), or
`fullchain.pem` and `privkey.pem` (as ACME clients write them). The certificate names the DNS names it is for. Of
several pairs for one name, a valid one goes first, then the one issued last. If a pair can't be read, its previous
content stays in use and reading is retried; other pairs are not affected.
"""

import asyncio
import datetime
import logging
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509

from activator.tls.certificate_authority import server_context, utc_now
from kelvin.crypto.pem_certificates import alternative_names, read_chain

log = logging.getLogger(__name__)

PAIRS: Final = (("tls.crt", "tls.key"), ("fullchain.pem", "privkey.pem"))
MAX_PAIRS: Final = 10_000
RELOAD_S: Final = 1.0

_Stats = tuple[tuple[int, int, int], ...]  # inode, mtime, size of each file: differs once one is written or replaced


class BadCertificate(ValueError):
    """A pair can't be used. The text names it and says why."""


@dataclass(frozen=True, slots=True)
class _Pair:
    context: ssl.SSLContext
    names: list[str]
    begins: datetime.datetime
    ends: datetime.datetime
    stats: _Stats

    def rank(self, now: datetime.datetime) -> tuple[bool, datetime.datetime, datetime.datetime]:
        """Return a sort key: the pair of the highest rank is used."""
        return self.begins <= now < self.ends, self.begins, self.ends


@dataclass(frozen=True, slots=True)
class _LoadedFiles:
    pairs: dict[Path, _Pair]
    failures: dict[Path, BadCertificate]  # unreadable ones; `pairs` may have their previous content


class CertificateFiles:
    """Certificates from a directory. Use from one event loop; files are read in threads."""

    def __init__(
        self,
        directory: Path,
        now: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        """Load the files. Raises BadCertificate if no pair can be used."""
        self._directory = directory
        self._now = now
        self._pairs: dict[Path, _Pair] = {}
        self._by_name: dict[str, list[_Pair]] = {}
        self._logged_reasons: set[str] = set()
        loaded = _load(directory, {})
        if not loaded.pairs:
            raise next(iter(loaded.failures.values()))
        self._replace_pairs(loaded)

    def __repr__(self) -> str:
        return f"<CertificateFiles {self._directory} names={len(self._by_name)}>"

    @property
    def earliest_expiry(self) -> datetime.datetime:
        """Return when the first of the pairs in use expires."""
        now = self._now()
        return min(max(pairs, key=lambda pair: pair.rank(now)).ends for pairs in self._by_name.values())

    def find_context(self, name: str) -> ssl.SSLContext | None:
        """Return the context for a lower-case name: valid pairs first, then exact names before wildcards (RFC 6125,
        6.4.3).
        """
        now = self._now()
        exact, wildcard = self._by_name.get(name, ()), self._by_name.get("*." + name.partition(".")[2], ())

        def order(pair: _Pair) -> tuple[object, ...]:
            is_valid, *dates = pair.rank(now)
            return is_valid, pair in exact, *dates

        best = max((*exact, *wildcard), key=order, default=None)
        return None if best is None else best.context

    async def reload_if_changed(self) -> None:
        """Reload what has changed. Removed pairs are dropped, unless all are gone."""
        try:
            loaded = await asyncio.to_thread(_load, self._directory, self._pairs)
        except BadCertificate as bad:
            self._log_new_reasons([bad])
            return
        if loaded.pairs:
            self._replace_pairs(loaded)
        else:
            self._log_new_reasons(list(loaded.failures.values()))

    def _replace_pairs(self, loaded: _LoadedFiles) -> None:
        if loaded.pairs != self._pairs:
            by_name: dict[str, list[_Pair]] = {}
            for pair in loaded.pairs.values():
                for name in pair.names:
                    by_name.setdefault(name, []).append(pair)
            self._pairs, self._by_name = loaded.pairs, by_name
            log.info("certificates were read", extra={"names": len(by_name)})
        self._log_new_reasons(list(loaded.failures.values()))

    def _log_new_reasons(self, wrong: list[BadCertificate]) -> None:
        """Log each reason when it appears."""
        reasons = {str(bad) for bad in wrong}
        for reason in sorted(reasons - self._logged_reasons):
            log.warning("a certificate stays as it was", extra={"why": reason})
        self._logged_reasons = reasons

    async def run(self) -> None:
        """Check for changes every RELOAD_S seconds until cancelled."""
        while True:
            await asyncio.sleep(RELOAD_S)
            await self.reload_if_changed()


def _pairs(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the certificate and key of each pair. Raises OSError."""
    below = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    for folder in (directory, *below):
        for certificate, key in PAIRS:
            if _is_there(folder / certificate):
                yield folder / certificate, folder / key


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # as for `lost+found`; reading it will report the error
        return True


def _load(directory: Path, loaded_pairs: dict[Path, _Pair]) -> _LoadedFiles:
    """Read new and changed pairs, take the others from `loaded_pairs`. Raises BadCertificate for the directory."""
    try:
        paths = list(_pairs(directory))
    except OSError as error:
        raise BadCertificate(f"{directory}: {error.strerror}") from error
    if not 0 < len(paths) <= MAX_PAIRS:
        raise BadCertificate(f"{directory}: holds {len(paths)} pairs of 1 to {MAX_PAIRS}")
    loaded = _LoadedFiles({}, {})
    for certificate, key in paths:
        previous = loaded_pairs.get(certificate)
        if previous is not None:
            loaded.pairs[certificate] = previous
        try:
            # Taken before reading, so that the next check notices a change meanwhile.
            stats = tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in (certificate.stat(), key.stat()))
            if previous is None or previous.stats != stats:
                loaded.pairs[certificate] = _read(certificate, key, stats)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            loaded.failures[certificate] = BadCertificate(f"{certificate}: {error}")
    return loaded


def _read(certificate: Path, key: Path, stats: _Stats) -> _Pair:
    """Load a pair. Raises OSError, ValueError."""
    chain = certificate.read_bytes()
    leaf = read_chain(chain)[0]
    names = [name.lower() for name in alternative_names(leaf).get_values_for_type(x509.DNSName)]
    if not names:
        raise ValueError("is for no DNS name")
    context = server_context(key.read_bytes() + b"\n" + chain)
    return _Pair(context, names, leaf.not_valid_before_utc, leaf.not_valid_after_utc, stats)
