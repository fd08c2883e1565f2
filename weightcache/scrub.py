"""Look at all that is kept, from time to time, while nothing loads; and at once, where an operator asks."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from service.loops import isolated
from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.examine import Examiner
from weightcache.nvme import NvmeTier
from weightcache.policy.healing import FAULTS

log = logging.getLogger(__name__)

BYTES_PER_S: Final = 64 << 20  # a hundredth of a core, and little beside what a disk gives
BUSY_S: Final = 0.2
MAX_TOLD: Final = 1000  # faults that a check names; all are counted


@dataclass(frozen=True, slots=True)
class Fault:
    """A kept chunk that was wrong: where, whose, and how (`policy/healing.Outcome`)."""

    tier: str
    tenant: str
    chunk: str
    kind: str


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a check: chunks and bytes by tier, faults, and contradictions of the indexes."""

    chunks: dict[str, int]
    bytes: dict[str, int]
    faults: tuple[Fault, ...]
    contradictions: tuple[str, ...]


class Scrubber:
    """A pass every `interval_s` seconds, at BYTES_PER_S; `is_busy` says when to pause."""

    def __init__(
        self,
        examiner: Examiner,
        interval_s: float,
        is_busy: Callable[[], bool],
        counters: Counters,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._examiner = examiner
        self._interval_s = interval_s
        self._is_busy = is_busy
        self._counters = counters
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"<Scrubber every {self._interval_s:g} s>"

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._sleep(self._interval_s)
            await self.sweep()

    async def sweep(self) -> None:
        """One pass over all that is kept as it begins."""
        for tier, key, length in tuple(self._examiner.kept()):
            while self._is_busy():
                await self._sleep(BUSY_S)
            with isolated(key):
                await self._examiner.examine(tier, *key)
            await self._sleep(length / BYTES_PER_S)
        self._counters.sweeps += 1


async def check(examiner: Examiner, arena: Arena, nvme: NvmeTier) -> Report:
    """All of it at once, at the machine's own rate; what is faulty is dropped as ever."""
    report = Report({"host": 0, "nvme": 0}, {"host": 0, "nvme": 0}, (), ())
    faults: list[Fault] = []
    for tier, (tenant, digest), length in tuple(examiner.kept()):
        outcome = await examiner.examine(tier, tenant, digest)
        report.chunks[tier] += 1
        report.bytes[tier] += length
        if outcome in FAULTS and len(faults) < MAX_TOLD:
            faults.append(Fault(tier, tenant, digest, outcome))
    contradictions = [f"{tenant}/{digest}: a file that is in no index" for tenant, digest in await nvme.strangers()]
    for name, integrity in (("host", arena.index.check_integrity), ("nvme", nvme.index.check_integrity)):
        try:
            integrity()
        except AssertionError as error:
            contradictions.append(f"the index of the tier {name}: {str(error) or 'its sums are wrong'}")
    return Report(report.chunks, report.bytes, tuple(faults), tuple(contradictions[:MAX_TOLD]))
