"""Run one of several control planes on a cluster. The others wait: alive, with nothing open but the health port.

A follower is ready once its pod's label says that it follows: then the Service sends it no requests (see
`role_label.py`). A leader that lost the lead becomes a follower. It keeps no state, because that may be outdated by
then.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from controlplane.app.health import Health
from controlplane.app.leader_election import LeaderElection, LeaseStore
from controlplane.app.role_label import RoleLabel
from controlplane.clock import Clock
from controlplane.tasks import cancel_and_wait
from kelvin.process.loops import Loops

log = logging.getLogger(__name__)

LEASE_NAME: Final = "kelvin-controlplane"  # of the Lease
LABEL_LOOP: Final = "role label"


async def serve_while_leading(
    leases: LeaseStore,
    namespace: str,
    health: Health,
    clock: Clock,
    stop: asyncio.Event,
    serve: Callable[[], Awaitable[None]],
    role: RoleLabel | None = None,
) -> None:
    """Run `serve()` to its end while this process leads. If the lead is lost, cancel it, and run it again once the lead
    is back.

    Return if `stop` is set while others lead. While this process leads, `serve` has to heed `stop`. Raises what `serve`
    raises.
    """
    identity = f"{socket.gethostname()}_{secrets.token_hex(8)}"
    election = LeaderElection(leases, namespace, LEASE_NAME, identity, clock)
    while True:
        log.info("waiting for the lead", extra={"me": identity})
        async with _as_follower(health, role):
            if not await _wait_for_lead(election, stop):
                return
        if await election.lead(partial(_serve_as_leader, serve, role)):
            return


@asynccontextmanager
async def _as_follower(health: Health, role: RoleLabel | None) -> AsyncIterator[None]:
    """Be a follower until the block is left. Not ready without a role label: the Service would select this pod, too."""
    health.waiting_for = "the lead"
    if role is None:
        yield
        return

    async def be_ready_once_labelled() -> None:
        # The label may still name a leader: from before the lead was lost, or before this container started.
        health.waiting_for = "its pod's label"
        await role.follow()
        health.waiting_for = "the lead"
        health.is_follower = True

    try:
        async with Loops() as loops:
            loops.start(LABEL_LOOP, be_ready_once_labelled)
            yield
    finally:
        health.is_follower = False


async def _serve_as_leader(serve: Callable[[], Awaitable[None]], role: RoleLabel | None) -> None:
    if role is None:
        await serve()
        return
    async with Loops() as loops:
        loops.start(LABEL_LOOP, role.lead)
        await serve()


async def _wait_for_lead(election: LeaderElection, stop: asyncio.Event) -> bool:
    """Return True once this process leads, False if `stop` is set first."""
    winning, stopping = asyncio.create_task(election.win()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((winning, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(winning, stopping)
    if winning.cancelled():
        return False
    winning.result()
    return True
