"""Run one of several control planes on a cluster. The others wait: alive, with nothing open but a port that says so.

A follower is ready where its pod's label says that it follows, because then the Service sends nobody to it (see
`role_label`). One that led and lost the lead follows again. It keeps nothing, as what it knew may be wrong by then.
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


async def lead(
    leases: LeaseStore,
    namespace: str,
    health: Health,
    clock: Clock,
    stop: asyncio.Event,
    serve: Callable[[], Awaitable[None]],
    role: RoleLabel | None = None,
) -> None:
    """Run `serve()` to its end while this process leads. If the lead is lost, cancel it, and start it anew once the
    lead is back.

    Return if `stop` is set while others lead. While this one leads, `serve` has to heed `stop`. Raises what `serve`
    raises.
    """
    identity = f"{socket.gethostname()}_{secrets.token_hex(8)}"
    election = LeaderElection(leases, namespace, LEASE_NAME, identity, clock)
    while True:
        log.info("waits for the lead", extra={"me": identity})
        async with _as_follower(health, role):
            if not await _wait_for_lead(election, stop):
                return
        if await election.lead(partial(_serve_as_leader, serve, role)):
            return


@asynccontextmanager
async def _as_follower(health: Health, role: RoleLabel | None) -> AsyncIterator[None]:
    """Be a follower until the block is left. Without a role label the Service can't tell it from the leader, so it is
    not ready.
    """
    health.waiting_for = "the lead"
    if role is None:
        yield
        return

    async def be_ready_once_labelled() -> None:
        # The label may still be that of a leader: from before the lead was lost, or before this container started.
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
    """False where `stop` comes first."""
    winning, stopping = asyncio.create_task(election.win()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((winning, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(winning, stopping)
    if winning.cancelled():
        return False
    winning.result()
    return True
