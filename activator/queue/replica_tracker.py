"""Apply the feed's replicas and failed starts to the queues, so that waiting requests get a slot or a refusal."""

from collections.abc import Callable, Iterable
from math import inf

from activator.queue.circuit_breakers import VersionBreakers
from activator.queue.policy.wait_estimate import StartForecasts
from activator.queue.slot_allocator import SlotAllocator
from activator.queue.version_queue import Replica, VersionQueue, next_waiter
from activator.queue.waker import Waker
from activator.routing.policy.version_key import VersionKey, key_of
from kelvin.contracts.errors import Failure, ModelNotFound, RemoteFailure
from kelvin.contracts.serving.control_messages import Feed, ReplicaRow, RestoreFailure


class ReplicaTracker:
    """Tracks the replicas of all versions. `clock` returns monotonic seconds."""

    def __init__(
        self,
        slots: SlotAllocator,
        starts: StartForecasts,
        breakers: VersionBreakers,
        waker: Waker,
        clock: Callable[[], float],
    ) -> None:
        self._version_queues = slots.version_queues
        self._slots = slots
        self._starts = starts
        self._breakers = breakers
        self._waker = waker
        self._clock = clock
        self._version_of: dict[str, VersionKey] = {}  # by runtime_id

    def __repr__(self) -> str:
        return f"<ReplicaTracker replicas={len(self._version_of)}>"

    def apply(self, feed: Feed) -> None:
        """Apply a feed message. Waiting requests are notified before this returns."""
        present = {row.runtime_id for row in feed.replicas}
        for runtime_id in [known for known in self._version_of if known not in present] if feed.full else ():
            self.remove(runtime_id)
        for runtime_id in feed.removed_replicas:
            self.remove(runtime_id)
        removed = [VersionKey(*version) for version in feed.removed_versions]
        if feed.full:
            # A snapshot names no removals: versions that it lacks were deleted while the feed was away.
            versions = {key_of(row) for row in feed.versions}
            removed = sorted((self._version_queues.keys() | self._starts.keys()) - versions)
            self._starts.clear()
            self._breakers.retain({(row.tenant, row.version) for row in feed.versions})
        for start in feed.starts:
            self._starts.set_start_duration(key_of(start), start)
        for forecast in feed.forecasts:
            self._starts.set_forecast(key_of(forecast), forecast, self._clock())
        for row in feed.start_problems:
            self._starts.set_problem(key_of(row), row.problem)
        for name in feed.removed_start_problems:
            self._starts.set_problem(VersionKey(*name), None)
        self._apply_replicas(feed.replicas)
        for failure in feed.failures:
            self._fail(failure)
        for key in removed:
            self._forget(key)

    def check_integrity(self) -> None:
        """Assert that every replica is in the queue of its version."""
        found = {
            runtime_id: key
            for key, version_queue in self._version_queues.items()
            for runtime_id in version_queue.replicas
        }
        assert found == self._version_of

    def _apply_replicas(self, rows: Iterable[ReplicaRow]) -> None:
        for row in rows:
            key = key_of(row)
            if self._version_of.get(row.runtime_id, key) != key:
                self.remove(row.runtime_id)
            version_queue = self._slots.ensure_version_queue(key)
            known = version_queue.replicas.get(row.runtime_id)
            if known is None:
                version_queue.replicas[row.runtime_id] = Replica(
                    row, int(self._clock() * 1e6), self._waker.wake_sent_us(key)
                )
                version_queue.ring.add(row.runtime_id)
                self._version_of[row.runtime_id] = key
            else:
                known.row = row
            version_queue.next_review_s = -inf
            self._slots.grant(key, version_queue)
            if not version_queue.is_asleep:
                self._waker.stop_wake(key)
                self._waker.stop_timed_wakes(key.tenant, key.version)
                self._starts.clear_version(key)
            elif len(version_queue.waiting):
                self._waker.start_wake(key)

    def remove(self, runtime_id: str) -> None:
        """Forget a replica that has ended. Idempotent."""
        key = self._version_of.pop(runtime_id, None)
        if key is None:
            return
        version_queue = self._version_queues[key]
        gone = version_queue.replicas.pop(runtime_id)
        version_queue.ring.remove(runtime_id)
        gone.gone = True  # its running requests end with their connections
        version_queue.throughput.record_lost_slots(self._clock(), gone.running)
        version_queue.shares.owner_running -= gone.owner_running
        if self._slots.needs_wake(key):
            self._waker.start_wake(key)
        self._slots.grant(key, version_queue)  # with fewer slots, the shares change

    def _fail(self, failed: RestoreFailure) -> None:
        failure: Failure = RemoteFailure(
            failed.code, failed.status, failed.message, remote_retryable=failed.retryable,
            remote_retry_after_s=1.0 if failed.retryable else None,
        )  # fmt: skip
        self._waker.stop_timed_wakes(failed.tenant, failed.version)
        self._starts.clear_failed_start(failed.tenant, failed.version)
        self._breakers.record_failure(
            failed.tenant, failed.version, failed.code, self._clock(), retryable=failed.retryable
        )
        for key, version_queue in list(self._version_queues.items()):
            if (key.tenant, key.version) == (failed.tenant, failed.version) and version_queue.is_asleep:
                self._refuse(key, version_queue, failure)

    def _forget(self, key: VersionKey) -> None:
        """Forget a deleted version, and refuse the requests that wait for it."""
        self._starts.clear_version(key)
        self._breakers.drop(key)
        self._waker.stop_timed_wakes(key.tenant, key.version)
        if (version_queue := self._version_queues.get(key)) is not None:
            self._refuse(key, version_queue, ModelNotFound(f"{key.model}@{key.version[:12]}"))

    def _refuse(self, key: VersionKey, version_queue: VersionQueue, failure: Failure) -> None:
        self._waker.stop_wake(key)
        while (found := next_waiter(version_queue)) is not None:
            waiter, queued_request = found
            version_queue.waiting.settle(queued_request, 0)
            waiter.assignment.set_result(failure)
        self._slots.drop_if_empty(key, version_queue)
