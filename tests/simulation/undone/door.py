"""Repairs of the activator."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from activator.answers.answer_store import LocalAnswerStore
from activator.answers.answers_handover import HandoverReceiver
from activator.app.app import RECOVER_AGAIN_S, SPOOL_PREFIX, ship_leftovers
from activator.queue.policy.wait_estimate import MIN_ANSWERS, Throughput
from activator.queue.replica_tracker import ReplicaTracker
from activator.request.attempts import Attempts
from activator.routing.last_feed import LastFeed, _StoredFeed
from activator.routing.policy.version_key import VersionKey
from activator.upstream.http1_client import UpstreamResponse
from activator.upstream.upstream_request import UpstreamLost, UpstreamRejected, UpstreamRequest
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.errors import Internal
from kelvin.contracts.serving.control_messages import Feed, VersionRow
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.loops import Loops
from kelvin.spool import Post, recover
from tests.simulation.undone import Undoing, repair


@repair(r"^no_failure_is_internal")
def foreign_answer_is_internal(undoing: Undoing) -> None:
    """A pod's runtime is gone and a proxy answers in HTML. The caller gets an internal error, though another replica is
    ready.
    """
    repaired = UpstreamRequest._read_rejection

    async def rejection(self: UpstreamRequest, answer: UpstreamResponse) -> UpstreamRejected | UpstreamLost:
        if answer.fields.get(b"content-type", b"").startswith(b"text/") and answer.status != 503:
            return UpstreamRejected(Internal())
        return await repaired(self, answer)

    undoing.method(UpstreamRequest, "_read_rejection", rejection)


@repair(r"^the_next_process_knows_the_table", seed=382_279_427_976)
def kept_feed_ages_with_the_wall_clock(undoing: Undoing) -> None:
    """The age of the stored feed follows the wall clock. The clock steps by some hours while the control plane is away
    and the activator restarts: the next process knows no key and refuses every request.
    """

    def age_on_disk_s(self: LastFeed, kept: _StoredFeed) -> float:
        return self._wall_s() - kept.heard_at_s

    undoing.method(LastFeed, "_age_on_disk_s", age_on_disk_s)


@repair(r"^a_key_runs_once")
def keys_are_not_handed_over(undoing: Undoing) -> None:
    """During a restart two processes serve from one socket. The new one does not know the old one's idempotency keys,
    so a repeated request runs a second time.
    """

    async def connect(answers: LocalAnswerStore, directory: SocketDirectory) -> None:
        return None

    undoing.method(HandoverReceiver, "connect", staticmethod(connect))


@repair(r"^no_record_is_lost_or_doubled: \d+ records of activator-\d+ were not shipped")
def leftover_spools_are_looked_for_once(undoing: Undoing) -> None:
    """An activator looks for leftover records only once, at its start. During a restart the old one is still serving
    then: records that it cannot ship before its end stay unbilled until a later activator starts.
    """

    async def ship(spools: Path, post: Post) -> None:
        while any(
            each.remaining for each in await recover(spools, lambda source: post if SPOOL_PREFIX in source else None)
        ):
            await asyncio.sleep(RECOVER_AGAIN_S)
        await asyncio.Event().wait()

    undoing.function(ship_leftovers, ship)


@repair(r"ZeroDivisionError", seed=44_137_158_442)
def pace_without_slots(undoing: Undoing) -> None:
    """A version whose replicas all drain or rest has a throughput of 0, and the estimate of a wait divides by it. The
    error ends the feed's task and with it the activator.
    """

    def tokens_per_s(self: Throughput, slots: int) -> float | None:
        return (
            self._estimated_tokens / self._held_s * slots if self._answers >= MIN_ANSWERS and self._held_s > 0 else None
        )

    undoing.method(Throughput, "tokens_per_s", tokens_per_s)


@repair(r"^nobody_waits_for_what_is_deleted", seed=268_506_051_259)
def retry_keeps_its_version(undoing: Undoing) -> None:
    """A retry goes to the version that the request was first resolved to. If that version was deleted since, the
    request waits until its deadline.
    """
    repaired = Attempts.serve

    async def serve(self: Attempts, *given: object) -> None:
        await repaired(self, *given[:-1], lambda: True)  # type: ignore[arg-type,call-arg]

    undoing.method(Attempts, "serve", serve)


@repair(r"^nobody_waits_for_what_is_deleted", seed=864_847_793_783)
def snapshot_forgets_no_version(undoing: Undoing) -> None:
    """A version is deleted while the feed is disconnected. The next snapshot lacks it, but its waiting requests are not
    ended: they wait until their deadlines.
    """
    repaired = ReplicaTracker.apply

    def apply(self: ReplicaTracker, feed: Feed) -> None:
        if feed.full:  # as if the snapshot had every version with waiting requests
            feed = msgspec.structs.replace(feed, versions=(*feed.versions, *map(_row, self._version_queues)))
        repaired(self, feed)

    undoing.method(ReplicaTracker, "apply", apply)


def _row(key: VersionKey) -> VersionRow:
    return VersionRow(
        tenant=key.tenant, model=key.model, version=key.version, limits=Limits(1, 1, 1, 1), created_at_s=0
    )


@repair(r"^versions_that_are_wanted_are_asked_for", seed=248_212_186_710)
def wake_ends_at_its_first_error(undoing: Undoing) -> None:
    """After one OSError while the autoscaler is notified of a wanted version, it is never notified again. Callers wait
    for a start until their deadlines.
    """

    def start(
        self: Loops, name: str, body: Callable[[], Coroutine[Any, Any, None]], **_: object
    ) -> "asyncio.Task[None]":
        async def once() -> None:
            try:
                await body()
            except OSError:
                return

        task = asyncio.get_running_loop().create_task(once(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    undoing.method(Loops, "start", start)
