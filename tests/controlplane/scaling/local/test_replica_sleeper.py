"""Sleeping replicas on real sockets and processes: the slot is free, the version stays in the process, and a request
wakes it.
"""

import os
import signal

import msgspec
import pytest

from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.local import replica_sleeper as sleep_module
from controlplane.scaling.local.cpu_share import CpuShare
from controlplane.scaling.policy.breakeven import Level
from controlplane.scaling.policy.replacement_steps import ReplacementStep
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.timeline import Stage
from tests.controlplane.builders import key
from tests.controlplane.machine_fixture import LocalMachine, RunDirectory, local
from tests.eventually import eventually


async def put_to_sleep(it: LocalMachine, which: VersionKey, level: Level = Level.ASLEEP) -> None:
    """Start a replica of the version and put it to sleep."""
    it.apply(which, 1)
    await it.wait_until_ready(which)
    it.actuator.sleep(which, level)
    await eventually(lambda: len(it.table.sleepers(which)) == 1, f"{which} sleeps")
    if level is Level.DEEP_SLEEP:
        it.actuator.sleep(which, level)
        await eventually(lambda: it.table.count(ReplicaState.DEEP_SLEEP) == 1, f"{which} drops its weights")
    it.check_integrity()


async def test_sleeping_replica_frees_its_slot_and_wakes(run: RunDirectory) -> None:
    """With one slot another version runs meanwhile. Then the first wakes in the same process and is in the feed."""
    async with local(run, slots=1) as it:
        rooms: list[int] = []
        it.actuator.add_slot_listener(lambda: rooms.append(it.table.held_slots))
        await put_to_sleep(it, key())
        assert rooms == [0]
        assert (it.table.held_slots, it.table.live_count(key()), it.table.leaving_count()) == (0, 0, 0)
        assert it.feed.snapshot().replicas == ()
        (sleeper,) = it.table.replicas_of(key())
        it.apply(key("n"), 1)
        await it.wait_until_ready(key("n"))
        it.apply(key("n"), 0)
        await eventually(lambda: it.table.held_slots == 0)
        requested_us = it.apply(key(), 1)
        await it.wait_until_ready(key())
        (row,) = it.feed.snapshot().replicas
        assert (row.runtime_id, row.draining) == (sleeper.runtime_id, False)
        assert [span.stage for span in row.restore] == [Stage.DECIDED, Stage.PROMOTED, Stage.READY]
        ((_, woken_us),) = run.calls("wake:m")
        assert 0 <= row.restore[1].after_us <= woken_us - requested_us
        assert len(run.calls("bind:m")) == 1
        assert it.table.held_slots == 1
        it.actuator.sleep(key(), Level.ASLEEP)
        await eventually(lambda: len(it.table.sleepers()) == 1, "it sleeps again")


async def failures_of(it: LocalMachine, which: VersionKey) -> list[str]:
    """Return the error codes that waiting requests get when the version should start."""
    with it.feed.subscribe() as subscription:
        it.apply(which, 1)
        await subscription.next_line()
        line = msgspec.json.decode(await subscription.next_line(), type=Feed)
    return [failure.code for failure in line.failures]


async def test_wake_needs_a_slot(run: RunDirectory) -> None:
    """While another version has the slot, requests fail with `overloaded`. 100 requests wake the replica once."""
    async with local(run, slots=1) as it:
        await put_to_sleep(it, key())
        it.apply(key("n"), 1)
        assert await failures_of(it, key()) == ["overloaded"]
        await it.wait_until_ready(key("n"))
        it.apply(key("n"), 0)
        await eventually(lambda: it.table.held_slots == 0)
        for _ in range(100):
            it.apply(key(), 1)
        await it.wait_until_ready(key())
        assert len(run.calls("wake:m")) == 1


async def test_wake_counts_no_replica_that_is_being_replaced(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A woken replica keeps its share of the CPU for good, as a started one does. A replica that is being replaced
    leaves soon.
    """
    shares: list[int] = []

    def threads(_: CpuShare, replicas: int) -> int:
        shares.append(replicas)
        return 1

    monkeypatch.setattr(CpuShare, "threads", threads)
    async with local(run) as it:
        await put_to_sleep(it, key())
        run.tell("release")
        it.apply(key("held"), 1)
        await it.wait_until_ready(key("held"))
        (run.path / "release").unlink()
        (old,) = it.table.replicas_of(key("held"))
        it.actuator.carry_out(old.runtime_id, ReplacementStep.BESIDE)
        await eventually(lambda: len(run.calls("bind:held")) == 2)
        shares.clear()
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        assert shares == [2]


async def test_sleeper_that_holds_a_slot_is_caught(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if a sleeper holds a slot, no other version can start."""
    async with local(run, slots=1) as it:
        await put_to_sleep(it, key())
        monkeypatch.setattr(type(it.table), "held_slots", property(lambda table: len(table.replicas_of(key()))))
        assert await failures_of(it, key("n")) == ["overloaded"]
        monkeypatch.undo()


async def test_request_during_falling_asleep_wakes_the_replica(run: RunDirectory) -> None:
    """It stays one process, there is no second start, and the slot is never free."""
    async with local(run, slots=1) as it:
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        run.tell("restless")
        it.actuator.sleep(key(), Level.ASLEEP)
        await eventually(lambda: len(run.calls("sleep")) == 1)
        it.apply(key(), 1)
        it.apply(key(), 1)
        assert (it.table.live_count(key()), it.table.held_slots) == (1, 1)
        (run.path / "restless").unlink()
        await it.wait_until_ready(key())
        assert (len(run.calls("wake:m")), len(run.calls("bind:m"))) == (1, 1)
        (row,) = it.feed.snapshot().replicas
        assert not row.draining


async def test_replica_falling_asleep_may_regain_its_slot(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    """The version waits for a slot and gets the one that it frees. It wakes once."""
    async with local(run, slots=1) as it:
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        it.actuator.add_slot_listener(lambda: it.actuator.apply(key(), 1, it.fleet.clock.monotonic_us()))
        it.actuator.sleep(key(), Level.ASLEEP)
        await eventually(lambda: len(run.calls("wake:m")) == 1)
        await it.wait_until_ready(key())
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_busy_replica_does_not_sleep(run: RunDirectory) -> None:
    """It stays in the feed."""
    async with local(run) as it:
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        it.actuator.sleep(key("busy"), Level.ASLEEP)
        await eventually(lambda: len(run.calls("sleep")) == 1)
        await it.wait_until_ready(key("busy"))
        (row,) = it.feed.snapshot().replicas
        assert not row.draining
        run.tell("idle")


async def test_sleeper_that_keeps_its_memory_is_ended(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports sleep before it has released memory. Its slot is free only when the process is gone."""
    monkeypatch.setattr(sleep_module, "SLEEP_S", 0.2)
    async with local(run, slots=1) as it:
        slept: list[int] = []
        it.actuator.add_slot_listener(lambda: slept.append(len(it.table.sleepers())))
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        run.tell("restless")
        it.actuator.sleep(key(), Level.ASLEEP)
        await eventually(lambda: not it.table.replicas_of(key()), "it is gone")
        assert slept in ([], [0])
        assert len(run.calls("drain")) == 1


async def test_replica_that_may_still_sleep_does_not_serve(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports ready only because it has not yet begun to fall asleep."""
    monkeypatch.setattr(sleep_module, "SLEEP_S", 0.2)
    async with local(run) as it:
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        run.tell("drowsy")
        it.actuator.sleep(key(), Level.ASLEEP)
        await eventually(lambda: not it.table.replicas_of(key()), "it is gone")


async def test_scale_to_zero_ends_a_sleeper(run: RunDirectory) -> None:
    """A replica that is falling asleep ends as well."""
    async with local(run) as it:
        await put_to_sleep(it, key())
        it.apply(key(), 0)
        await eventually(lambda: not it.table.replicas_of(key()))
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        run.tell("restless")
        it.actuator.sleep(key(), Level.ASLEEP)
        it.apply(key(), 0)
        (run.path / "restless").unlink()
        await eventually(lambda: not it.table.replicas_of(key()))
        assert it.table.held_slots == 0


async def test_dead_sleeper_is_started_on_request(run: RunDirectory) -> None:
    """A sleeper that dies is not replaced before the next request."""
    async with local(run) as it:
        await put_to_sleep(it, key())
        (sleeper,) = it.table.sleepers()
        os.kill(sleeper.pid, signal.SIGKILL)
        await eventually(lambda: not it.table.replicas_of(key()))
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        assert (len(run.calls("wake:m")), len(run.calls("bind:m"))) == (0, 2)


LEVELS = pytest.mark.parametrize("level", [Level.ASLEEP, Level.DEEP_SLEEP])


@LEVELS
async def test_a_wake_that_fails_is_followed_by_a_start(run: RunDirectory, level: Level) -> None:
    """The process is dead. With one slot, requests wait for another process and none fails."""
    async with local(run, slots=1) as it:
        await put_to_sleep(it, key(), level)
        (sleeper,) = it.table.sleepers()
        run.tell("nightmare")
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        (row,) = it.feed.snapshot().replicas
        assert row.runtime_id != sleeper.runtime_id
        assert (len(run.calls("wake:m")), len(run.calls("bind:m"))) == (1, 2)
        assert it.listener.failures == []
        assert it.table.held_slots == 1


async def test_failed_start_after_failed_wake_fails_requests(run: RunDirectory) -> None:
    """Control of the test above: if the version itself is damaged, requests fail with its code."""
    async with local(run) as it:
        run.tell("healed")
        await put_to_sleep(it, key("corrupt"), Level.DEEP_SLEEP)
        run.tell("nightmare")
        (run.path / "healed").unlink()
        it.apply(key("corrupt"), 1)
        await eventually(lambda: len(it.listener.failures) == 1)
        assert it.listener.failures[0][1].code == "chunk_corrupt"
        assert (len(run.calls("wake:corrupt")), len(run.calls("bind:corrupt"))) == (1, 2)
        await eventually(lambda: it.table.held_slots == 0)
        await eventually(lambda: not it.table.replicas_of(key("corrupt")))


async def test_killed_wake_only_delays_the_request(run: RunDirectory) -> None:
    """The process is killed while it leases its weights again. A standby takes the version."""
    async with local(run, slots=1) as it:
        await put_to_sleep(it, key(), Level.DEEP_SLEEP)
        (sleeper,) = it.table.sleepers()
        run.tell("snooze")
        requested_us = it.apply(key(), 1)
        await eventually(lambda: len(run.calls("wake:m")) == 1)
        os.kill(sleeper.pid, signal.SIGKILL)
        await it.wait_until_ready(key())
        (row,) = it.feed.snapshot().replicas
        assert row.runtime_id != sleeper.runtime_id
        ((_, woken_us),) = run.calls("wake:m")
        assert row.restore[1].after_us > woken_us - requested_us, "the request came before that wake"
        assert it.listener.failures == []


async def test_deep_sleeper_leases_weights_again(run: RunDirectory) -> None:
    """The same process holds no slot while it sleeps, and takes a new lease at the wake. The lease names its tier."""
    async with local(run, slots=1) as it:
        await put_to_sleep(it, key(), Level.DEEP_SLEEP)
        assert (it.table.held_slots, it.table.live_count(key()), it.table.leaving_count()) == (0, 0, 0)
        it.actuator.sleep(key(), Level.DEEP_SLEEP)
        it.actuator.sleep(key(), Level.ASLEEP)
        (sleeper,) = it.table.sleepers()
        assert sleeper.state is ReplicaState.DEEP_SLEEP
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        (replica,) = it.table.replicas_of(key())
        assert (replica.runtime_id, dict(replica.bytes_by_tier)) == (sleeper.runtime_id, {"nvme": 1})
        assert [span.stage for span in replica.restore] == [
            Stage.DECIDED, Stage.PROMOTED, Stage.LEASED, Stage.READY
        ]  # fmt: skip
        assert (len(run.calls("drop")), len(run.calls("bind:m"))) == (1, 1)


async def test_request_during_release_wakes_without_weights(run: RunDirectory) -> None:
    """The wake comes after the release, however often both are requested. Weights are never released under a
    request.
    """
    async with local(run) as it:
        await put_to_sleep(it, key())
        run.tell("restless")
        for _ in range(3):
            it.actuator.sleep(key(), Level.DEEP_SLEEP)
        await eventually(lambda: len(run.calls("drop")) == 1)
        it.apply(key(), 1)
        await eventually(lambda: len(run.calls("wake:m")) == 1)
        it.actuator.sleep(key(), Level.DEEP_SLEEP)
        (run.path / "restless").unlink()
        await it.wait_until_ready(key())
        (replica,) = it.table.replicas_of(key())
        assert Stage.LEASED in [span.stage for span in replica.restore]
        assert (len(run.calls("drop")), len(run.calls("bind:m"))) == (1, 1)


async def test_sleeper_that_cannot_release_weights_ends(run: RunDirectory) -> None:
    """Something still refers to the weights, so the process must not serve again. The next request starts another."""
    async with local(run) as it:
        await put_to_sleep(it, key())
        run.tell("clinging")
        it.actuator.sleep(key(), Level.DEEP_SLEEP)
        await eventually(lambda: not it.table.replicas_of(key()))
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        assert (len(run.calls("wake:m")), len(run.calls("bind:m"))) == (0, 2)
        assert it.listener.failures == []


@LEVELS
async def test_a_restarted_control_plane_finds_its_sleepers(run: RunDirectory, level: Level) -> None:
    """The replica keeps sleeping at its level and wakes for the next request. A sleeper of an unknown version ends."""
    async with local(run) as it:
        await put_to_sleep(it, key(), level)
    async with local(run) as it:
        (sleeper,) = it.table.replicas_of(key())
        assert sleeper.state.value == level.value
        await eventually(lambda: it.table.held_slots == 0, "a silent standby holds a slot until it answers")
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        assert (len(run.calls("wake:m")), len(run.calls("bind:m"))) == (1, 1)
        it.actuator.sleep(key(), Level.ASLEEP)
        await eventually(lambda: len(it.table.sleepers()) == 1)
    async with local(run, known=lambda _: False) as it:
        await eventually(lambda: not it.table.replicas_of(key()))


async def test_sleepers_give_memory_to_requested_versions(run: RunDirectory) -> None:
    """The longest sleeper ends first, one at a time, and no more than needed. A sleeper without weights stays."""
    async with local(run) as it:
        await put_to_sleep(it, key("empty"), Level.DEEP_SLEEP)
        for name in ("a", "b", "c"):
            await put_to_sleep(it, key(name))
        run.tell("crowded")
        it.apply(key("full"), 1)
        await eventually(lambda: not it.table.replicas_of(key("a")))
        (run.path / "crowded").unlink()
        await it.wait_until_ready(key("full"))
        assert [len(it.table.sleepers(key(name))) for name in ("a", "c", "empty")] == [0, 1, 1]
        assert it.listener.failures == []


async def test_start_without_memory_fails_without_sleepers(run: RunDirectory) -> None:
    """Control of the test above: nothing can free memory, so the start fails."""
    async with local(run) as it:
        run.tell("crowded")
        it.apply(key("full"), 1)
        await eventually(lambda: len(it.listener.failures) == 1)
        assert it.listener.failures[0][1].code == "overloaded"
