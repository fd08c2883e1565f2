"""Invariants of the activator: after each step, and at rest, once all faults are over and no request is in flight."""

import json
from typing import TYPE_CHECKING, Final

from activator.queue.waker import AGAIN_S
from activator.routing.feed_client import PATIENCE_S
from kelvin.spool.leftover_recovery import list_spools
from tests.simulation.activator.fake_replica import DONE
from tests.simulation.activator.simulated_client import SimulatedClient

if TYPE_CHECKING:
    from tests.simulation.activator.activator_world import ActivatorWorld

# After its deadline, a request may still notify a replica, write its record and send its last bytes.
SLACK_S: Final = 2.5
ASKED_AGAIN_S: Final = 2 * AGAIN_S + 1.0  # within which a wanted version is requested again
DOWN_S: Final = 60.0  # how long no process may accept: an old one drains, the next one starts and waits for its feed
KNOWS_S: Final = PATIENCE_S + 1.0  # within which a process uses the stored feed


def each_caller_is_answered_once(world: "ActivatorWorld") -> None:
    """A response has one head and one end. A request that has ended was answered, aborted, or left by its caller."""
    for caller in world.callers:
        assert not caller.answers, f"{caller.request.tag} was answered more than once"
        if caller.is_over:
            assert caller.is_complete or caller.is_aborted or caller.has_left, (
                f"{caller.request.tag} was never answered"
            )


def deadlines_hold(world: "ActivatorWorld") -> None:
    """No request outlasts its deadline, and none goes on after its caller has left."""
    for caller in world.callers:
        request = caller.request
        if caller.task is None:  # it waits for a process that accepts, or waited until it left
            waits_s = 0.0 if caller.is_over else world.loop.time() - caller.asked_s
            assert waits_s <= DOWN_S, f"{request.tag} waits since {waits_s:.1f} s for a process that accepts"
            continue
        until_s = caller.asked_s + request.deadline_s + (30.0 if request.slow_s else 0.0)
        ended_s = world.loop.time() if caller.ended_s is None else caller.ended_s
        late_s = ended_s - max(until_s, world.disk_bad_until_s) - SLACK_S
        assert late_s <= 0, f"{request.tag} is {late_s:.1f} s late"


def answers_are_of_one_run(world: "ActivatorWorld") -> None:
    """A whole response has all parts of one run, in order, for its caller's request."""
    for caller in world.callers:
        if not (caller.is_over and caller.is_complete and caller.status == 200) or caller.request.stream is None:
            continue
        parts = _parts(caller)
        tags = {str(part["tag"]) for part in parts}
        request = caller.request
        assert len(tags) <= 1, f"{request.tag} got parts of {sorted(tags)}"
        assert all(tag.startswith(f"{request.tag}/") for tag in tags), f"{request.tag} got the answer of {tags}"
        if request.stream:
            numbers = [part["number"] for part in parts]
            ended = DONE in bytes(caller.body) or b'"error"' in bytes(caller.body)
            assert numbers == list(range(1, len(numbers) + 1)), f"{request.tag} got parts {numbers}"
            assert ended, f"{request.tag} ends without its end"


def _parts(caller: SimulatedClient) -> list[dict[str, object]]:
    if not caller.request.stream:
        return [json.loads(caller.body)]
    events = bytes(caller.body).split(b"\n\n")
    return [json.loads(event[6:]) for event in events if event.startswith(b"data: {") and b'"tag"' in event]


def a_key_runs_once(world: "ActivatorWorld") -> None:
    """All whole responses of one idempotency key come from one run, also across a restart of the activator."""
    before: dict[tuple[str, str], SimulatedClient] = {}
    for caller in sorted(world.callers, key=lambda each: each.asked_s):
        is_good = (
            caller.status == 200 and caller.is_complete and (not caller.request.stream or DONE in bytes(caller.body))
        )
        if not caller.request.tag.startswith("key-") or caller.ended_s is None or not is_good:
            continue
        name = caller.request.tag, caller.request.model
        one, before[name] = before.get(name, caller), caller
        ended_s = max(one.ended_s or 0.0, caller.ended_s)
        if not any(one.asked_s <= at_s <= ended_s for at_s in world.forgot_s):
            runs = {str(part["tag"]) for each in (one, caller) for part in _parts(each)}
            assert len(runs) <= 1, f"{caller.request.tag} was answered from {sorted(runs)}"


def no_failure_is_internal(world: "ActivatorWorld") -> None:
    """No caller gets an internal error. No replica of this world reports one."""
    for caller in world.callers:
        if caller.is_over and b'"internal"' in caller.body:
            raise AssertionError(f"{caller.request.tag} was told of an internal error")


def parts_of_the_door_are_sound(world: "ActivatorWorld") -> None:
    for door in world.doors:
        door.throttler.check_integrity()
        door.table.check_integrity()
        door.under_way.check_integrity()


def nobody_waits_for_what_is_deleted(world: "ActivatorWorld") -> None:
    """Once the feed is connected and applied, no caller waits for a deleted version."""
    for door in world.doors:
        if not door.feed.connected or door.table.revision != world.control.revision:
            continue
        for key in world.control.deleted:
            assert not door.throttler.queue_length(key), (
                f"{door.throttler.queue_length(key)} wait for a version that was deleted"
            )


def versions_that_are_wanted_are_asked_for(world: "ActivatorWorld") -> None:
    """While callers wait for a start, the autoscaler is notified again and again."""
    for door in world.doors:
        for key, since_s in door.wanted_since_s.items():
            if not door.throttler.slot_allocator.needs_wake(key):
                continue
            silent_s = world.loop.time() - max(since_s, door.send_wake.poked_s.get(key, 0.0), world.disturbed_s)
            assert silent_s <= ASKED_AGAIN_S, f"a version is wanted, and nobody asked for it in {silent_s:.1f} s"


def the_next_process_knows_the_table(world: "ActivatorWorld") -> None:
    """A process starts from the stored feed, even if the control plane is away."""
    for door in world.doors:
        if door.has_kept_feed and world.loop.time() > door.began_s + KNOWS_S:
            assert door.feed.synced.is_set(), f"{door} knows no tenant, though a feed was kept"


def nothing_is_left_of_requests(world: "ActivatorWorld") -> None:
    """No slot, queue entry, permit, budget hold or table entry is left."""
    assert all(caller.is_over for caller in world.callers), "a caller still waits"
    assert len(world.doors) == 1, f"{world.doors} at rest"
    door = world.doors[0]
    left = (
        (door.throttler, "running=0 queued=0"), (door.under_way, "requests=0 named=0"),
        (door.shares, "running=0"), (door.once, "runs=0 tasks=0"), (door.waker, "waking=0 timed=0"),
        (door.background_tasks, "running=0"), (door.door, "running=0/"), (door.reporter, "running=0"),
        (door.answers, "old_runs=0 decides=True"), (door.handover, "successors=0"),
    )  # fmt: skip
    for what, said in left:
        assert said in repr(what), f"{what!r} at rest"
    for name, spent in door.budgets._spending_by_tenant.items():
        assert not spent.held_micros, f"{spent.held_micros} micro-units of {name} are held at rest"


def replicas_are_free(world: "ActivatorWorld") -> None:
    """No replica runs a request."""
    for name, replica in world.control.replicas.items():
        assert not replica.running, f"{name} still runs {len(replica.running)} requests"


def every_answer_is_recorded(world: "ActivatorWorld") -> None:
    """Each whole response has a record in the ledger, and all records are shipped."""
    assert all(door.shipper.backlog == 0 for door in world.doors), [door.shipper for door in world.doors]
    by_id = world.control.records
    for caller in world.callers:
        is_whole = not caller.request.stream or DONE in bytes(caller.body)
        if caller.is_complete and caller.status == 200 and is_whole:
            request_id = caller.headers[b"x-request-id"].decode()
            assert request_id in by_id, f"the answer of {caller.request.tag} was not recorded"


def no_record_is_lost_or_doubled(world: "ActivatorWorld") -> None:
    """A durable record reaches the ledger once, even if its process ended or was killed."""
    for source, (acknowledged, last) in list_spools(world.directory / "spool"):
        assert acknowledged == last, f"{last - acknowledged} records of {source} were not shipped"
    lost = world.owed - world.control.records.keys()
    assert not lost, f"{len(lost)} durable records never reached the ledger"
    assert not world.control.doubled, f"two records of {world.control.doubled[0].request_id}"
