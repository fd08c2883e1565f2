"""Slabs: sealed shared memory that only the agent can write, and that any process can be given to read.

They are made in advance in the background, because allocating memory takes longer than the reads that fill it. The
index decides which chunk goes where.
"""

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final

from kelvin.contracts.errors import Refused, Unavailable
from weightcache.client import libc
from weightcache.client.lease_protocol import HUGE_PAGE
from weightcache.host.policy.pool_sizes import SlabCounts, slabs_to_make

log = logging.getLogger(__name__)

QUIET_S: Final = 1.0


class Slab:
    """`length` bytes of zeroed memory, in huge pages if the kernel grants them. Making one blocks for 20 to 700 ms."""

    def __init__(self, length: int) -> None:
        assert length % HUGE_PAGE == 0
        self.length = length
        self.tenant: str | None = None  # the tenant whose bytes may be in it
        self.fd = os.memfd_create("kelvin-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.address = 0
        try:
            os.ftruncate(self.fd, length)
            self.address = libc.reserve(length)
            libc.map_shared(self.address, length, self.fd, 0, writable=True)
            self.huge = _populate(self.address, length)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, libc.SLAB_SEALS)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Slab {self.length >> 20} MiB huge={self.huge} tenant={self.tenant}>"

    def view(self, offset: int, length: int) -> memoryview:
        """Return writable bytes. They are invalid once the slab is closed."""
        assert 0 <= offset <= offset + length <= self.length
        return libc.view(self.address + offset, length)

    def zero(self) -> None:
        """Erase the bytes, which must not reach another tenant. Blocking."""
        libc.zero(self.address, self.length)
        self.tenant = None

    def close(self) -> None:
        """Unmap and close the slab in this process. Other processes keep their mappings."""
        if self.address:
            libc.unmap(self.address, self.length)
            self.address = 0
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _populate(address: int, length: int) -> bool:
    """Back the range with memory. Return True if all of it is huge pages.

    One small page per huge page is enough for a collapse, which then has nothing to copy. This is 40 times faster than
    collapsing a populated range. MADV_HUGEPAGE is ignored if `shmem_enabled` is `never`, the default.
    """
    huge = True
    try:
        for offset in range(0, length, HUGE_PAGE):
            libc.advise(address + offset, 4096, libc.MADV_POPULATE_WRITE)
        libc.advise(address, length, libc.MADV_COLLAPSE)
    except OSError as error:
        log.info("no huge pages for a slab", extra={"error": str(error)})
        huge = False
    with suppress(OSError):  # older kernels populate pages at first access
        libc.advise(address, length, libc.MADV_POPULATE_WRITE)
    return huge


class SlabPool:
    """A pool of up to `limit` slabs, `spare` of them made in advance. `close` ends all.

    `executor` has `at_once` threads. Acquired slabs are replaced after `quiet_s` without an `acquire`: making slabs
    should not share the cores with a running restore.
    """

    def __init__(
        self,
        slab_bytes: int,
        limit: int,
        executor: Executor,
        make: Callable[[int], Slab] = Slab,
        *,
        spare: int = 1,
        at_once: int = 1,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._slab_bytes = slab_bytes
        self._limit = limit
        self._executor = executor
        self._make = make
        self._spare = spare
        self._at_once = at_once
        self._quiet_s = quiet_s
        self._free: list[Slab] = []
        self._acquired: set[Slab] = set()
        self._making: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._refill_timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._last_error: Exception | None = None

    def __repr__(self) -> str:
        return f"<SlabPool out={len(self._acquired)} free={len(self._free)} limit={self._limit}>"

    @property
    def counts(self) -> dict[str, int]:
        """Return the numbers of slabs by state."""
        slabs = [*self._free, *self._acquired]
        return {"used": len(self._acquired), "free": len(self._free), "huge": sum(slab.huge for slab in slabs)}

    async def acquire(self, tenant: str, timeout_s: float) -> Slab:
        """Return a slab without another tenant's bytes. Raises `Refused(Unavailable)` if there is no memory in time."""
        try:
            async with asyncio.timeout(timeout_s):
                slab = await self._wait_for_slab(tenant)
        except TimeoutError as error:
            raise Refused(Unavailable("memory for the weight cache")) from error
        if slab.tenant not in (None, tenant):
            zeroing = self._run_in_thread(slab.zero)
            try:
                await asyncio.shield(zeroing)
            except asyncio.CancelledError:
                zeroing.add_done_callback(lambda _: self.release(slab))  # until then, the thread writes to it
                raise
        slab.tenant = tenant
        return slab

    def release(self, slab: Slab) -> None:
        """Return a slab to the pool. No other process may have it mapped."""
        if slab not in self._acquired:
            return  # the pool was closed meanwhile
        self._acquired.remove(slab)
        self._free.append(slab)
        self._changed.set()

    def ensure_spare(self) -> None:
        """Start making the slabs that are waited for or should be spare, within the limit. Returns at once."""
        stock = SlabCounts(len(self._acquired), len(self._free), len(self._making), self._waiting)
        for _ in range(slabs_to_make(stock, self._limit, self._spare, self._at_once)):
            task = asyncio.create_task(self._make_slab())
            self._making.add(task)

    async def close(self) -> None:
        """Unmap all slabs. Other processes keep their mappings."""
        self._limit = 0  # no more slabs are started
        if self._refill_timer is not None:
            self._refill_timer.cancel()
        while self._making:
            await asyncio.wait(self._making)
        for slab in (*self._free, *self._acquired):
            slab.close()
        self._free.clear()
        self._acquired.clear()

    async def _wait_for_slab(self, tenant: str) -> Slab:
        self._waiting += 1
        try:
            while not self._free:
                self._changed.clear()
                self.ensure_spare()
                await self._changed.wait()
                if self._last_error is not None and not self._free:
                    fault, self._last_error = self._last_error, None
                    raise Refused(Unavailable("memory for the weight cache")) from fault
        finally:
            self._waiting -= 1
        slab = next((slab for slab in self._free if slab.tenant in (None, tenant)), self._free[0])
        self._free.remove(slab)
        self._acquired.add(slab)
        self._refill_later()
        return slab

    def _refill_later(self) -> None:
        if self._refill_timer is not None:
            self._refill_timer.cancel()
        self._refill_timer = asyncio.get_running_loop().call_later(self._quiet_s, self.ensure_spare)

    def _run_in_thread(self, call: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def _make_slab(self) -> None:
        made = False
        try:
            work = asyncio.get_running_loop().run_in_executor(self._executor, self._make, self._slab_bytes)
            self._free.append(await work)
            self._last_error, made = None, True
        except Exception as error:
            log.exception("a slab could not be made")
            self._last_error = error
        finally:
            self._making.discard(asyncio.current_task())
            self._changed.set()
            if made:  # after a failure, the next caller tries again
                self.ensure_spare()
