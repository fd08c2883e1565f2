"""Only the agent can write slabs, spare slabs are made ahead, and tenants never share bytes."""

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import pytest

from kelvin.contracts.errors import Refused
from tests.eventually import eventually
from weightcache.client import libc
from weightcache.host.slab_pool import Slab, SlabPool

HUGE = 2 << 20


@contextmanager
def slab_of(length: int = HUGE) -> Iterator[Slab]:
    slab = Slab(length)
    try:
        yield slab
    finally:
        slab.close()


def map_writable(fd: int) -> None:
    mmap.mmap(fd, HUGE, prot=mmap.PROT_READ | mmap.PROT_WRITE).close()


def reopen_and_map(fd: int) -> None:
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        map_writable(again)
    finally:
        os.close(again)


def write_to_descriptor(fd: int) -> None:
    os.pwrite(fd, b"x", 0)


def shrink(fd: int) -> None:
    os.ftruncate(fd, 0)


def grow(fd: int) -> None:
    os.ftruncate(fd, 2 * HUGE)


def punch_a_hole(fd: int) -> None:
    keep_size, punch_hole = 1, 2
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    if fallocate(fd, keep_size | punch_hole, ctypes.c_long(0), ctypes.c_long(4096)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def add_a_seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def make_writable(fd: int) -> None:
    address = libc.reserve(HUGE)
    try:
        libc.map_shared(address, HUGE, fd, 0, writable=False)
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        if mprotect(ctypes.c_void_p(address), ctypes.c_size_t(HUGE), libc.PROT_READ_WRITE) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    finally:
        libc.unmap(address, HUGE)


def discard_pages(fd: int) -> None:
    madv_remove = 9
    address = libc.reserve(HUGE)
    try:
        libc.map_shared(address, HUGE, fd, 0, writable=False)
        libc.advise(address, HUGE, madv_remove)
    finally:
        libc.unmap(address, HUGE)


ATTEMPTS = [
    pytest.param(map_writable, id="map it writable"),
    pytest.param(reopen_and_map, id="open it again and map that writable"),
    pytest.param(write_to_descriptor, id="write to the descriptor"),
    pytest.param(shrink, id="shrink it"),
    pytest.param(grow, id="grow it"),
    pytest.param(punch_a_hole, id="punch a hole"),
    pytest.param(add_a_seal, id="add a seal that would stop the agent"),
    pytest.param(make_writable, id="make a read-only mapping writable"),
    pytest.param(discard_pages, id="discard its pages"),
]


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_receiver_of_a_slab_can_not_change_it(attempt: Callable[[int], None]) -> None:
    """A process that has the descriptor can't change a byte, while the agent's own mapping still writes."""
    with slab_of() as slab:
        slab.view(0, 5)[:] = b"bytes"
        with pytest.raises(OSError, match=r".") as refused:
            attempt(slab.fd)
        assert refused.value.errno in (errno.EPERM, errno.EACCES)
        assert bytes(slab.view(0, 5)) == b"bytes"
        slab.view(0, 5)[:] = b"again"
        with mmap.mmap(slab.fd, HUGE, prot=mmap.PROT_READ) as seen:
            assert seen[:5] == b"again"


@pytest.mark.parametrize("attempt", [a for a in ATTEMPTS if a.values[0] is not add_a_seal])
def test_receiver_control(attempt: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the seals each of these attempts succeeds."""
    monkeypatch.setattr(libc, "SLAB_SEALS", 0)
    with slab_of() as slab:
        attempt(slab.fd)
        os.ftruncate(slab.fd, HUGE)  # closing unmaps its whole length


def test_slab_works_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel refuses huge pages, the slab reports so and works."""
    real = libc.advise

    def refusing(address: int, length: int, advice: int) -> None:
        if advice == libc.MADV_COLLAPSE:
            raise OSError(errno.EINVAL, "no such advice")
        real(address, length, advice)

    monkeypatch.setattr(libc, "advise", refusing)
    with slab_of() as slab:
        assert not slab.huge
        assert os.fstat(slab.fd).st_blocks * 512 == HUGE, "populated all the same"
        slab.view(0, 1)[0] = 7


def test_failed_slab_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "none")

    monkeypatch.setattr(libc, "map_shared", refusing)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="none"):
        Slab(HUGE)
    assert len(os.listdir("/proc/self/fd")) <= before


@asynccontextmanager
async def open_pool(
    make: Callable[[int], Slab] = Slab, limit: int = 2, spare: int = 1, at_once: int = 1, quiet_s: float = 0.0
) -> AsyncIterator[SlabPool]:
    with ThreadPoolExecutor(at_once) as executor:
        pool = SlabPool(HUGE, limit, executor, make, spare=spare, at_once=at_once, quiet_s=quiet_s)
        try:
            yield pool
        finally:
            await pool.close()


async def wait_until_free(pool: SlabPool, count: int) -> None:
    """Wait until `count` slabs are free."""
    await eventually(lambda: pool.counts["free"] == count)


async def test_pool_makes_ahead_and_stops_at_its_limit() -> None:
    """A spare is made when one is taken, never beyond the limit. A taker over the limit waits for a return."""

    async with open_pool() as pool:
        first = await pool.acquire("a", 10)
        second = await pool.acquire("a", 10)
        assert first is not second
        third = asyncio.create_task(pool.acquire("a", 10))
        await asyncio.sleep(0)
        assert not third.done()
        pool.release(first)
        assert await third is first
        assert pool.counts["used"] == 2


async def test_a_slab_that_comes_back_to_a_closed_pool_is_let_be() -> None:
    """A slab that is given back after the pool closed is unmapped already, and nothing happens."""

    async with open_pool() as pool:
        slab = await pool.acquire("a", 10)
        await pool.close()
        pool.release(slab)
        assert pool.counts == {"used": 0, "free": 0, "huge": 0}


async def test_pool_keeps_a_spare() -> None:
    """`spare` slabs are made in the background, one after another, never beyond the limit."""

    async with open_pool(limit=4, spare=3, quiet_s=0.0) as pool:
        pool.ensure_spare()
        await wait_until_free(pool, 3)
        await pool.acquire("a", 10)
        await pool.acquire("a", 10)
        await wait_until_free(pool, 2)
        assert pool.counts["used"] == 2


async def test_pool_waits_for_quiet() -> None:
    """For `quiet_s` after a take no spares are made, because the restore may still run. Waiting takers are served."""

    async with open_pool(limit=8, spare=2, quiet_s=3600.0) as pool:
        pool.ensure_spare()
        await wait_until_free(pool, 2)
        for _ in range(3):
            await pool.acquire("a", 10)
        assert pool.counts == {"used": 3, "free": 0, "huge": pool.counts["huge"]}


async def test_pool_makes_several_at_once_for_those_who_wait() -> None:
    """Slabs for two waiting takers are made at the same time: the barrier needs both."""
    both = threading.Barrier(2, timeout=30)

    def make(length: int) -> Slab:
        both.wait()
        return Slab(length)

    async with open_pool(make, limit=2, at_once=2) as pool:
        first, second = await asyncio.gather(pool.acquire("a", 20), pool.acquire("a", 20))
        assert first is not second


async def test_pool_zeroes_between_tenants() -> None:
    """The next tenant gets zero bytes. The same tenant gets its slab back without zeroing."""

    async with open_pool(limit=1) as pool:
        slab = await pool.acquire("a", 10)
        slab.view(HUGE - 6, 6)[:] = b"secret"
        pool.release(slab)
        assert await pool.acquire("a", 10) is slab
        assert bytes(slab.view(HUGE - 6, 6)) == b"secret"
        pool.release(slab)
        assert await pool.acquire("b", 10) is slab
        assert bytes(slab.view(0, HUGE)) == bytes(HUGE)


async def test_cancelled_taker_leaves_the_slab_to_the_next() -> None:
    """A taker that is cancelled while its slab is being zeroed leaves the slab to the next taker."""

    async with open_pool(limit=1) as pool:
        slab = await pool.acquire("a", 10)
        slab.view(0, 6)[:] = b"secret"
        pool.release(slab)
        taking = asyncio.create_task(pool.acquire("b", 10))
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert await pool.acquire("c", 10) is slab
        assert bytes(slab.view(0, 6)) == bytes(6)


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "none"), MemoryError()])
async def test_failed_slab_is_retried_for_the_next_taker(error: Exception) -> None:
    """If a slab can't be made, the taker is refused, and the next one tries again."""
    failing = [True]

    def make(length: int) -> Slab:
        if failing.pop():
            raise error
        return Slab(length)

    async with open_pool(make) as pool, asyncio.timeout(5.0):
        with pytest.raises(Refused, match="memory for the weight cache"):
            await pool.acquire("a", 10)
        failing.append(False)
        failing.append(False)
        assert (await pool.acquire("a", 10)).length == HUGE


async def test_waiting_for_a_slab_times_out() -> None:
    async with open_pool(limit=1) as pool:
        await pool.acquire("a", 10)
        with pytest.raises(Refused, match="memory for the weight cache"):
            await pool.acquire("a", 0.01)
