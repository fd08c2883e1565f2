"""A replica that had no known answers of its engine recorded them: once it gave them again, they are kept for others.

They become a seal of the version, which the snapshotter signs. Nothing waits for it: if it can't be reached, the next
start records them anew.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from contracts.errors import Refused
from contracts.push import KeepSeal
from runtime.dependencies import SEALS
from runtime.replica import Replica
from service.client import ServiceClient
from service.way import Way

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
_PAUSES_S: Final = (1.0, 5.0, 25.0)  # between tries
_CALL_S: Final = SEALS.timeout_s

Keep = Callable[[KeepSeal], Awaitable[None]]


async def keep_what_was_recorded(replica: Replica, keep: Keep) -> None:
    """Returns once there is nothing to do: all was known before, it is kept, or that was tried often enough."""
    while True:
        await asyncio.sleep(_LOOK_S)
        if not replica.to_prove:
            break
    seal = replica.recorded
    if seal is None:
        return
    told = {"tenant": seal.tenant, "version": seal.seal.version}
    for pause_s in (*_PAUSES_S, None):
        try:
            await keep(seal)
        except Refused as refused:
            log.warning("known answers were not kept", extra={**told, "why": refused.failure.message})
            if pause_s is None or not refused.failure.retryable:
                return
            await asyncio.sleep(pause_s)
        else:
            log.info("known answers of this engine are kept", extra=told)
            return


def keeper(way: Way) -> Keep:
    """Over the way to the snapshotter."""

    async def keep(found: KeepSeal) -> None:
        client = ServiceClient.by(way, "the snapshotter", limit=1)
        try:
            await client.call("POST", "/internal/v1/seals", type(None), body=found, timeout_s=_CALL_S)
        finally:
            await client.close()

    return keep
