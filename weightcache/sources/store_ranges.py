"""Read ranges of the store in parts, several at once as the scheduler allows. A late part is hedged.

The first of the two reads that succeeds counts. The second one reads into separate memory. If it wins,
the first one is cancelled and the bytes are copied. So one read at a time writes to the chunk's final place, and none
once the call is over.
"""

import asyncio
import time
from dataclasses import dataclass

from kelvin.blobstore.bounded_gather import cancel_and_wait
from kelvin.blobstore.chunk_locations import RangeReader
from weightcache.counters import Counters
from weightcache.sources.policy.bdp_window import BdpWindow
from weightcache.sources.policy.read_hedging import ReadHedging
from weightcache.sources.source import ReadSlot


class StoreRanges:
    """Reads ranges of a store that serves many reads at once. `window` measures each of them."""

    def __init__(self, store: RangeReader, hedging: ReadHedging, window: BdpWindow, counters: Counters) -> None:
        self.window = window
        self._store = store
        self._hedging = hedging
        self._counters = counters

    def reader_for(self, slot: ReadSlot) -> RangeReader:
        """Return a reader whose parts have the lengths and start times that `slot` allows."""
        return _SlotReader(self, slot)

    async def read(self, key: str, offset: int, into: memoryview, slot: ReadSlot) -> None:
        """Fill `into` from `offset`, as `RangeReader.read_into` does, in parts."""
        reads: list[asyncio.Task[None]] = []
        begin = 0
        try:
            while not any(map(_has_failed, reads)):
                nbytes = await slot.request_part(into.nbytes - begin)
                part = self._read_part(key, offset + begin, into[begin : begin + nbytes], slot)
                reads.append(asyncio.create_task(part))
                begin += nbytes
                if begin >= into.nbytes:
                    break
            await asyncio.gather(*reads)
        finally:
            await cancel_and_wait(reads)

    async def _read_part(self, key: str, offset: int, into: memoryview, slot: ReadSlot) -> None:
        arrived_bytes, transfer = 0, self.window.begin(time.monotonic())
        try:
            await self._read_hedged(key, offset, into)
            arrived_bytes = into.nbytes
        finally:
            self.window.end(transfer, arrived_bytes, time.monotonic())
        slot.record_arrival(arrived_bytes)

    async def _read_hedged(self, key: str, offset: int, into: memoryview) -> None:
        began_s = time.monotonic()
        late_s = self._hedging.begin_read(into.nbytes)
        first = asyncio.create_task(self._store.read_into(key, offset, into))
        try:
            await asyncio.wait((first,), timeout=late_s)
            if not first.done() and self._hedging.try_hedge():
                try:
                    await self._race(first, key, offset, into)
                finally:
                    self._hedging.end_hedge()
            else:
                await first
        finally:
            await cancel_and_wait((first,))
        self._hedging.record_read(into.nbytes, time.monotonic() - began_s)

    async def _race(self, first: asyncio.Task[None], key: str, offset: int, into: memoryview) -> None:
        """Return once either read has filled `into`. If both fail, raise the first one's error."""
        self._counters.hedges += 1
        began_s = time.monotonic()
        spare_buffer = bytearray(into.nbytes)
        second = asyncio.create_task(self._store.read_into(key, offset, memoryview(spare_buffer)))
        try:
            await _wait_for_success((first, second))
            if _succeeded(second) and not _succeeded(first):
                self._hedging.record_read(into.nbytes, time.monotonic() - began_s)
                await cancel_and_wait((first,))  # nothing else writes there from now on
                into[:] = spare_buffer
                self._counters.hedges_won += 1
            else:
                await first
        finally:
            await cancel_and_wait((second,))


@dataclass(frozen=True, slots=True)
class _SlotReader:
    ranges: StoreRanges
    slot: ReadSlot

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        await self.ranges.read(key, offset, into, self.slot)


async def _wait_for_success(tasks: tuple[asyncio.Task[None], asyncio.Task[None]]) -> None:
    """Wait until one task has succeeded, or both have ended."""
    pending = set(tasks)
    while pending and not any(map(_succeeded, tasks)):
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not _succeeded(task)


def _succeeded(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
