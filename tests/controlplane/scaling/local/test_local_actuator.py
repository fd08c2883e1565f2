"""LocalActuator over real sockets and processes: promotion, single start, failure, loss, drain, pool, SIGKILL."""

import asyncio
import errno
import os
import signal
import time

import msgspec
import pytest

from controlplane.app.settings import load
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.local import fleet as fleet_module
from controlplane.scaling.local import local_actuator as local_module
from controlplane.scaling.local.cpu_share import CpuShare
from controlplane.scaling.local.runtime_process import RuntimeProcess
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.policy.start_problem import problem_from_failure
from controlplane.scaling.replicas import Replica
from kelvin.contracts.artifacts.runtime_control import RuntimeReport
from kelvin.contracts.errors import Failure, Refused, RemoteFailure, Unavailable
from kelvin.contracts.serving.control_messages import Feed, StartProblemRow
from kelvin.contracts.timeline import Stage
from kelvin.contracts.traffic_errors import StartFailed
from tests.controlplane.builders import key
from tests.controlplane.machine_fixture import RecordingListener, RunDirectory, fail_next_reports, local
from tests.eventually import eventually


async def test_a_parked_standby_is_promoted(run: RunDirectory) -> None:
    """The standby binds the version and is in the feed with the spans of its restore. The pool is refilled
    afterwards.
    """
    async with local(run) as it:
        await it.wait_until_parked()
        requested_us = it.apply(key(), 1)
        await it.wait_until_ready(key())
        (row,) = it.feed.snapshot().replicas
        assert (row.model, row.version, row.max_streams, row.draining) == ("m", key().version, 4, False)
        assert [span.stage for span in row.restore] == [Stage.DECIDED, Stage.PROMOTED, Stage.LEASED, Stage.READY]
        times = [span.after_us for span in row.restore]
        assert times == sorted(times)
        ((_, bound_us),) = run.calls("bind:m")
        assert 0 <= times[0] <= times[1] <= bound_us - requested_us
        await it.wait_until_parked()
        assert len(it.listener.became_ready) == 1


async def test_the_pool_is_refilled_only_after_the_restore(run: RunDirectory) -> None:
    """Nothing is forked while a version restores: the restore gets the core."""
    async with local(run) as it:
        await it.wait_until_parked()
        it.apply(key("held"), 1)
        await eventually(lambda: len(run.calls("bind:held")) == 1)
        it.pool.balance()
        assert it.pool.parked == 0
        assert len(run.calls("born")) == 1
        run.tell("release")
        await it.wait_until_ready(key("held"))
        await it.wait_until_parked()
        (born, refilled), ((_, bound_us),) = run.calls("born"), run.calls("bind:held")
        assert refilled[1] > bound_us > born[1]


async def test_a_thousand_requests_for_one_replica_bind_once(run: RunDirectory) -> None:
    """A start counts once it is accepted, also while no standby is parked."""
    async with local(run, standbys=0) as it:
        for _ in range(1000):
            it.apply(key(), 1)
        await it.wait_until_ready(key())
        assert len(run.calls("bind:m")) == 1


async def test_missing_standby_is_forked_at_once(run: RunDirectory) -> None:
    """Three versions start with one standby parked: two are forked during the restores. `on_start_waiting` names these
    two, so that their bytes are fetched meanwhile.
    """
    placing: list[VersionKey] = []
    async with local(run) as it:
        it.actuator.on_start_waiting = placing.append
        await it.wait_until_parked()
        for name in ("a", "b", "c"):
            it.apply(key(name), 1)
        for name in ("a", "b", "c"):
            await it.wait_until_ready(key(name))
        assert placing == [key("b"), key("c")]


async def test_failed_restore_fails_requests_and_ends_the_runtime(run: RunDirectory) -> None:
    """The failure is in the feed under its own code, the process ends, and the slot is free."""
    async with local(run) as it:
        with it.feed.subscribe() as subscription:
            it.apply(key("corrupt"), 1)
            await eventually(lambda: len(it.listener.failures) == 1)
            lines = [msgspec.json.decode(await subscription.next_line(), type=Feed) for _ in range(2)]
        (failure,) = lines[1].failures
        assert (failure.code, failure.status, failure.retryable) == ("chunk_corrupt", 500, False)
        assert failure.version == key("corrupt").version
        await eventually(lambda: it.table.held_slots == 0)
        assert len(run.calls("bind:corrupt")) == 1
        assert it.feed.snapshot().replicas == ()


async def test_standby_dying_as_it_answers_is_a_failed_fork(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death is noticed before its answer is read. The next fork waits, as after any failed one."""
    report = RuntimeProcess.report

    async def last_words(self: RuntimeProcess) -> RuntimeReport:
        found = await report(self)
        os.kill(self.pid, signal.SIGKILL)
        assert await self.wait_gone(5.0)
        return found

    async with local(run, standbys=0) as it:
        monkeypatch.setattr(RuntimeProcess, "report", last_words)
        with pytest.raises(Refused):
            await it.fleet.fork_standby()


async def test_start_problem_is_published_before_waiting_requests_fail(run: RunDirectory) -> None:
    """A request that fails copies the problem into its timeline at that moment."""

    class Explaining(RecordingListener):
        def on_start_failed(self, key: VersionKey, failure: Failure) -> None:
            super().on_start_failed(key, failure)
            row = StartProblemRow(
                tenant=key.tenant, model=key.model, version=key.version, problem=problem_from_failure(failure)
            )
            it.feed.publish(Feed(start_problems=(row,)))

    async with local(run) as it:
        explaining = Explaining()
        it.actuator.add_listener(explaining)
        with it.feed.subscribe() as subscription:
            it.apply(key("corrupt"), 1)
            await eventually(lambda: len(explaining.failures) == 1)
            lines = [msgspec.json.decode(await subscription.next_line(), type=Feed) for _ in range(3)]
        assert [(len(line.start_problems), len(line.failures)) for line in lines] == [(0, 0), (1, 0), (0, 1)]


async def test_lost_restore_is_retried_at_most_twice(run: RunDirectory) -> None:
    """Requests keep waiting. They fail only after three deaths in a row."""
    async with local(run, slots=1) as it:
        it.apply(key("crash"), 1)
        await eventually(lambda: len(it.listener.failures) == 1)
        assert len(run.calls("bind:crash")) == local_module.MAX_ATTEMPTS
        failure = it.listener.failures[0][1]
        assert isinstance(failure, StartFailed)
        assert failure.reason == "crash_loop"
        await eventually(lambda: it.table.held_slots == 0)


@pytest.mark.parametrize("briefly", [True, False], ids=["the agent comes back", "the agent stays away"])
async def test_start_is_retried_once_if_its_cache_agent_ends(run: RunDirectory, briefly: bool) -> None:
    """Requests wait for the second try. They fail with the second try's error."""
    async with local(run, slots=1) as it:
        if briefly:
            run.tell("briefly")
        it.apply(key("away"), 1)
        if briefly:
            await it.wait_until_ready(key("away"))
        else:
            await eventually(lambda: len(it.listener.failures) == 1)
        assert [failure.code for _, failure in it.listener.failures] == ([] if briefly else ["unavailable"])
        assert len(run.calls("bind:away")) == 2


async def test_killed_restore_only_delays_the_request(run: RunDirectory) -> None:
    """The first standby is killed during its restore. Another one takes over, and its spans count from the first
    request.
    """
    async with local(run) as it:
        requested_us = it.apply(key("held"), 1)
        await eventually(lambda: len(run.calls("bind:held")) == 1)
        (victim,) = it.table.replicas_of(key("held"))
        os.kill(victim.pid, signal.SIGKILL)
        await eventually(lambda: len(run.calls("bind:held")) == 2)
        run.tell("release")
        await it.wait_until_ready(key("held"))
        assert it.listener.failures == []
        (row,) = it.feed.snapshot().replicas
        second_bind_us = run.calls("bind:held")[1][1]
        assert row.restore[1].after_us <= second_bind_us - requested_us
        assert row.restore[1].after_us > run.calls("bind:held")[0][1] - requested_us


async def test_a_replica_that_dies_leaves_the_feed_at_once(run: RunDirectory) -> None:
    """Its socket is removed, its slot is free, and listeners get the state in which it died."""
    async with local(run) as it:
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        (replica,) = it.table.replicas_of(key())
        os.kill(replica.pid, signal.SIGKILL)
        await eventually(lambda: len(it.listener.deaths) == 1)
        assert it.listener.deaths[0].state is ReplicaState.READY
        assert it.feed.snapshot().replicas == ()
        assert replica.runtime_id not in run.sockets()
        assert it.table.live_count(key()) == 0


async def test_an_idle_replica_is_drained_before_it_ends(run: RunDirectory) -> None:
    """Activators are told first, then the runtime. The row leaves the feed when the process is dead."""
    async with local(run) as it:
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        with it.feed.subscribe() as subscription:
            it.apply(key(), 0)
            assert it.feed.snapshot().replicas[0].draining
            assert it.table.live_count(key()) == 0
            await asyncio.sleep(0)
            assert run.calls("drain") == [], "the activator has not received it yet"
            for _ in range(2):
                await subscription.next_line()
                subscription.record_sent()
            await eventually(lambda: len(run.calls("drain")) == 1)
            await eventually(lambda: it.feed.snapshot().replicas == ())
        assert it.listener.deaths[0].state in (ReplicaState.DRAINING, ReplicaState.ENDING)


async def test_busy_replica_finishes_its_requests(run: RunDirectory) -> None:
    """It drains while it has work, then ends."""
    async with local(run) as it:
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        it.apply(key("busy"), 0)
        await eventually(lambda: len(run.calls("drain")) == 1)
        assert it.table.count(ReplicaState.DRAINING) == 1
        assert it.listener.deaths == []
        run.tell("idle")
        await eventually(lambda: len(it.listener.deaths) == 1)


async def test_missed_report_does_not_cut_a_drain(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that computes a long prompt on a loaded core may be slow to answer. Its streams continue."""
    async with local(run) as it:
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        missed = fail_next_reports(monkeypatch, 3)
        it.apply(key("busy"), 0)
        await eventually(lambda: not missed)
        assert it.table.count(ReplicaState.DRAINING) == 1
        run.tell("idle")
        await eventually(lambda: len(it.listener.deaths) == 1)


async def test_a_drain_has_a_deadline(run: RunDirectory) -> None:
    """A replica that never finishes is ended at the deadline."""
    async with local(run, drain_s=0.2) as it:
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        it.apply(key("busy"), 0)
        await eventually(lambda: len(it.listener.deaths) == 1)


async def test_ending_replica_is_killed_after_its_own_drain_time(run: RunDirectory) -> None:
    """A runtime that ignores SIGTERM is killed after `term_s`, which is longer than `KELVIN_RUNTIME_DRAIN_S`."""
    assert load({"KELVIN_DATA": str(run.path), "KELVIN_RUNTIME_DRAIN_S": "120"}).term_s > 120
    run.tell("ignore-term")
    async with local(run, drain_s=0.1, term_s=0.5) as it:
        assert it.actuator.drain_max_s > 0.1 + 0.5, "a successor waits for the slot until the kill"
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        began_s = time.monotonic()
        it.apply(key("busy"), 0)
        await eventually(lambda: len(it.listener.deaths) == 1)
        assert time.monotonic() - began_s >= 0.6
        assert it.listener.deaths[0].state is ReplicaState.ENDING


async def test_version_starts_again_while_its_replica_drains(run: RunDirectory) -> None:
    """A request that arrives during a drain does not wait for the drain's end."""
    async with local(run) as it:
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        it.apply(key("busy"), 0)
        await eventually(lambda: len(run.calls("drain")) == 1)
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        assert it.table.count(ReplicaState.DRAINING) == 1
        run.tell("idle")
        await eventually(lambda: len(it.listener.deaths) == 1)
        assert it.table.ready_count(key("busy")) == 1


async def test_stopping_a_restore_ends_it_without_a_failure(run: RunDirectory) -> None:
    """The process ends, no request fails, and nothing is retried."""
    async with local(run) as it:
        it.apply(key("held"), 1)
        await eventually(lambda: len(run.calls("bind:held")) == 1)
        it.apply(key("held"), 0)
        await eventually(lambda: len(it.listener.deaths) == 1)
        await it.wait_until_parked()
        assert it.listener.failures == []
        assert len(run.calls("bind:held")) == 1
        assert it.table.held_slots == 0


async def test_stop_after_a_lost_process_starts_no_other(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop comes between the loss and the next attempt, during the wait for the dead process."""
    waits, may_go_on, gone = asyncio.Event(), asyncio.Event(), RuntimeProcess.wait_gone

    async def slow(self: RuntimeProcess, timeout_s: float) -> bool:
        if timeout_s == local_module.EXIT_WAIT_S:
            waits.set()
            await may_go_on.wait()
        return await gone(self, timeout_s)

    monkeypatch.setattr(RuntimeProcess, "wait_gone", slow)
    async with local(run) as it:
        await it.wait_until_parked()
        it.apply(key("crash"), 1)
        await waits.wait()
        it.apply(key("crash"), 0)
        may_go_on.set()
        await it.wait_until_parked()
        await eventually(lambda: not it.table.replicas_of(key("crash")), "it is gone")
        assert len(run.calls("bind:crash")) == 1
        assert it.table.live_count(key("crash")) == 0
        assert it.listener.failures == []


async def test_stopped_start_leaves_its_standby_parked(run: RunDirectory) -> None:
    """The standby is parked instead."""
    async with local(run) as it:
        it.apply(key(), 1)
        it.apply(key(), 0)
        assert it.table.held_slots == 0
        await it.wait_until_parked()
        assert run.calls("bind:m") == []


async def test_slots_are_never_exceeded(run: RunDirectory) -> None:
    """Ten replicas are wanted on two slots: two run. Requests of another version fail with `overloaded`."""
    async with local(run, slots=2) as it:
        it.apply(key(), 10)
        await it.wait_until_ready(key(), 2)
        assert it.table.held_slots == 2
        with it.feed.subscribe() as subscription:
            it.apply(key("other"), 1)
            await subscription.next_line()
            line = msgspec.json.decode(await subscription.next_line(), type=Feed)
        assert [failure.code for failure in line.failures] == ["overloaded"]
        assert line.failures[0].message.startswith("this machine is full (limit of device slots: 2)")
        assert it.listener.failures == [], "no restore was tried, so none failed"


async def test_start_without_a_memory_reading_frees_its_slot(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process has no descriptor left for a moment. The version starts afterwards."""
    async with local(run, slots=1) as it:
        await it.wait_until_parked()
        with monkeypatch.context() as patch:
            patch.setattr(CpuShare, "kv_bytes", _no_descriptor)
            it.apply(key(), 1)
            await eventually(lambda: len(it.listener.failures) == 1)
        await eventually(lambda: it.table.held_slots == 0)
        it.apply(key(), 1)
        await it.wait_until_ready(key())


def _no_descriptor(device: CpuShare) -> int:
    raise OSError(errno.EMFILE, "too many open files")


async def test_failure_beside_a_serving_replica_fails_no_request(run: RunDirectory) -> None:
    """Requests of a version that serves do not fail with a second replica's start."""
    async with local(run) as it:
        run.tell("healed")
        it.apply(key("corrupt"), 1)
        await it.wait_until_ready(key("corrupt"))
        (run.path / "healed").unlink()
        with it.feed.subscribe() as subscription:
            await subscription.next_line()
            it.apply(key("corrupt"), 2)
            await eventually(lambda: len(it.listener.failures) == 1)
            assert not subscription._lines
        assert it.listener.failures[0][1].code == "chunk_corrupt"
        assert isinstance(it.listener.failures[0][1], RemoteFailure)


async def test_a_standby_that_dies_is_replaced(run: RunDirectory) -> None:
    """The pool learns of the death from the pidfd, before the next cold start."""
    async with local(run) as it:
        await it.wait_until_parked()
        (standby,) = it.table
        os.kill(standby.pid, signal.SIGKILL)
        await eventually(lambda: standby.runtime_id not in it.table)
        await it.wait_until_parked()
        assert len(run.calls("born")) == 2


async def test_start_without_zygote_fails(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start fails within its time limit. Ready replicas keep serving, and the pool keeps trying."""
    monkeypatch.setattr(local_module, "STANDBY_WAIT_S", 0.3)
    async with local(run, standbys=0) as it:
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        (run.path / "zygote.sock").rename(run.path / "away")
        it.apply(key("other"), 1)
        await eventually(lambda: len(it.listener.failures) == 1)
        assert isinstance(it.listener.failures[0][1], Unavailable)
        assert it.table.ready_count(key()) == 1
        assert it.table.held_slots == 1
        (run.path / "away").rename(run.path / "zygote.sock")
        monkeypatch.undo()
        it.apply(key("other"), 1)
        await it.wait_until_ready(key("other"))


async def test_full_disk_is_the_reason_of_a_start_that_fails(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby without room for its socket or meter page ends and cannot report why. The error still names the full
    disk, and a start works again once there is room.
    """
    monkeypatch.setattr(local_module, "STANDBY_WAIT_S", 2.0)
    monkeypatch.setattr(fleet_module, "PARK_S", 0.2)
    monkeypatch.setattr(os, "posix_fallocate", _no_room)
    async with local(run, standbys=0) as it:
        run.tell("never-park")
        it.apply(key(), 1)
        await eventually(lambda: len(it.listener.failures) == 1)
        failure = it.listener.failures[0][1]
        assert isinstance(failure, StartFailed)
        assert problem_from_failure(failure).message == (
            "no replica could be started: the disk of the data directory is full; free some of it"
        )
        monkeypatch.undo()
        (run.path / "never-park").unlink()
        it.apply(key(), 1)
        await it.wait_until_ready(key())


def _no_room(fd: int, start: int, length: int) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


async def test_start_listeners_get_each_accepted_start(run: RunDirectory) -> None:
    """The call says whether a standby was parked. A refused start is not reported."""
    async with local(run, slots=2) as it:
        starts: list[tuple[str, bool, object]] = []
        it.actuator.add_start_listener(
            lambda which, _, *, parked, wake_level: starts.append((which.model, parked, wake_level))
        )
        await it.wait_until_parked()
        it.apply(key("a"), 1)
        it.apply(key("a"), 1)
        it.apply(key("b"), 1)
        it.apply(key("c"), 1)
        assert starts == [("a", True, None), ("b", False, None)]
        for name in ("a", "b"):
            await it.wait_until_ready(key(name))


class Broken(RecordingListener):
    """A listener that raises in each call."""

    def on_replica_ready(self, replica: Replica) -> None:
        raise ValueError("ready")

    def on_start_failed(self, key: VersionKey, failure: Failure) -> None:
        raise ValueError("failed")

    def on_replica_lost(self, replica: Replica) -> None:
        raise ValueError("lost")

    def starting(self, *_: object, **__: object) -> None:
        raise ValueError("starting")


async def test_defect_of_a_listener_stops_no_other(run: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    """The listener after it still gets the start, the ready replica, the failure and the death."""
    starts: list[VersionKey] = []
    async with local(run) as it:
        broken, sound = Broken(), RecordingListener()
        it.actuator.add_listener(broken)
        it.actuator.add_listener(sound)
        it.actuator.add_start_listener(broken.starting)
        it.actuator.add_start_listener(lambda which, *_, **__: starts.append(which))
        await it.wait_until_parked()
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        (replica,) = it.table.replicas_of(key())
        await eventually(lambda: sound.became_ready)
        os.kill(replica.pid, signal.SIGKILL)
        await eventually(lambda: sound.deaths)
        await it.wait_until_parked()
        it.apply(key("corrupt"), 1)
        await eventually(lambda: sound.failures)
        await eventually(lambda: it.table.held_slots == 0)
        assert starts == [key(), key("corrupt")]
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info and record.exc_info[1]]
    assert {"starting", "ready", "lost", "failed"} <= set(logged)
