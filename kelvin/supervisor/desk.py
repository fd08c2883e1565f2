"""Hands spooled records to the ledger: the supervisor's own lifetimes, and what dead processes left behind."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from contracts.control import LivesSoFar, batch_of
from contracts.doubling import is_told
from contracts.usage import LifetimeRecord
from kelvin.supervisor.graves import LIFETIME_PREFIX
from service.client import ServiceClient
from spool.recovery import recover
from spool.shipper import Post

log = logging.getLogger(__name__)

SHIP_TIMEOUT_S: Final = 10.0
RECOVER_EVERY_S: Final = 2.0


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
