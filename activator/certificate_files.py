"""Certificates that somebody else issues and renews, as files: read at start, and again when they change.

A directory, and each directory in it, may hold a pair: `tls.crt` and `tls.key` (as Kubernetes mounts a secret), or
`fullchain.pem` and `privkey.pem` (as ACME clients leave them). Which name a pair is for is what its certificate says.
Of several pairs for one name, one that is valid now is shown, the one that was issued last. A pair that can't be read
stays as it was before, and is tried again; the others are not affected.
"""

import asyncio
import datetime
import logging
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509

from activator.authority import server_context, utc_now
from service.certificate import alternative_names, read_chain

log = logging.getLogger(__name__)

PAIRS: Final = (("tls.crt", "tls.key"), ("fullchain.pem", "privkey.pem"))
MAX_PAIRS: Final = 10_000
LOOK_AGAIN_S: Final = 1.0

_Stats = tuple[tuple[int, int, int], ...]  # what changes when one of a pair's files is written or replaced


class BadCertificate(ValueError):
    """A pair can't be shown to anybody; the text names it and says why."""


@dataclass(frozen=True, slots=True)
class _Pair:
    context: ssl.SSLContext
    names: list[str]
    begins: datetime.datetime
    ends: datetime.datetime
    stats: _Stats

    def rank(self, now: datetime.datetime) -> tuple[bool, datetime.datetime, datetime.datetime]:
        """The pair of the highest rank is shown."""
        return self.begins <= now < self.ends, self.begins, self.ends


@dataclass(frozen=True, slots=True)
class _Found:
    pairs: dict[Path, _Pair]
    wrong: dict[Path, BadCertificate]  # what could not be read; an older pair may be in `pairs` all the same


class CertificateFiles:
    """Used from one event loop; files are read off it."""

    def __init__(
        self,
        directory: Path,
        protocols: Sequence[str] = ("http/1.1",),
        now: Callable[[], datetime.datetime] = utc_now,
    ) -> None:
        """Raises BadCertificate where no pair can be shown."""
        self._directory = directory
        self._protocols = list(protocols)
        self._now = now
        self._pairs: dict[Path, _Pair] = {}
        self._by_name: dict[str, list[_Pair]] = {}
        self._told: set[str] = set()
        found = _load(directory, self._protocols, {})
        if not found.pairs:
            raise next(iter(found.wrong.values()))
        self._take(found)

    def __repr__(self) -> str:
        return f"<CertificateFiles {self._directory} names={len(self._by_name)}>"

    @property
    def ends(self) -> datetime.datetime:
        """When the first of the pairs ends that are shown."""
        now = self._now()
        return min(max(pairs, key=lambda pair: pair.rank(now)).ends for pairs in self._by_name.values())

    def choose(self, name: str) -> ssl.SSLContext | None:
        """For a name in lower case: its own pair, then one for all names beside it (RFC 6125, 6.4.3); a valid one of
        the second kind before an invalid one of the first.
        """
        now = self._now()
        own, beside = self._by_name.get(name, ()), self._by_name.get("*." + name.partition(".")[2], ())
        ranked = [(pair.rank(now)[0], pair in own, pair.rank(now), pair) for pair in (*own, *beside)]
        return max(ranked, key=lambda each: each[:3])[3].context if ranked else None

    async def look(self) -> None:
        """Read again what has changed. A pair that is not whole, as within a renewal, leaves the one before it, and is
        tried by each look. Pairs that are gone are dropped, unless all are.
        """
        try:
            found = await asyncio.to_thread(_load, self._directory, self._protocols, self._pairs)
        except BadCertificate as bad:
            self._tell([bad])
            return
        if found.pairs:
            self._take(found)
        else:
            self._tell(list(found.wrong.values()))

    def _take(self, found: _Found) -> None:
        if found.pairs != self._pairs:
            by_name: dict[str, list[_Pair]] = {}
            for pair in found.pairs.values():
                for name in pair.names:
                    by_name.setdefault(name, []).append(pair)
            self._pairs, self._by_name = found.pairs, by_name
            log.info("certificates were read", extra={"names": len(by_name)})
        self._tell(list(found.wrong.values()))

    def _tell(self, wrong: list[BadCertificate]) -> None:
        """Log each reason once, for as long as it holds."""
        reasons = {str(bad) for bad in wrong}
        for reason in sorted(reasons - self._told):
            log.warning("a certificate stays as it was", extra={"why": reason})
        self._told = reasons

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
            if _is_there(place / certificate):
                yield place / certificate, place / key


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # as in `lost+found`: named where it is read, beside the pairs that can be
        return True


def _load(directory: Path, protocols: list[str], known: dict[Path, _Pair]) -> _Found:
    """Read the pairs that are not in `known` as they are. Raises BadCertificate where the directory can't be used."""
    try:
        places = list(_pairs(directory))
    except OSError as error:
        raise BadCertificate(f"{directory}: {error.strerror}") from error
    if not 0 < len(places) <= MAX_PAIRS:
        raise BadCertificate(f"{directory}: holds {len(places)} pairs of 1 to {MAX_PAIRS}")
    found = _Found({}, {})
    for certificate, key in places:
        before = known.get(certificate)
        if before is not None:
            found.pairs[certificate] = before
        try:
            stats = tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in (certificate.stat(), key.stat()))
            if (
                before is None or before.stats != stats
            ):  # taken before reading: a change meanwhile is seen by the next look
                found.pairs[certificate] = _read(certificate, key, protocols, stats)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            found.wrong[certificate] = BadCertificate(f"{certificate}: {error}")
    return found


def _read(certificate: Path, key: Path, protocols: list[str], stats: _Stats) -> _Pair:
    """Raises OSError, ValueError."""
    chain = certificate.read_bytes()
    leaf = read_chain(chain)[0]
    names = [name.lower() for name in alternative_names(leaf).get_values_for_type(x509.DNSName)]
    if not names:
        raise ValueError("is for no DNS name")
    context = server_context(key.read_bytes() + b"\n" + chain)
    context.set_alpn_protocols(protocols)
    return _Pair(context, names, leaf.not_valid_before_utc, leaf.not_valid_after_utc, stats)
