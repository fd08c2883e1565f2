"""What a pod tells the ledger: how its replica has lived, so far and in the end, and what nobody else will tell of it.

All that it keeps is gone with it, so it tells while it lives: what is killed at once was told of a moment ago.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from typing import Final

from contracts.deadline import Deadline
from contracts.doubling import Doubling, is_told
from contracts.errors import Refused
from contracts.problem import is_retryable
from contracts.roles import Role
from contracts.usage import LifetimeRecord
from kelvin.settings import PodSettings
from kelvin.supervisor.desk import LedgerDesk
from service.client import ServiceClient
from service.inner import open_inner
from service.loops import Loops
from service.unix import SocketDirectory
from service.way import is_remote
from spool.shipper import Shipper
from spool.spool import Spool

log = logging.getLogger(__name__)

FIRST_S: Final = 0.5  # between two looks whether there is something to tell
LAST_S: Final = 5.0  # that the end of a life may take to arrive
AGAIN: Final = Doubling(0.2, LAST_S)  # before what was left is handed over once more

SoFar = Callable[[], LifetimeRecord | None]
PostSoFar = Callable[[LifetimeRecord], Awaitable[None]]


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
            if is_retryable(refused.failure):
                pause_s = pauses.after(failures, random.random())  # noqa: S311 (spreads load, keeps no secret)
            if is_told(failures):
                why = {"why": refused.failure.message, "failures": failures}
                log.warning("the life so far is not told", extra=why)
        await asyncio.sleep(pause_s)


async def _last(desk: LedgerDesk, shipper: Shipper) -> None:
    """The record of the life, and what the replica left: each again until it is taken, or the time is over."""
    deadline = Deadline.after(LAST_S, time.monotonic())
    is_told, is_shipped = await asyncio.gather(shipper.flush(deadline), _shipped(desk, LAST_S))
    if not is_shipped:
        log.error("what the replica left is not told: it stays in its spool")
    if not is_told:
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
