"""Of several control planes on a cluster one runs, and the others wait: alive, not ready, with nothing open but a port
that says so (`health`). One that has led and does not any more is one of them again: what it knew may be wrong by
then, so that it keeps nothing of it.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from controlplane.clock import Clock
from controlplane.health import Health
from controlplane.scaling.knative.lease import Election, Leases
from controlplane.tasks import ended

log = logging.getLogger(__name__)

NAME: Final = "kelvin-controlplane"  # of the Lease


async def lead(
    leases: Leases,
    namespace: str,
    health: Health,
    clock: Clock,
    stop: asyncio.Event,
    serve: Callable[[], Awaitable[None]],
) -> None:
    """`serve()` while nobody else leads, to its end; where the lead is lost it is cancelled, and begun anew when it is
    ours again.

    Returns with `stop` while others lead; otherwise `stop` is for `serve` to heed. Raises as it does.
    """
    me = f"{socket.gethostname()}_{secrets.token_hex(8)}"
    election = Election(leases, namespace, NAME, me, clock)
    while True:
        log.info("waits for the lead", extra={"me": me})
        health.waits_for = "the lead"
        if not await _won(election, stop):
            return
        if await election.lead(serve):
            return


async def _won(election: Election, stop: asyncio.Event) -> bool:
    """False where `stop` comes first."""
    winning, stopping = asyncio.create_task(election.win()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((winning, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await ended(winning, stopping)
    if winning.cancelled():
        return False
    winning.result()
    return True
