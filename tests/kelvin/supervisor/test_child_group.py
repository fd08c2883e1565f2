"""A dead child process is restarted, even if the system first refuses it. Only the reaper sees deaths."""

import asyncio
import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

import pytest

from kelvin.contracts.artifacts.runtime_control import ParkedSpec, Pod
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process import procfs
from kelvin.supervisor import child_group as subject
from kelvin.supervisor import engine_supervisor
from kelvin.supervisor.child_group import (
    Child,
    ChildGroup,
    ChildSpec,
    ReapedChild,
    call_on_deaths,
    children,
    log_exit,
    reap_children,
)
from kelvin.supervisor.exit_recorder import ExitRecorder
from kelvin.supervisor.installation_supervisor import Supervisor
from kelvin.supervisor.pod_supervisor import PodSupervisor
from kelvin.supervisor.settings import EngineSettings, PodSettings, UpSettings
from tests.eventually import eventually
from tests.virtual_loop import run_virtually

PID: Final = 4_000_000  # larger than any process id that the kernel assigns
Supervised = tuple[ChildGroup, Child]  # the group that reaps deaths, and one child of it


class Process:
    """A process with the attributes that a child uses."""

    pid = PID
    returncode: int | None = None


def _up(data: Path) -> Supervised:
    no_directory, no_recorder = cast(SocketDirectory, None), cast(ExitRecorder, None)
    supervisor = Supervisor(UpSettings(data, 1, "", 1, 1), no_directory, no_recorder, 0, None)
    return supervisor.group, supervisor.group.members[-1]


def _engine(data: Path) -> Supervised:
    supervisor = engine_supervisor.EngineSupervisor(
        EngineSettings(data, "file:///store"), cast(SocketDirectory, None), 0, asyncio.Event()
    )
    return supervisor.group, supervisor.group.members[-1]


def _pod(data: Path) -> Supervised:
    parked = ParkedSpec(device_class="cpu-1", threads=1, kv_bytes=1, store="file:///store")
    settings = PodSettings(data, 1, {}, Pod(runtime_id="r", host="", port=1, parked=parked))
    pod = PodSupervisor(settings, cast(ExitRecorder, None), 0)
    return pod.group, pod.group.members[0]


@pytest.mark.parametrize("supervised", [_up, _engine, _pod])
def test_a_start_that_the_system_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervised: Callable[[Path], Supervised]
) -> None:
    """Each supervisor retries a refused start with growing pauses, as after a death, and stops once it succeeds."""
    tried_s: list[float] = []
    dead = ReapedChild(PID, -signal.SIGKILL, 1, 1, 1, 1)

    def start(child: Child, *_: object) -> None:
        tried_s.append(asyncio.get_running_loop().time())
        if len(tried_s) < 4:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        child.process = cast(None, Process())

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(subject, "reap_children", lambda: iter([dead]))

    async def main() -> Child:
        group, child = supervised(tmp_path)
        child.process = cast(None, Process())
        group.reap_dead()
        assert child.pid is None
        await asyncio.sleep(60)
        return child

    child = run_virtually(main())
    assert tried_s == pytest.approx([0.0, 0.2, 0.6, 1.4])
    assert (child.pid, child.restarts.deaths) == (PID, 4)


@pytest.mark.parametrize(
    ("status", "is_expected", "level"),
    [
        pytest.param(0, True, logging.INFO, id="told to end"),
        pytest.param(-signal.SIGTERM, True, logging.INFO, id="told to end before it could handle the signal"),
        pytest.param(-signal.SIGKILL, True, logging.WARNING, id="killed while it was to end"),
        pytest.param(1, True, logging.WARNING, id="failed while it was to end"),
        pytest.param(0, False, logging.WARNING, id="ended by itself"),
    ],
)
def test_only_an_unexpected_end_is_a_warning(
    caplog: pytest.LogCaptureFixture, status: int, is_expected: bool, level: int
) -> None:
    """An ordinary stop of an installation logs no warning."""
    with caplog.at_level(logging.INFO):
        log_exit(Child(ChildSpec("cache", "weightcache", None)), status, is_expected=is_expected)
    assert [record.levelno for record in caplog.records] == [level]


@pytest.mark.virtual_time
async def test_unwanted_child_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain that begins between two attempts, or before the first, stops restarts."""
    child, tried = Child(ChildSpec("cache", "weightcache", None)), []

    def spawn(each: Child) -> None:
        tried.append(each)
        group.stop_restarts()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(subject, "reap_children", lambda: iter([ReapedChild(PID, 1, 1, 1, 1, 1)]))
    group = ChildGroup([child], spawn, lambda *_: None)

    for _ in range(2):
        child.process = cast(None, Process())
        group.reap_dead()
        await asyncio.sleep(60)
    assert tried == [child]


SLEEPS: Final = "import threading; print(flush=True); threading.Event().wait()"
STUBBORN: Final = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        pytest.param(SLEEPS, -signal.SIGTERM, id="it ends on SIGTERM"),
        pytest.param(STUBBORN, -signal.SIGKILL, id="it ignores SIGTERM and is killed"),
    ],
)
async def test_ended_child_leaves_its_group(text: str, status: int) -> None:
    """The child has ended and left the group when `end` returns, and isn't restarted. Another child lives on."""
    deaths: list[tuple[int, Child]] = []

    def spawn(child: Child) -> None:
        child.process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
        assert child.process.stdout is not None
        with child.process.stdout as ready:
            ready.readline()

    def died(reaped: ReapedChild, child: Child | None) -> None:
        if child is not None:  # an earlier test may have left children
            deaths.append((reaped.status, child))

    ending, other = (Child(ChildSpec(name, name, None)) for name in ("cache", "zygote"))
    group = ChildGroup([ending, other], spawn, died)
    group.start_all()
    await group.end([ending], 0.5)
    assert (ending.pid, group.members, deaths) == (None, [other], [(status, ending)])
    assert other.pid in children()
    await group.end([other], 0.5)
    assert deaths[1:] == [(status, other)]


def test_death_that_cannot_be_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the supervisor has no free descriptor, it retries, because no later event would report the death."""
    monkeypatch.setattr(subject, "RETRY_S", 0.01)
    collected: list[int] = []
    refused = [True]

    def start_time_ns(pid: int) -> int:
        if refused:
            refused.pop()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return procfs.start_time_ns(pid)

    monkeypatch.setattr(subject, "start_time_ns", start_time_ns)

    async def main() -> int:
        call_on_deaths(lambda: collected.extend(each.pid for each in reap_children()))
        child = await asyncio.to_thread(subprocess.Popen, ["true"])
        await eventually(lambda: child.pid in collected)
        child.returncode = 0
        return child.pid

    assert asyncio.run(main()) in collected
    assert not refused


def test_thread_that_has_ended_hides_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may end while children are listed. The others are still listed."""
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [str(PID), *listed(path)])
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in children()
        child.kill()


def test_signal_does_not_reap_a_dead_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the signal reaped a child that just died, the reaper would never see its death."""
    child = Child(ChildSpec("cache", "weightcache", None))
    child.process = subprocess.Popen(["true"])
    pid, waitid = child.process.pid, os.waitid
    waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # wait until it is dead
    monkeypatch.setattr(os, "waitid", lambda _, __, options: waitid(os.P_PID, pid, options))  # reap only this child
    child.signal(signal.SIGTERM)
    (reaped,) = reap_children()
    assert (reaped.pid, reaped.status) == (pid, 0)
    child.mark_reaped(reaped.status)
    child.signal(signal.SIGTERM)
    assert child.pid is None
