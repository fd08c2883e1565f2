"""Put replicas to sleep and wake them. A sleeping replica gives its device slot back; its weights it keeps or releases.

The autoscaler decides which replica sleeps, how deeply and when. A replica that is requested while it falls asleep
wakes as soon as it sleeps. One that turns out to be busy keeps serving.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

from controlplane import dependencies
from controlplane.registry.feed_hub import DRAIN_DELIVERY_LIMIT_S, FeedHub
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.local.cpu_share import CpuShare
from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.local.runtime_process import RuntimeProcess
from controlplane.scaling.policy.replica_lifecycle import ReplicaEvent, ReplicaState
from controlplane.scaling.replicas import Replica, replica_row
from kelvin.contracts.artifacts.runtime_control import BindRequest, BindResponse, RuntimeState
from kelvin.contracts.errors import Failure, Refused, Unavailable
from kelvin.contracts.serving.control_messages import Feed
from kelvin.process.loops import notify

log = logging.getLogger(__name__)

SLEEP_S: Final = dependencies.SLEEP.timeout_s  # until everything is given back


class ReplicaSleeper:
    """Puts replicas to sleep and wakes them. Not thread-safe: use from one event loop."""

    def __init__(self, fleet: Fleet, feed: FeedHub, cpu_share: CpuShare) -> None:
        self._fleet = fleet
        self._table = fleet.table
        self._feed = feed
        self._cpu_share = cpu_share
        self._slot_listeners: list[Callable[[], None]] = []
        self._releasing_weights: set[str] = set()  # runtimes that were told to release

    def __repr__(self) -> str:
        asleep, deep_sleep = (self._table.count(state) for state in (ReplicaState.ASLEEP, ReplicaState.DEEP_SLEEP))
        return f"<ReplicaSleeper asleep={asleep} deep_sleep={deep_sleep}>"

    def add_slot_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` on each device slot that a sleeping replica gave back."""
        self._slot_listeners.append(listener)

    def begin_sleep(self, replica: Replica) -> int:
        """Begin to put an idle replica to sleep. Return the feed revision that tells activators to send no more
        requests. `finish_sleep` waits for it.
        """
        dozing = self._table.apply_event(replica.runtime_id, ReplicaEvent.DOZE, self._now())
        return self._feed.publish(Feed(replicas=(replica_row(dozing),)))

    def release_weights(self, replica: Replica) -> None:
        """Release a sleeping replica's weights. Idempotent. If it is requested meanwhile, it wakes right afterwards."""
        if replica.runtime_id not in self._releasing_weights:
            self._releasing_weights.add(replica.runtime_id)
            self._fleet.tasks.start(
                self._release_weights(self._fleet[replica.runtime_id]), f"drop {replica.runtime_id}"
            )

    async def wake(self, process: RuntimeProcess, key: VersionKey, timeout_s: float) -> BindResponse:
        """Wake a sleeping replica: it makes a new engine over kept weights, or leases them again. Raises Refused."""
        bind = BindRequest(
            tenant=key.tenant,
            model=key.model,
            version=key.version,
            device_class=self._table[process.runtime_id].device_class,
            threads=self._cpu_share.threads(self._table.slots_sharing_threads),
            kv_bytes=self._cpu_share.kv_bytes(),
        )
        return await process.wake(bind, timeout_s)

    async def finish_sleep(self, process: RuntimeProcess, revision: int) -> ReplicaState | None:
        """Put a dozing replica to sleep. Return its state afterwards; None if it is leaving.

        - ASLEEP: it sleeps.
        - READY: it keeps serving.
        - RESTORING: it was requested meanwhile. It sleeps, or did not answer.
        - DOZING: it neither sleeps nor serves.
        """
        runtime_id = process.runtime_id
        if not await self._feed.wait_until_delivered(revision, DRAIN_DELIVERY_LIMIT_S):
            log.warning("an activator may not know that a replica sleeps", extra={"runtime_id": runtime_id})
        state = await _request_sleep(process)
        if process.is_leaving:
            return None
        match self._table[runtime_id].state, state:
            case ReplicaState.DOZING, RuntimeState.ASLEEP:
                self._table.apply_event(runtime_id, ReplicaEvent.SLEPT, self._now())
                self._feed.publish(Feed(removed_replicas=(runtime_id,)))
                log.info("a replica sleeps", extra={"runtime_id": runtime_id})
                notify(self._slot_listeners, lambda listener: listener())
                return ReplicaState.ASLEEP  # whatever a listener has done with it since
            case ReplicaState.DOZING, RuntimeState.READY:
                self._resume_serving(runtime_id, ReplicaEvent.ROUSED)
            case ReplicaState.RESTORING, RuntimeState.READY:
                # It restored nothing.
                self._resume_serving(runtime_id, ReplicaEvent.BOUND, restore=(), bytes_by_tier={})
            case ReplicaState.RESTORING, _:
                self._feed.publish(Feed(removed_replicas=(runtime_id,)))
        return self._table[runtime_id].state

    async def _release_weights(self, process: RuntimeProcess) -> None:
        runtime_id = process.runtime_id
        try:
            await process.release_weights(SLEEP_S)
        except Refused as refused:
            failure: Failure | None = refused.failure
        else:
            failure = None
        finally:
            self._releasing_weights.discard(runtime_id)
        if process.is_leaving or self._table[runtime_id].state is not ReplicaState.ASLEEP:
            return  # it wakes or ends
        if failure is None:
            self._table.apply_event(runtime_id, ReplicaEvent.DROPPED, self._now())
            log.info("a sleeping replica released its weights", extra={"runtime_id": runtime_id})
        else:
            log.warning("a sleeping replica kept its weights", extra={"runtime_id": runtime_id, "why": failure.message})
            self._fleet.end(process)

    def _resume_serving(self, runtime_id: str, event: ReplicaEvent, **learned: Any) -> None:
        replica = self._table.apply_event(runtime_id, event, self._now(), **learned)
        self._feed.publish(Feed(replicas=(replica_row(replica),)))

    def _now(self) -> int:
        return self._fleet.clock.monotonic_us()


async def _request_sleep(process: RuntimeProcess) -> RuntimeState | None:
    """Tell a runtime to sleep. Return its state afterwards; None if it did not answer or still holds memory."""
    try:
        await process.sleep(SLEEP_S)
        return RuntimeState.ASLEEP
    except Refused as refused:
        failure = refused.failure
    log.info("a replica did not sleep", extra={"runtime_id": process.runtime_id, "why": failure.message})
    if isinstance(failure, Unavailable):
        return None  # it may still carry the order out, whatever its report says now
    try:
        state = (await process.report()).state
    except Refused:
        return None
    # A runtime reports ASLEEP as soon as it stops serving. Only its answer to this call means that memory is free.
    return None if state is RuntimeState.ASLEEP else state
