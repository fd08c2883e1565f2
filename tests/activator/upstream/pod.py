"""A fake Knative pod: a replica behind a queue-proxy, on a port, without TLS. It imitates pkg/queue/health and
pkg/queue/sharedmain of knative/serving (98e5ef9) for probes and requests.
"""

import asyncio

from aiohttp import web

from tests.activator.replica import FakeReplica
from tests.stub_server import StubServer, reserve_port

PROBE = "K-Network-Probe"


class FakePod:
    """A pod. `probes` are the statuses of answered probes; `wrong` are probes that queue-proxy would not know."""

    def __init__(self) -> None:
        self.replica = FakeReplica()
        self.is_ready = False
        self.is_hung = False  # receives probes and answers none
        self.body = b"queue"
        self.probes: list[int] = []
        self.wrong: list[str] = []
        self.probed = asyncio.Event()
        self._held = reserve_port()
        self.port: int = self._held.getsockname()[1]  # reserved before the pod listens
        self._listening: StubServer | None = None

    @property
    def url(self) -> str:
        """Its URL, as in a row of the feed."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = self.replica.application()
        app.router.add_get("/healthz", self._probe)
        self._listening = StubServer(app)
        await self._listening.start_at(self._held)

    async def stop(self) -> None:
        if self._listening is not None:
            await self._listening.stop()
            self._listening = None
        self._held.close()

    async def _probe(self, request: web.Request) -> web.Response:
        asked, agent = request.headers.get(PROBE), request.headers.get("User-Agent")
        if asked != "queue" or agent != "Knative-Activator-Probe":
            self.wrong.append(f"{asked} by {agent}")
            return web.Response(status=400)
        if self.is_hung:
            self.probed.set()
            await asyncio.Event().wait()
        self.probes.append(200 if self.is_ready else 503)
        self.probed.set()
        return web.Response(status=self.probes[-1], body=self.body if self.is_ready else b"not ready")
