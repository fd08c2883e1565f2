"""Runtimes survive the control plane. The next one adopts each in its state and removes what dead ones left. Real
processes.
"""

import asyncio
import errno
import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from controlplane.scaling.local import adopter
from controlplane.scaling.local.adopter import _STATES, probe_runtimes
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from kelvin.contracts.artifacts.runtime_control import RuntimeState
from kelvin.ipc.socket_directory import SocketDirectory
from tests.controlplane.builders import key
from tests.controlplane.machine_fixture import RunDirectory, fail_next_reports, local
from tests.eventually import eventually
from tests.process_state import stop


async def test_running_processes_are_adopted(run: RunDirectory) -> None:
    """A ready replica is in the first snapshot of the feed, a parked standby in the pool. Nothing is restarted."""
    async with local(run, standbys=2) as it:
        await it.wait_until_parked(2)
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        await it.wait_until_parked(2)
        (replica,) = it.table.replicas_of(key())
        before = {each.runtime_id for each in it.table}
    async with local(run, standbys=2) as it:
        (row,) = it.feed.snapshot().replicas
        assert (row.model, row.draining) == ("m", False)
        assert {each.runtime_id for each in it.table} == before
        assert it.pool.parked == 2
        assert [each.pid for each in it.listener.became_ready] == [replica.pid]
        it.check_integrity()
        os.kill(replica.pid, signal.SIGKILL)
        await eventually(lambda: len(it.listener.deaths) == 1, "a death seen by the adopted pidfd")
        assert it.feed.snapshot().replicas == ()


async def test_restore_is_adopted_and_finished(run: RunDirectory) -> None:
    """One control plane binds the replica, and it becomes ready under the next."""
    async with local(run) as it:
        it.apply(key("held"), 1)
        await eventually(lambda: len(run.calls("bind:held")) == 1)
    async with local(run) as it:
        assert it.table.live_count(key("held")) == 1
        assert it.table.ready_count(key("held")) == 0
        it.apply(key("held"), 1)
        run.tell("release")
        await it.wait_until_ready(key("held"))
        assert len(run.calls("bind:held")) == 1, "a restore under way counts as a replica"
        assert it.feed.snapshot().replicas[0].max_streams == 4


async def test_missed_report_does_not_end_a_restore(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that restores a large version may be slow to answer."""
    async with local(run) as it:
        it.apply(key("held"), 1)
        await eventually(lambda: len(run.calls("bind:held")) == 1)
    missed = fail_next_reports(monkeypatch, 3)
    async with local(run) as it:
        await eventually(lambda: not missed)
        run.tell("release")
        await it.wait_until_ready(key("held"))
        assert it.listener.failures == []


async def test_adopted_drain_continues(run: RunDirectory) -> None:
    """A draining replica continues to drain and gets no new requests."""
    async with local(run) as it:
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        it.apply(key("busy"), 0)
        await eventually(lambda: len(run.calls("drain")) == 1)
    async with local(run) as it:
        assert [row.draining for row in it.feed.snapshot().replicas] == [True]
        run.tell("idle")
        await eventually(lambda: len(it.listener.deaths) == 1)


async def test_a_replica_of_an_unknown_version_is_drained(run: RunDirectory) -> None:
    """A version that the registry does not know is not served."""
    async with local(run) as it:
        it.apply(key(), 1)
        await it.wait_until_ready(key())
    async with local(run, known=lambda _: False) as it:
        await eventually(lambda: len(it.listener.deaths) == 1)
        assert it.feed.snapshot().replicas == ()


async def test_restoring_replica_of_an_unknown_version_is_ended(run: RunDirectory) -> None:
    """It never serves, even if its restore succeeds."""
    async with local(run) as it:
        it.apply(key("held"), 1)
        await eventually(lambda: len(run.calls("bind:held")) == 1)
    async with local(run, known=lambda _: False) as it:
        run.tell("release")
        await eventually(lambda: len(it.listener.deaths) == 1)
        assert it.listener.became_ready == []


async def test_surplus_standbys_are_ended(run: RunDirectory) -> None:
    """A smaller pool adopts only as many as it needs."""
    async with local(run, standbys=3) as it:
        await it.wait_until_parked(3)
    async with local(run, standbys=1) as it:
        await eventually(lambda: sum(1 for _ in it.table) == 1)
        await it.wait_until_parked(1)


async def test_a_dead_runtimes_socket_is_removed(run: RunDirectory) -> None:
    """A runtime that died between two control planes leaves a socket. The next one removes it."""
    async with local(run) as it:
        await it.wait_until_parked()
        pid = next(iter(it.table)).pid
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert len(run.sockets()) == 1
    async with local(run, standbys=0) as it:
        assert list(it.table) == []
        assert run.sockets() == set()


async def test_directory_with_a_socket_name_is_left_alone(tmp_path: Path) -> None:
    """Connecting to it is refused, as for a socket without a listener. A plain file of that name is removed."""
    (tmp_path / "rt-directory.sock").mkdir()
    (tmp_path / "rt-file.sock").touch()
    with closing(SocketDirectory(tmp_path)) as directory:
        assert await probe_runtimes(directory) == []
    assert [path.name for path in tmp_path.iterdir()] == ["rt-directory.sock"]


async def test_unremovable_socket_stops_no_survey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is read-only for a while. Control: the next survey removes the file."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "rt-file.sock").touch()
    with closing(SocketDirectory(tmp_path)) as directory:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", fail)
            assert await probe_runtimes(directory) == []
        assert (tmp_path / "rt-file.sock").exists()
        assert await probe_runtimes(directory) == []
    assert not (tmp_path / "rt-file.sock").exists()


async def test_late_forked_standby_is_adopted(run: RunDirectory) -> None:
    """The zygote forked, but answered after the time-out. The next sweep adopts the standby, once."""
    async with local(run) as it:
        await it.wait_until_parked()
        born = await it.fleet._zygote.fork("rlate", 5.0)
        os.close(born.pidfd)
        await eventually(lambda: "rlate" in run.sockets())
        (parked,) = [each.runtime_id for each in it.table]
        os.kill(it.table[parked].pid, signal.SIGKILL)
        await eventually(lambda: parked not in it.table)
        assert await it.adopter.sweep() == 1
        assert await it.adopter.sweep() == 0
        assert it.table["rlate"].pid == born.pid
        it.check_integrity()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(errno.EMFILE, "too many open files"), id="this process has no descriptor left"),
        pytest.param(BlockingIOError(errno.EAGAIN, "try again"), id="the runtime's backlog is full"),
        pytest.param(TimeoutError("timed out"), id="the runtime does not accept in time"),
        pytest.param(PermissionError(errno.EACCES, "permission denied"), id="the socket may not be connected to"),
    ],
)
async def test_runtime_that_cannot_be_asked_keeps_its_socket(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """Only a refused connection proves that there is no listener. The next sweep finds the runtime."""
    async with local(run) as it:
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        (replica,) = it.table.replicas_of(key())
    connect = SocketDirectory.connect

    def failing(directory: SocketDirectory, name: str, timeout_s: float) -> socket.socket:
        if replica.runtime_id in name:
            raise error
        return connect(directory, name, timeout_s=timeout_s)

    monkeypatch.setattr(SocketDirectory, "connect", failing)
    async with local(run) as it:
        monkeypatch.undo()
        assert replica.runtime_id in run.sockets()
        await it.adopter.sweep()
        assert [each.runtime_id for each in it.table.replicas_of(key())] == [replica.runtime_id]


async def test_full_backlog_blocks_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process has a full backlog. The survey blocks neither the loop nor a thread, which forks and backups
    need. Control: the socket stays.
    """

    async def take_a_thread(*_: object) -> None:
        raise AssertionError("a thread waits for it")

    monkeypatch.setattr(asyncio, "to_thread", take_a_thread)
    with closing(SocketDirectory(tmp_path)) as directory, socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "rt-stopped.sock"))
        stopped.listen(0)
        with closing(directory.connect("rt-stopped.sock")):
            began_s = time.monotonic()
            assert await probe_runtimes(directory) == []
            assert time.monotonic() - began_s < 0.5
    assert (tmp_path / "rt-stopped.sock").exists()


async def test_silent_runtime_is_left_for_the_next_sweep(run: RunDirectory) -> None:
    """A silent process may be computing a long prompt on a loaded core. The supervisor's watchdog kills one that hangs.
    Until then it holds its device slot, so the slot is never given away twice.
    """
    async with local(run, standbys=0, slots=1) as it:
        it.apply(key(), 1)
        await it.wait_until_ready(key())
        (replica,) = it.table.replicas_of(key())
    stop(replica.pid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adopter, "PROBE_S", 0.1)
        async with local(run, standbys=0, slots=1) as it:
            assert it.table.replicas_of(key()) == ()
            assert (it.table.held_slots, it.table.leaving_count()) == (1, 1)
            it.apply(key("n"), 1)
            assert it.table.live_count(key("n")) == 0
            os.kill(replica.pid, signal.SIGCONT)
            patch.undo()
            assert await it.adopter.sweep() == 1
            assert [each.runtime_id for each in it.table.replicas_of(key())] == [replica.runtime_id]
            assert it.table.ready_count(key()) == 1
            assert (it.table.held_slots, it.table.leaving_count()) == (1, 0)


async def test_report_of_another_pid_is_ignored(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says which process listens. A report with another pid never leads to a signal to that pid."""
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: b"\1\0\0\0" + bytes(8))
    killed: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda fd, number: killed.append(number))

    async with local(run, standbys=0) as it:
        await it.fleet.fork_standby()
        directory = SocketDirectory(run.path)
        assert await probe_runtimes(directory) == []
        directory.close()
        assert killed == [signal.SIGKILL]


def test_every_runtime_state_is_adoptable() -> None:
    """This fails for a new state of the contract until the adopter handles it."""
    assert set(_STATES) == set(RuntimeState)
    assert set(_STATES.values()) <= set(ReplicaState)
