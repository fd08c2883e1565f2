"""Breakers of versions: where starts fail, or replica after replica is lost, callers are told so instead of waiting.

Failures that another replica can make up for are not counted here. Each activator has breakers of its own.
`policy/breaker.py` decides when a breaker opens and when it is half-open.
"""

from collections import Counter
from collections.abc import Set
from typing import Final

from activator.keys import VersionKey
from activator.policy.breaker import Breaker, BreakerLimits
from contracts.artifact_errors import (
    AttestationInvalid,
    ChunkCorrupt,
    ChunkMissing,
    ManifestCorrupt,
    ManifestMissing,
    PackCorrupt,
    ProbeFailed,
    VersionUnverified,
)
from contracts.errors import Refused
from contracts.traffic_errors import BreakerOpen, Overloaded

FAILURES: Final = 3  # in a row
LONGEST_S: Final = 30.0
INTEGRITY: Final = frozenset(
    kind.code
    for kind in (
        AttestationInvalid, ChunkCorrupt, ChunkMissing, ManifestCorrupt, ManifestMissing, PackCorrupt, ProbeFailed,
        VersionUnverified,
    )
)  # fmt: skip
_NOT_ITS_FAULT: Final = frozenset({Overloaded.code})  # the machine is full

Version = tuple[str, str]  # tenant, version


class Breakers:
    """Of versions that failed since they last answered; nothing is kept of any other."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._limits = BreakerLimits(FAILURES, longest_s=longest_s)
        self._failing: dict[Version, tuple[Breaker, str]] = {}  # with the code of the last failure
        self.openings: Counter[str] = Counter()  # by that code

    def __repr__(self) -> str:
        return f"<Breakers failing={len(self._failing)}>"

    def __len__(self) -> int:
        return len(self._failing)

    def __contains__(self, key: VersionKey) -> bool:
        return (key.tenant, key.version) in self._failing

    def failed(self, tenant: str, version: str, code: str, now_s: float) -> None:
        """Count a failed start, a lost replica or an integrity failure of the version; `code` says which."""
        if code in _NOT_ITS_FAULT:
            return
        known = self._failing.get((tenant, version))
        breaker = Breaker(self._limits) if known is None else known[0]
        self._failing[tenant, version] = breaker, code
        if breaker.failed(now_s, at_once=code in INTEGRITY):
            self.openings[code] += 1

    def forget(self, key: VersionKey) -> None:
        """It has answered, or is no more."""
        self._failing.pop((key.tenant, key.version), None)

    def retain(self, versions: Set[Version]) -> None:
        """Forget what is not among these."""
        for version in self._failing.keys() - versions:
            del self._failing[version]

    def check(self, key: VersionKey, now_s: float, why: str = "") -> None:
        """Raise Refused(BreakerOpen), with the reason `why`, if a request for the version must not wait for a start."""
        known = self._failing.get((key.tenant, key.version))
        if known is not None and not known[0].takes(now_s):
            breaker, code = known
            raise Refused(BreakerOpen(code, breaker.remaining_s(now_s), why))

    def enter(self, key: VersionKey, who: object, now_s: float) -> None:
        """Record that a request waits for a start, as the trial if the breaker is half-open. Raises
        Refused(BreakerOpen).
        """
        self.check(key, now_s)
        if (known := self._failing.get((key.tenant, key.version))) is not None:
            known[0].enter(who, now_s)

    def leave(self, key: VersionKey, who: object) -> None:
        """Record that the request no longer waits."""
        if (known := self._failing.get((key.tenant, key.version))) is not None:
            known[0].leave(who)
