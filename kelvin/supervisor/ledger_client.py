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

from kelvin.contracts.accounting.usage import LifetimeRecord
from kelvin.contracts.backoff import ExponentialBackoff, should_log
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import Refused
from kelvin.contracts.roles import Role
from kelvin.contracts.serving.control_messages import RunningLifetimes, batch_of
from kelvin.ipc.connector import is_remote
from kelvin.ipc.internal_server import open_internal_server
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.loops import Loops
from kelvin.spool.leftover_recovery import recover
from kelvin.spool.shipper import Post, Shipper
from kelvin.spool.spool import Spool
from kelvin.supervisor.exit_recorder import LIFETIME_PREFIX
from kelvin.supervisor.settings import PodSettings

log = logging.getLogger(__name__)

SHIP_TIMEOUT_S: Final = 10.0
RECOVERY_INTERVAL_S: Final = 2.0
FIRST_POLL_S: Final = 0.5  # between two looks whether there is something to tell
FINAL_FLUSH_S: Final = 5.0  # that the end of a life may take to arrive
RETRY_BACKOFF: Final = ExponentialBackoff(0.2, FINAL_FLUSH_S)  # before what was left is handed over once more

ReadRunningLifetime = Callable[[], LifetimeRecord | None]
PostRunningLifetime = Callable[[LifetimeRecord], Awaitable[None]]


class LedgerClient:
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

    async def post_running_lifetime(self, record: LifetimeRecord) -> None:
        """How a replica that lives has lived until now. Raises Refused; the next word says more than this one."""
        await self._post("lives", RunningLifetimes(records=(record,)))

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
                if should_log(failures):
                    why = {"error": repr(error), "failures": failures}
                    log.warning("what dead processes left can't be read; looking again", extra=why)
            await asyncio.sleep(RECOVERY_INTERVAL_S)

    def _post_for(self, source: str) -> Post:
        return self.post_lifetimes if source.startswith(LIFETIME_PREFIX) else self.post_requests

    async def _post(self, kind: str, body: object) -> None:
        await self._control.call("POST", f"/internal/v1/usage/{kind}", type(None), body=body, timeout_s=SHIP_TIMEOUT_S)


@asynccontextmanager
async def report_usage(
    settings: PodSettings, spool: Spool, running_lifetime: ReadRunningLifetime
) -> AsyncIterator[None]:
    """Tell for as long as the block lasts, and for FINAL_FLUSH_S more what is left then; where no ledger is named,
    nothing. Whatever becomes of that, what isn't acknowledged stays in the spools. Raises BadSetting.
    """
    if not is_remote(settings.peer_settings.control):
        yield
        return
    with closing(SocketDirectory(settings.data / "run")) as directory:
        async with open_internal_server(directory, settings.peer_settings, Role.RUNTIME) as inner:
            way = inner.connector_factory.to(settings.peer_settings.control, Role.CONTROLPLANE)
            control = ServiceClient.from_connector(way, "the control plane", limit=4)
            try:
                async with report_usage_to(
                    LedgerClient(control, settings.data / "spool"), spool, running_lifetime, settings.life_s
                ):
                    yield
            finally:
                await control.close()


@asynccontextmanager
async def report_usage_to(
    ledger_client: LedgerClient, spool: Spool, running_lifetime: ReadRunningLifetime, every_s: float
) -> AsyncIterator[None]:
    """Tell as `report_usage` does, through `ledger_client`, and of the life so far every `every_s` seconds."""
    shipper = Shipper(spool, ledger_client.post_lifetimes)
    try:
        async with Loops() as loops:
            loops.start("shipper", shipper.run)
            loops.start("ledger recovery", ledger_client.recover_forever)
            loops.start(
                "life so far",
                lambda: report_running_forever(running_lifetime, ledger_client.post_running_lifetime, every_s),
            )
            yield
    finally:
        await _flush_last(
            ledger_client, shipper
        )  # after the loops: what one of them is handing over is nobody else's to hand over


async def report_running_forever(
    running_lifetime: ReadRunningLifetime, post: PostRunningLifetime, every_s: float
) -> None:
    """As soon as there is something to tell, and then each `every_s`; ends by being cancelled.

    Where a word wasn't taken and the next may be, that follows after FIRST_POLL_S, then twice as long, up to `every_s`.
    """
    failures, pauses = 0, ExponentialBackoff(FIRST_POLL_S, every_s)
    while True:
        if (record := running_lifetime()) is None:
            await asyncio.sleep(FIRST_POLL_S)
            continue
        pause_s = every_s
        try:
            await post(record)
            failures = 0
        except Refused as refused:
            failures += 1
            if refused.failure.retryable:
                pause_s = pauses.after(failures, random.random())  # noqa: S311 (spreads load, keeps no secret)
            if should_log(failures):
                why = {"why": refused.failure.message, "failures": failures}
                log.warning("the life so far is not told", extra=why)
        await asyncio.sleep(pause_s)


async def _flush_last(ledger_client: LedgerClient, shipper: Shipper) -> None:
    """The record of the life, and what the replica left: each again until it is taken, or the time is over."""
    deadline = Deadline.after(FINAL_FLUSH_S, time.monotonic())
    is_flushed, is_shipped = await asyncio.gather(shipper.flush(deadline), _flush_spools(ledger_client, FINAL_FLUSH_S))
    if not is_shipped:
        log.error("what the replica left is not told: it stays in its spool")
    if not is_flushed:
        log.error("the end of the life is not told: it stays in the spool", extra={"records": shipper.backlog})


async def _flush_spools(ledger_client: LedgerClient, within_s: float) -> bool:
    failures = 0
    try:
        async with asyncio.timeout(within_s):
            while await ledger_client.recover():
                failures += 1
                await asyncio.sleep(RETRY_BACKOFF.after(failures))
    except TimeoutError:
        return False
    except OSError as error:
        log.warning("what the replica left can't be read", extra={"error": repr(error)})
        return False
    return True
