"""Of several control planes on a cluster one runs, and the others wait: alive, not ready, with nothing open but a port
that says so. One that has led and does not any more ends: what it knows may be wrong by then.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.settings import BadSetting
from controlplane.clock import Clock
from controlplane.scaling.knative.lease import Election, Leases
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
    """`serve()` once nobody else does, to its end; it is cancelled where the lead is lost, and then this is over too.

    Returns early with `stop` while others lead; from then on, `stop` is for `serve` to heed. Raises as it does.
    """
    began, lost = asyncio.Event(), asyncio.Event()
    me = f"{socket.gethostname()}_{secrets.token_hex(8)}"
    async with AsyncExitStack() as waiting:
        await waiting.enter_async_context(_waiting_health(between))

        async def once() -> None:
            began.set()
            await waiting.aclose()  # whoever serves says itself how it is, at the same port
            try:
                await serve()
            except asyncio.CancelledError:
                lost.set()
                raise

        log.info("waits for the lead", extra={"me": me})
        election = asyncio.create_task(Election(leases, namespace, NAME, me, clock).run(once), name="election")
        ends = [election, asyncio.create_task(lost.wait()), asyncio.create_task(_stopped_early(stop, began))]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ends:
                each.cancel()
            await asyncio.wait(ends)
        if not election.cancelled():
            election.result()


async def _stopped_early(stop: asyncio.Event, began: asyncio.Event) -> None:
    await stop.wait()
    if began.is_set():
        await asyncio.Event().wait()  # until it is cancelled


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
