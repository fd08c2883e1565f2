"""Of several control planes on a cluster one runs, and the others wait: alive, not ready, with nothing open but a port
that says so. One that has led and does not any more is one of them again: what it knew may be wrong by then, so that
it keeps nothing of it.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.settings import BadSetting
from controlplane.clock import Clock
from controlplane.scaling.knative.lease import Election, Leases
from controlplane.tasks import ended
from service.health_port import serve_health
from service.inner_settings import HEALTH, Between
from service.listener import listen

log = logging.getLogger(__name__)

NAME: Final = "kelvin-controlplane"  # of the Lease


async def lead(
    leases: Leases,
    namespace: str,
    between: Between,
    clock: Clock,
    stop: asyncio.Event,
    serve: Callable[[], Awaitable[None]],
) -> None:
    """`serve()` while nobody else leads, to its end; where the lead is lost it is cancelled, and begun anew when it is
    ours again.

    Returns with `stop` while others lead; otherwise `stop` is for `serve` to heed. Raises as it does, and BadSetting.
    """
    me = f"{socket.gethostname()}_{secrets.token_hex(8)}"
    election = Election(leases, namespace, NAME, me, clock)
    while True:
        log.info("waits for the lead", extra={"me": me})
        async with _waiting_health(between):  # whoever serves says itself how it is, at the same port
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


@asynccontextmanager
async def _waiting_health(between: Between) -> AsyncIterator[None]:
    """Where a process says how it is, it says: alive, and not ready. Raises BadSetting."""
    if between.health is None:
        yield
        return
    host, port = between.health
    try:
        listener = listen(host, port)
    except OSError as error:
        raise BadSetting(HEALTH, f"{host}:{port}", f"can't be listened on: {error.strerror}") from error
    with listener:
        over = asyncio.Event()
        serving = asyncio.create_task(serve_health(_waits(), listener, over, 0))
        try:
            yield
        finally:
            over.set()
            await serving


def _waits() -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_alive = scope["path"] == "/healthz"
        answer = PlainTextResponse("ok" if is_alive else "another one leads", 200 if is_alive else 503)
        await answer(scope, receive, send)

    return app
