"""Hands spooled records to the ledger: the supervisor's own lifetimes, and what dead processes left behind.

A pod tells the ledger how its replica has lived so far, too. All that it keeps is gone with it, so it tells while it
lives: what is killed at once was told of a moment ago.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final

from contracts.control import LivesSoFar, batch_of
from contracts.deadline import Deadline
from contracts.doubling import Doubling, is_told
from contracts.errors import Refused
from contracts.roles import Role
from contracts.usage import LifetimeRecord
from kelvin.settings import PodSettings
from kelvin.supervisor.graves import LIFETIME_PREFIX
from service.client import ServiceClient
from service.inner import open_inner
from service.loops import Loops
from service.unix import SocketDirectory
from service.way import is_remote
from spool.recovery import recover
from spool.shipper import Post, Shipper
from spool.spool import Spool

log = logging.getLogger(__name__)

SHIP_TIMEOUT_S: Final = 10.0
RECOVER_EVERY_S: Final = 2.0
FIRST_S: Final = 0.5  # between two looks whether there is something to tell
LAST_S: Final = 5.0  # that the end of a life may take to arrive
AGAIN: Final = Doubling(0.2, LAST_S)  # before what was left is handed over once more

SoFar = Callable[[], LifetimeRecord | None]
PostSoFar = Callable[[LifetimeRecord], Awaitable[None]]


class LedgerDesk:
    """Posts records to the control plane; whatever is refused stays where it is and is posted again."""

    def __init__(self, control: ServiceClient, spools: Path) -> None:
        self._control = control
        self._spools = spools

    async def post_lifetimes(self, records: Sequence[bytes]) -> None:
        """Send lifetime records to the ledger. Idempotent. Raises Refused while the ledger is away."""
        await self._post("lifetimes", batch_of(records))

    async def post_requests(self, records: Sequence[bytes]) -> None:
        """Send request records that dead processes left. Idempotent. Raises Refused while the ledger is away."""
        await self._post("requests", batch_of(records))

    async def post_so_far(self, record: LifetimeRecord) -> None:
        """How a replica that lives has lived until now. Raises Refused; the next word says more than this one."""
        await self._post("lives", LivesSoFar(records=(record,)))

    async def recover(self) -> int:
        """Ship what dead processes left; how many records were not taken. Raises OSError."""
        report = await recover(self._spools, self._post_for)
        for found in report:
            if found.lost:
                log.error("records of a dead process are lost", extra={"source": found.source, "lost": found.lost})
        return sum(found.remaining for found in report)

    async def recover_forever(self) -> None:
        """Again and again, also where the disk refuses; ends by being cancelled."""
        failures = 0
        while True:
            try:
                await self.recover()
                failures = 0
            except OSError as error:
                failures += 1
                if is_told(failures):
                    why = {"error": repr(error), "failures": failures}
                    log.warning("what dead processes left can't be read; looking again", extra=why)
            await asyncio.sleep(RECOVER_EVERY_S)

    def _post_for(self, source: str) -> Post:
        return self.post_lifetimes if source.startswith(LIFETIME_PREFIX) else self.post_requests

    async def _post(self, kind: str, body: object) -> None:
        await self._control.call("POST", f"/internal/v1/usage/{kind}", type(None), body=body, timeout_s=SHIP_TIMEOUT_S)


@asynccontextmanager
async def telling(settings: PodSettings, spool: Spool, so_far: SoFar) -> AsyncIterator[None]:
    """Tell for as long as the block lasts, and for LAST_S more what is left then; where no ledger is named, nothing.
    Whatever becomes of that, what isn't acknowledged stays in the spools. Raises BadSetting.
    """
    if not is_remote(settings.between.control):
        yield
        return
    with closing(SocketDirectory(settings.data / "run")) as directory:
        async with open_inner(directory, settings.between, Role.RUNTIME) as inner:
            way = inner.ways.to(settings.between.control, Role.CONTROLPLANE)
            control = ServiceClient.by(way, "the control plane", limit=4)
            try:
                async with telling_at(LedgerDesk(control, settings.data / "spool"), spool, so_far, settings.life_s):
                    yield
            finally:
                await control.close()


@asynccontextmanager
async def telling_at(desk: LedgerDesk, spool: Spool, so_far: SoFar, every_s: float) -> AsyncIterator[None]:
    """Tell as `telling` does, through `desk`, and of the life so far every `every_s` seconds."""
    shipper = Shipper(spool, desk.post_lifetimes)
    try:
        async with Loops() as loops:
            loops.start("shipper", shipper.run)
            loops.start("ledger recovery", desk.recover_forever)
            loops.start("life so far", lambda: tell_forever(so_far, desk.post_so_far, every_s))
            yield
    finally:
        await _last(desk, shipper)  # after the loops: what one of them is handing over is nobody else's to hand over


async def tell_forever(so_far: SoFar, post: PostSoFar, every_s: float) -> None:
    """As soon as there is something to tell, and then each `every_s`; ends by being cancelled.

    Where a word wasn't taken and the next may be, that follows after FIRST_S, then twice as long, up to `every_s`.
    """
    failures, pauses = 0, Doubling(FIRST_S, every_s)
    while True:
        if (record := so_far()) is None:
            await asyncio.sleep(FIRST_S)
            continue
        pause_s = every_s
        try:
            await post(record)
            failures = 0
        except Refused as refused:
            failures += 1
            if refused.failure.retryable:
                pause_s = pauses.after(failures, random.random())  # noqa: S311 (spreads load, keeps no secret)
            if is_told(failures):
                why = {"why": refused.failure.message, "failures": failures}
                log.warning("the life so far is not told", extra=why)
        await asyncio.sleep(pause_s)


async def _last(desk: LedgerDesk, shipper: Shipper) -> None:
    """The record of the life, and what the replica left: each again until it is taken, or the time is over."""
    deadline = Deadline.after(LAST_S, time.monotonic())
    is_flushed, is_shipped = await asyncio.gather(shipper.flush(deadline), _shipped(desk, LAST_S))
    if not is_shipped:
        log.error("what the replica left is not told: it stays in its spool")
    if not is_flushed:
        log.error("the end of the life is not told: it stays in the spool", extra={"records": shipper.backlog})


async def _shipped(desk: LedgerDesk, within_s: float) -> bool:
    failures = 0
    try:
        async with asyncio.timeout(within_s):
            while await desk.recover():
                failures += 1
                await asyncio.sleep(AGAIN.after(failures))
    except TimeoutError:
        return False
    except OSError as error:
        log.warning("what the replica left can't be read", extra={"error": repr(error)})
        return False
    return True
