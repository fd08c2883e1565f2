"""The kernel is asked which processes may see a slab: a process that maps it or has it open, or an unknown one, may.

The event loop does not wait for the answer.
"""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.eventually import eventually
from weightcache.host import mapping_tracker
from weightcache.host.mapping_tracker import Holder, MappingTracker, _has_mapping

BYTES = 4096
CHILD = """
import mmap, os, sys
fd = int(sys.argv[1])
if "map" in sys.argv:
    mapped = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
if "open" not in sys.argv:
    os.close(fd)
    if "map" in sys.argv:
        os.closerange(3, 64)  # the module's own duplicate, too
print("ready", flush=True)
sys.stdin.readline()
"""


@contextmanager
def child(fd: int, *actions: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that gets the memory file and maps it, keeps it open, both or neither."""
    command = [sys.executable, "-c", CHILD, str(fd), *actions]
    process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("slab")
    os.ftruncate(fd, BYTES)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("actions", "want"),
    [
        pytest.param(("map",), True, id="mapped, its descriptor closed"),
        pytest.param(("open",), True, id="open, not mapped"),
        pytest.param((), False, id="neither"),
    ],
)
def test_mapping_is_found_by_inode(memory: int, actions: tuple[str, ...], want: bool) -> None:
    """A mapping or descriptor is found by the file's inode, and other memory files are ignored."""
    other = os.memfd_create("slab")
    try:
        with child(memory, *actions) as process:
            assert _has_mapping(process.pid, [os.fstat(memory).st_ino]) is want
            assert not _has_mapping(process.pid, [os.fstat(other).st_ino])
            assert not _has_mapping(process.pid, [])
    finally:
        os.close(other)


def test_unknown_process_counts_as_mapping(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail closed: a process that may not be read, and one that has died, count as mapping the slab."""
    with child(memory) as process:
        process.kill()
        process.communicate(timeout=30)
        assert _has_mapping(process.pid, [os.fstat(memory).st_ino])

    def forbidden(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    with child(memory) as process:
        monkeypatch.setattr(Path, "read_bytes", forbidden)
        assert _has_mapping(process.pid, [os.fstat(memory).st_ino])


@dataclass
class Kernel:
    """A fake kernel that is called in a thread and answers when `answers` is set."""

    sees: bool = False
    asked: threading.Event = field(default_factory=threading.Event)
    answers: threading.Event = field(default_factory=threading.Event)
    threads: list[str] = field(default_factory=list)

    def may_see(self, pid: int, inodes: Collection[int]) -> bool:
        self.threads.append(threading.current_thread().name)
        self.asked.set()
        assert self.answers.wait(30)
        return self.sees


@dataclass
class Scene:
    """A tracker of this process, which has ended its only lease. The kernel has not answered yet."""

    kernel: Kernel
    table: MappingTracker
    holder: Holder
    forgotten: list[int]

    async def answered(self, *, count: int) -> None:
        """Let the kernel answer, and wait until the tracker has `count` processes and no pending checks."""
        self.kernel.answers.set()
        await eventually(lambda: self.table.holder_count == count and not self.table.pending_checks)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel()
    monkeypatch.setattr(mapping_tracker, "_has_mapping", kernel.may_see)
    yield kernel
    kernel.answers.set()


@contextmanager
def hung_up(kernel: Kernel) -> Iterator[Scene]:
    forgotten: list[int] = []
    table = MappingTracker(forgotten.append)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        holder = table.track_process(ours)
        holder.record_lent(MappingProxyType({}))
        table.note_lease_end(holder, [1])
        yield Scene(kernel, table, holder, forgotten)


async def test_the_loop_does_not_wait_for_the_kernel(kernel: Kernel) -> None:
    """The loop runs while a thread asks the kernel. Then the process is forgotten, or kept if it has a mapping."""

    for kernel.sees in (True, False):
        kernel.asked.clear()
        kernel.answers.clear()
        with hung_up(kernel) as scene:
            await eventually(kernel.asked.is_set)
            assert (scene.table.holder_count, scene.forgotten) == (1, [])
            await scene.answered(count=int(kernel.sees))
            assert scene.forgotten == ([] if kernel.sees else [scene.holder.number])
            await scene.table.close()
    assert threading.current_thread().name not in kernel.threads


async def test_lease_during_a_check_keeps_the_process(kernel: Kernel) -> None:
    """A check that began before a new lease does not end it. After the next lease end the process is checked again."""

    with hung_up(kernel) as scene:
        scene.holder.record_lent(MappingProxyType({}))
        await scene.answered(count=1)
        assert scene.forgotten == []
        scene.table.note_lease_end(scene.holder, [1])
        await scene.answered(count=0)
        await scene.table.close()


async def test_process_with_a_new_lease_stays_tracked(kernel: Kernel) -> None:
    """A process with a lease is kept, even if the kernel sees no mapping, and is not checked while it has one."""

    with hung_up(kernel) as scene:
        ended = asyncio.Event()
        scene.holder.leases.add(ended)
        await scene.answered(count=1)
        asked = len(kernel.threads)
        scene.table.note_lease_end(scene.holder, [1])
        assert not scene.table.pending_checks
        assert len(kernel.threads) == asked
        await scene.table.close()


async def test_close_during_a_check_leaves_nothing_behind(kernel: Kernel) -> None:
    """Closing the tracker during a check leaves no task or descriptor, and reports nothing as forgotten."""
    descriptors, tasks = len(os.listdir("/proc/self/fd")), asyncio.all_tasks()
    with hung_up(kernel) as scene:
        await eventually(kernel.asked.is_set)
        await scene.table.close()
        assert (scene.table.pending_checks, scene.forgotten) == (0, [])
        kernel.answers.set()
    assert asyncio.all_tasks() == tasks
    assert len(os.listdir("/proc/self/fd")) <= descriptors
