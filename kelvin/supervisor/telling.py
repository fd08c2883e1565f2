"""What a pod tells the ledger: how its replica has lived, so far and in the end, and what nobody else will tell of it.

All that it keeps is gone with it, so it tells while it lives: what is killed at once was told of a moment ago.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from typing import Final

from contracts.deadline import Deadline
from contracts.errors import Refused
from contracts.roles import Role
from contracts.usage import LifetimeRecord
from kelvin.settings import PodSettings
from kelvin.supervisor.desk import LedgerDesk
from service.client import ServiceClient
from service.inner import open_inner
from service.unix import SocketDirectory
from service.way import is_remote
from spool.shipper import Shipper
from spool.spool import Spool

log = logging.getLogger(__name__)

FIRST_S: Final = 0.5  # between two looks whether there is something to tell
LAST_S: Final = 5.0  # that the end of a life may take to arrive

SoFar = Callable[[], LifetimeRecord | None]


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
            desk = LedgerDesk(control, settings.data / "spool")
            shipper = Shipper(spool, desk.post_lifetimes)
            tasks = [
                asyncio.create_task(_kept(work), name=name)
                for name, work in (
                    ("ship", shipper.run()),
                    ("recover", desk.recover_forever()),
                    ("life so far", tell_forever(so_far, desk, settings.life_s)),
                )
            ]
            try:
                yield
            finally:
                await _last(desk, shipper)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await control.close()


async def tell_forever(so_far: SoFar, desk: LedgerDesk, every_s: float) -> None:
    """As soon as there is something to tell, and then each `every_s`; ends by being cancelled."""
    failures = 0
    while True:
        record = so_far()
        if record is not None:
            try:
                await desk.post_so_far(record)
                failures = 0
            except Refused as refused:
                failures += 1
                if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
                    why = {"why": refused.failure.message, "failures": failures}
                    log.warning("the life so far is not told", extra=why)
        await asyncio.sleep(FIRST_S if record is None else every_s)


async def _last(desk: LedgerDesk, shipper: Shipper) -> None:
    """The record of the life, then what the replica left."""
    deadline = Deadline.after(LAST_S, time.monotonic())
    is_told = await shipper.flush(deadline)
    try:
        async with asyncio.timeout(deadline.remaining_s(time.monotonic())):
            await desk.recover()
    except (OSError, TimeoutError) as error:  # TimeoutError is one, too
        log.warning("what the replica left stays in its spool", extra={"error": repr(error)})
    if not is_told:
        log.error("the end of the life is not told: it stays in the spool", extra={"records": shipper.backlog})


async def _kept(work: Coroutine[object, object, None]) -> None:
    """What goes wrong here must not end who serves."""
    try:
        await work
    except Exception:
        log.exception("the ledger is told no more")
