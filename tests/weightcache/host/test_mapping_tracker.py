"""Who may see a slab is asked of the kernel: mapped, open, neither; in doubt it may. The loop does not wait for it."""

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
print("there", flush=True)
sys.stdin.readline()
"""


@contextmanager
def child(fd: int, *does: str) -> Iterator[subprocess.Popen[str]]:
    """A process that was given the memory file, and does so with it."""
    command = [sys.executable, "-c", CHILD, str(fd), *does]
    process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
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
    ("does", "want"),
    [
        pytest.param(("map",), True, id="mapped, its descriptor closed"),
        pytest.param(("open",), True, id="open, not mapped"),
        pytest.param((), False, id="neither"),
    ],
)
def test_mapping_is_found_by_inode(memory: int, does: tuple[str, ...], want: bool) -> None:
    """Another file of the same kind is not this one."""
    other = os.memfd_create("slab")
    try:
        with child(memory, *does) as process:
            assert _has_mapping(process.pid, [os.fstat(memory).st_ino]) is want
            assert not _has_mapping(process.pid, [os.fstat(other).st_ino])
            assert not _has_mapping(process.pid, [])
    finally:
        os.close(other)


def test_unknown_process_counts_as_mapping(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail closed: a process that may not be looked at, and one that is not there, leave the slab where it is."""
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
    """Asked in a thread, it answers when it is told to."""

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
    """This very process has hung up its only lease, and the kernel has not answered yet."""

    kernel: Kernel
    table: MappingTracker
    holder: Holder
    forgotten: list[int]

    async def answered(self, *, count: int) -> None:
        """The kernel has said its word, and the table heard it."""
        self.kernel.answers.set()
        await eventually(lambda: self.table.count == count and not self.table.pending_checks)


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
        holder.lend(MappingProxyType({}))
        table.note_lease_end(holder, [1])
        yield Scene(kernel, table, holder, forgotten)


async def test_the_loop_does_not_wait_for_the_kernel(kernel: Kernel) -> None:
    """It turns while a thread asks; then the process is forgotten, or known as before."""

    for kernel.sees in (True, False):
        kernel.asked.clear()
        kernel.answers.clear()
        with hung_up(kernel) as scene:
            await eventually(kernel.asked.is_set)
            assert (scene.table.count, scene.forgotten) == (1, [])
            await scene.answered(count=int(kernel.sees))
            assert scene.forgotten == ([] if kernel.sees else [scene.holder.number])
            await scene.table.close()
    assert threading.current_thread().name not in kernel.threads


async def test_lease_during_a_check_keeps_the_process(kernel: Kernel) -> None:
    """The answer is of before: a process that was sent slabs since, and hung up again, is asked about anew."""

    with hung_up(kernel) as scene:
        scene.holder.lend(MappingProxyType({}))
        await scene.answered(count=1)
        assert scene.forgotten == []
        scene.table.note_lease_end(scene.holder, [1])
        await scene.answered(count=0)
        await scene.table.close()


async def test_process_with_a_new_lease_stays_tracked(kernel: Kernel) -> None:
    """Also where it was granted before the answer came; nobody asks while it has one."""

    with hung_up(kernel) as scene:
        ended = asyncio.Event()
        scene.holder.leases.add(ended)
        await scene.answered(count=1)
        asked = len(kernel.threads)
        scene.table.note_lease_end(scene.holder, [1])
        assert not scene.table.pending_checks
        assert len(kernel.threads) == asked
        await scene.table.close()


async def test_closed_while_the_kernel_is_asked(kernel: Kernel) -> None:
    """No task is left, nobody is forgotten a second time, and no descriptor stays open."""
    descriptors, tasks = len(os.listdir("/proc/self/fd")), asyncio.all_tasks()
    with hung_up(kernel) as scene:
        await eventually(kernel.asked.is_set)
        await scene.table.close()
        assert (scene.table.pending_checks, scene.forgotten) == (0, [])
        kernel.answers.set()
    assert asyncio.all_tasks() == tasks
    assert len(os.listdir("/proc/self/fd")) <= descriptors
