"""Answer health probes over TCP from the control plane's first moment to its last, on one port.

A start may have to wait: for the lead, for the database, for the cluster's objects. Without an answer meanwhile, a
kubelet would kill a process that is right to wait, again and again.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.health_port import serve_health
from kelvin.ipc.peer_settings import HEALTH_VARIABLE, PeerSettings
from kelvin.ipc.tcp_listener import listen


class Health:
    """ASGI application that answers probes while this process does not serve: alive, and not ready. In between
    `forward_to` passes requests on.

    Set `is_follower` while another control plane leads and this one is prepared to take over: then it is ready, too.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self.waiting_for = "its data"  # shown by /readyz
        self.is_follower = False  # ready, while another control plane leads
        self._stop = stop
        self._app: ASGIApp | None = None

    def wait_for(self, what: str) -> None:
        """Set what /readyz says is waited for."""
        self.waiting_for = what

    def __repr__(self) -> str:
        return f"<Health {f'waits for {self.waiting_for}' if self._app is None else 'serves'}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `/healthz`, `/readyz` and other paths. Takes HTTP requests only."""
        if self._app is not None and not self._stop.is_set():
            await self._app(scope, receive, send)
            return
        is_alive = scope["path"] == "/healthz"
        is_ready = scope["path"] == "/readyz" and self.is_follower and not self._stop.is_set()
        why = "ends" if self._stop.is_set() else f"waits for {self.waiting_for}"
        await PlainTextResponse("ok" if is_alive else why, 200 if is_alive or is_ready else 503)(scope, receive, send)

    @contextmanager
    def forward_to(self, app: ASGIApp) -> Iterator[None]:
        """Pass requests to `app` until the block is left or `stop` is set."""
        self._app = app
        try:
            yield
        finally:
            self._app = None


@asynccontextmanager
async def open_health(peer_settings: PeerSettings, stop: asyncio.Event) -> AsyncIterator[Health]:
    """Answer probes on the health port, if one is set, until the block is left. Raises BadSetting."""
    health = Health(stop)
    if peer_settings.health is None:
        yield health
        return
    host, port = peer_settings.health
    try:
        listener = listen(host, port)
    except OSError as error:
        raise BadSetting(HEALTH_VARIABLE, f"{host}:{port}", f"can't be listened on: {error.strerror}") from error
    with listener:
        over = asyncio.Event()
        serving = asyncio.create_task(serve_health(health, listener, over, 0), name="health")
        try:
            yield health
        finally:
            over.set()
            await serving
