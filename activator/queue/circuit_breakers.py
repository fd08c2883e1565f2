"""Circuit breakers of versions and of replicas. `queue/policy/circuit_breaker.py` decides when one opens and closes.

A version's breaker opens when its starts fail, or when one replica after another is lost. Callers then get an error
instead of waiting for a start. Failures that another replica can make up for do not count against the version.

A replica's breaker opens when a request fails there. After a pause, one request at a time tests whether it answers
again. Each activator has its own breakers.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Set
from typing import Final

from activator.queue.policy.circuit_breaker import BreakerLimits, BreakerState, CircuitBreaker
from activator.queue.version_queue import Replica
from activator.routing.policy.version_key import VersionKey
from kelvin.contracts.artifact_errors import (
    AttestationInvalid,
    ChunkCorrupt,
    ChunkMissing,
    ManifestCorrupt,
    ManifestMissing,
    PackCorrupt,
    ProbeFailed,
    VersionUnverified,
)
from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import BreakerOpen, Overloaded

FAILURES: Final = 3  # in a row
LONGEST_S: Final = 30.0
INTEGRITY: Final = frozenset(
    kind.code
    for kind in (
        AttestationInvalid, ChunkCorrupt, ChunkMissing, ManifestCorrupt, ManifestMissing, PackCorrupt, ProbeFailed,
        VersionUnverified,
    )
)  # fmt: skip
_MACHINE_FAULTS: Final = frozenset({Overloaded.code})  # the machine is full, the version is fine

Version = tuple[str, str]  # tenant, version


class VersionBreakers:
    """Breakers of the versions that have failed since their last answer. Other versions use no memory."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._limits = BreakerLimits(FAILURES, longest_s=longest_s)
        # Breaker, code of the last failure, and whether a retry may help against that failure.
        self._failing: dict[Version, tuple[CircuitBreaker, str, bool]] = {}
        self.openings: Counter[str] = Counter()  # by code of the failure

    def __repr__(self) -> str:
        return f"<VersionBreakers failing={len(self._failing)}>"

    def __len__(self) -> int:
        return len(self._failing)

    def __contains__(self, key: VersionKey) -> bool:
        return (key.tenant, key.version) in self._failing

    def record_failure(self, tenant: str, version: str, code: str, now_s: float, *, retryable: bool) -> None:
        """Count a failed start, a lost replica or an integrity failure of the version. `code` is the failure's code.
        `retryable` tells whether a retry may help against it.
        """
        if code in _MACHINE_FAULTS:
            return
        known = self._failing.get((tenant, version))
        breaker = CircuitBreaker(self._limits) if known is None else known[0]
        self._failing[tenant, version] = breaker, code, retryable
        if breaker.record_failure(now_s, at_once=code in INTEGRITY):
            self.openings[code] += 1

    def drop(self, key: VersionKey) -> None:
        """Drop the breaker of a version that has answered or was deleted."""
        self._failing.pop((key.tenant, key.version), None)

    def retain(self, versions: Set[Version]) -> None:
        """Drop the breakers of all other versions."""
        for version in self._failing.keys() - versions:
            del self._failing[version]

    def check(self, key: VersionKey, now_s: float, reason: str = "") -> None:
        """Raise Refused(BreakerOpen), with `reason`, if a request for the version must not wait for a start."""
        known = self._failing.get((key.tenant, key.version))
        if known is not None and not known[0].allows_request(now_s):
            breaker, code, retryable = known
            raise Refused(BreakerOpen(code, breaker.remaining_s(now_s), reason, retryable))

    def enter(self, key: VersionKey, request: object, now_s: float) -> None:
        """Record that a request waits for a start, as the trial if the breaker is half-open. Raises
        Refused(BreakerOpen).
        """
        self.check(key, now_s)
        if (known := self._failing.get((key.tenant, key.version))) is not None:
            known[0].enter(request, now_s)

    def leave(self, key: VersionKey, request: object) -> None:
        """Record that the request no longer waits."""
        if (known := self._failing.get((key.tenant, key.version))) is not None:
            known[0].leave(request)


class ReplicaBreakers:
    """Breakers of all replicas. `Replica.breaker` holds the breaker from the first failure until an answer begins.
    `on_reopened` is called when the replica may get a request again.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float], on_reopened: Callable[[Replica], None]) -> None:
        self._limits = BreakerLimits(1, longest_s=longest_s)  # one broken connection is enough
        self._clock = clock
        self._on_reopened = on_reopened
        self.openings: Counter[str] = Counter()  # by the failure's code

    def __repr__(self) -> str:
        return f"<ReplicaBreakers openings={self.openings.total()}>"

    def record_failure(self, replica: Replica, code: str) -> bool:
        """Stop sending requests to the replica for a while. Return False if it is open already, or gone."""
        if replica.gone:
            return False
        replica.breaker = replica.breaker or CircuitBreaker(self._limits)
        if not replica.breaker.record_failure(self._clock()):
            return False
        self.openings[code] += 1
        self._schedule_reopening(replica)
        return True

    def drop(self, replica: Replica) -> None:
        """Drop the breaker of a replica that has begun an answer."""
        if replica.breaker is not None:
            replica.breaker = None
            self._on_reopened(replica)

    def _schedule_reopening(self, replica: Replica) -> None:
        """Call `on_reopened` when the breaker becomes half-open."""
        breaker, now = replica.breaker, self._clock()
        if replica.gone or breaker is None:
            return
        if breaker.state(now) is BreakerState.OPEN:
            asyncio.get_running_loop().call_later(breaker.remaining_s(now), self._schedule_reopening, replica)
        else:
            self._on_reopened(replica)
