"""Which replicas serve which version, and what has failed, as the feed tells it: who waits is woken, or refused."""

from collections.abc import Callable, Iterable
from math import inf

from activator.breakers import Breakers
from activator.keys import VersionKey, key_of
from activator.line import Line, Replica, next_waiter
from activator.policy.expected import Starts
from activator.slots import Slots
from activator.wake import Waker
from contracts.control import Feed, ReplicaRow, RestoreFailure
from contracts.errors import Failure, ModelNotFound, RemoteFailure


class Roster:
    """Of all versions. `clock` is monotonic seconds."""

    def __init__(
        self,
        slots: Slots,
        starts: Starts,
        breakers: Breakers,
        waker: Waker,
        clock: Callable[[], float],
    ) -> None:
        self._lines = slots.lines
        self._slots = slots
        self._starts = starts
        self._breakers = breakers
        self._waker = waker
        self._clock = clock
        self._where: dict[str, VersionKey] = {}  # runtime_id -> its line

    def __repr__(self) -> str:
        return f"<Roster replicas={len(self._where)}>"

    def apply(self, feed: Feed) -> None:
        """Take the replicas and failures of a line of the feed over; waiters are woken before this returns."""
        present = {row.runtime_id for row in feed.replicas}
        for runtime_id in [known for known in self._where if known not in present] if feed.full else ():
            self.remove(runtime_id)
        for runtime_id in feed.removed_replicas:
            self.remove(runtime_id)
        removed = [VersionKey(*version) for version in feed.removed_versions]
        if feed.full:
            # A snapshot names no removals: versions that it lacks were deleted while the feed was away.
            versions = {key_of(row) for row in feed.versions}
            removed = sorted((self._lines.keys() | self._starts.keys()) - versions)
            self._starts.clear()
            self._breakers.retain({(row.tenant, row.version) for row in feed.versions})
        for start in feed.starts:
            self._starts.stands(key_of(start), start)
        for forecast in feed.forecasts:
            self._starts.under_way(key_of(forecast), forecast, self._clock())
        for row in feed.start_problems:
            self._starts.set_problem(key_of(row), row.problem)
        for name in feed.removed_start_problems:
            self._starts.set_problem(VersionKey(*name), None)
        self._put(feed.replicas)
        for failure in feed.failures:
            self._fail(failure)
        for key in removed:
            self._forget(key)

    def check_integrity(self) -> None:
        """Every replica is where it is said to be."""
        found = {runtime_id: key for key, line in self._lines.items() for runtime_id in line.replicas}
        assert found == self._where

    def _put(self, rows: Iterable[ReplicaRow]) -> None:
        for row in rows:
            key = key_of(row)
            if self._where.get(row.runtime_id, key) != key:
                self.remove(row.runtime_id)
            line = self._slots.line_of(key)
            known = line.replicas.get(row.runtime_id)
            if known is None:
                line.replicas[row.runtime_id] = Replica(row, int(self._clock() * 1e6), self._waker.poked_us(key))
                line.ring.add(row.runtime_id)
                self._where[row.runtime_id] = key
            else:
                known.row = row
            line.review_s = -inf
            self._slots.grant(key, line)
            if not line.is_asleep:
                self._waker.rest(key)
                self._waker.calm(key.tenant, key.version)
                self._starts.served(key)
            elif len(line.waiting):
                self._waker.ensure(key)

    def remove(self, runtime_id: str) -> None:
        """Forget a replica that has ended. Idempotent."""
        key = self._where.pop(runtime_id, None)
        if key is None:
            return
        line = self._lines[key]
        gone = line.replicas.pop(runtime_id)
        line.ring.remove(runtime_id)
        gone.gone = True  # its requests end by their own connections
        line.pace.lost(self._clock(), gone.running)
        line.shares.owner_running -= gone.owner_running
        if self._slots.is_wanted(key):
            self._waker.ensure(key)
        self._slots.grant(key, line)  # shares of fewer slots are other ones

    def _fail(self, failed: RestoreFailure) -> None:
        failure: Failure = RemoteFailure(
            failed.code, failed.status, failed.message, remote_retryable=failed.retryable,
            remote_retry_after_s=1.0 if failed.retryable else None,
        )  # fmt: skip
        self._waker.calm(failed.tenant, failed.version)
        self._starts.failed(failed.tenant, failed.version)
        self._breakers.failed(failed.tenant, failed.version, failed.code, self._clock(), retryable=failed.retryable)
        for key, line in list(self._lines.items()):
            if (key.tenant, key.version) == (failed.tenant, failed.version) and line.is_asleep:
                self._refuse(key, line, failure)

    def _forget(self, key: VersionKey) -> None:
        """The version was deleted: nobody waits for it any more."""
        self._starts.served(key)
        self._breakers.forget(key)
        self._waker.calm(key.tenant, key.version)
        if (line := self._lines.get(key)) is not None:
            self._refuse(key, line, ModelNotFound(f"{key.model}@{key.version[:12]}"))

    def _refuse(self, key: VersionKey, line: Line, failure: Failure) -> None:
        self._waker.rest(key)
        while (found := next_waiter(line)) is not None:
            waiter, ask = found
            line.waiting.settle(ask, 0)
            waiter.granted.set_result(failure)
        self._slots.tidy(key, line)
