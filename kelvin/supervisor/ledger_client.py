"""Ship spooled records to the ledger: lifetimes of the supervisor, and records that dead processes left.

A pod also reports the lifetime of its running replica at intervals, because its disk is gone when it ends. If the pod
is killed, the ledger has its latest report.
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
from kelvin.ipc.internal_server import open_internal_server
from kelvin.ipc.peer_settings import is_remote
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
FIRST_POLL_S: Final = 0.5  # between two checks whether there is a lifetime to report
FINAL_FLUSH_S: Final = 5.0  # time limit of the last report
RETRY_BACKOFF: Final = ExponentialBackoff(0.2, FINAL_FLUSH_S)  # between attempts of the last report

ReadRunningLifetime = Callable[[], LifetimeRecord | None]
PostRunningLifetime = Callable[[LifetimeRecord], Awaitable[None]]


class LedgerClient:
    """Posts records to the control plane. Refused records stay in their spools and are posted again."""

    def __init__(self, control: ServiceClient, spools: Path) -> None:
        self._control = control
        self._spools = spools

    async def post_lifetimes(self, records: Sequence[bytes]) -> None:
        """Send lifetime records to the ledger. Idempotent. Raises Refused while the ledger is unavailable."""
        await self._post("lifetimes", batch_of(records))

    async def post_requests(self, records: Sequence[bytes]) -> None:
        """Send request records that dead processes left. Idempotent. Raises Refused while the ledger is unavailable."""
        await self._post("requests", batch_of(records))

    async def post_running_lifetime(self, record: LifetimeRecord) -> None:
        """Report the lifetime of a running replica up to now. Raises Refused; a later report replaces this one."""
        await self._post("lives", RunningLifetimes(records=(record,)))

    async def recover(self) -> int:
        """Ship records of dead processes. Return how many were not accepted. Raises OSError."""
        report = await recover(self._spools, self._post_for)
        for found in report:
            if found.lost:
                log.error("records of a dead process are lost", extra={"source": found.source, "lost": found.lost})
        return sum(found.remaining for found in report)

    async def recover_forever(self) -> None:
        """Call `recover` every RECOVERY_INTERVAL_S, even after disk errors, until cancelled."""
        failures = 0
        while True:
            try:
                await self.recover()
                failures = 0
            except OSError as error:
                failures += 1
                if should_log(failures):
                    why = {"error": repr(error), "failures": failures}
                    log.warning("records of dead processes can't be read; trying again", extra=why)
            await asyncio.sleep(RECOVERY_INTERVAL_S)

    def _post_for(self, source: str) -> Post:
        return self.post_lifetimes if source.startswith(LIFETIME_PREFIX) else self.post_requests

    async def _post(self, kind: str, body: object) -> None:
        await self._control.call("POST", f"/internal/v1/usage/{kind}", type(None), body=body, timeout_s=SHIP_TIMEOUT_S)


@asynccontextmanager
async def report_usage(
    settings: PodSettings, spool: Spool, running_lifetime: ReadRunningLifetime
) -> AsyncIterator[None]:
    """Report usage while the block runs, and for at most FINAL_FLUSH_S afterwards. Does nothing without a remote
    ledger. Unacknowledged records stay in the spools. Raises BadSetting.
    """
    if not is_remote(settings.peer_settings.control):
        yield
        return
    with closing(SocketDirectory(settings.data / "run")) as directory:
        async with open_internal_server(directory, settings.peer_settings, Role.RUNTIME) as internal_server:
            connector = internal_server.connector_factory.connector_to(
                settings.peer_settings.control, Role.CONTROLPLANE
            )
            control = ServiceClient.from_connector(connector, "the control plane", limit=4)
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
    """Report usage through `ledger_client` as `report_usage` does, and the running lifetime every `every_s` seconds."""
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
        await _flush_last(ledger_client, shipper)  # after the loops, so that no record is sent twice at once


async def report_running_forever(
    running_lifetime: ReadRunningLifetime, post: PostRunningLifetime, every_s: float
) -> None:
    """Report the running lifetime as soon as there is one, then every `every_s`, until cancelled. After a retryable
    failure, retry with exponential back-off from FIRST_POLL_S up to `every_s`.
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
                pause_s = pauses.delay_s(failures, random.random())  # noqa: S311 (spreads load, keeps no secret)
            if should_log(failures):
                why = {"why": refused.failure.message, "failures": failures}
                log.warning("the running lifetime can't be reported", extra=why)
        await asyncio.sleep(pause_s)


async def _flush_last(ledger_client: LedgerClient, shipper: Shipper) -> None:
    """Send the lifetime record and the replica's records, and retry until they are accepted or the time is over."""
    deadline = Deadline.after(FINAL_FLUSH_S, time.monotonic())
    is_flushed, is_shipped = await asyncio.gather(shipper.flush(deadline), _flush_spools(ledger_client, FINAL_FLUSH_S))
    if not is_shipped:
        log.error("the replica's records were not sent: they stay in its spool")
    if not is_flushed:
        log.error("the lifetime record was not sent: it stays in the spool", extra={"records": shipper.backlog})


async def _flush_spools(ledger_client: LedgerClient, within_s: float) -> bool:
    failures = 0
    try:
        async with asyncio.timeout(within_s):
            while await ledger_client.recover():
                failures += 1
                await asyncio.sleep(RETRY_BACKOFF.delay_s(failures))
    except TimeoutError:
        return False
    except OSError as error:
        log.warning("the replica's records can't be read", extra={"error": repr(error)})
        return False
    return True
