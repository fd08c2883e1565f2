"""A fake control plane: feed, stats, usage records, timelines, and an admin API that echoes. It imitates
controlplane/api/internal_api.py and controlplane/registry/feed_hub.py: a full line first, then changes in order; 204
for posts.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from kelvin.contracts.accounting.spending import SpendingRow
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.errors import NotFound
from kelvin.contracts.problem import problem_details
from kelvin.contracts.serving.control_messages import (
    ConcurrencyStat,
    Feed,
    KeyRow,
    KeyUses,
    ModelRow,
    ReplicaRow,
    RequestBatch,
    RestoreFailure,
    RevisionRow,
    Scope,
    StartProblemRow,
    Stats,
    TenantLimits,
    TenantRow,
    TimelineAnswer,
    VersionRow,
)
from kelvin.contracts.serving.start_forecast import Forecast, StartRow
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.wire import decode, encode
from tests.stub_server import StubServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

VERSION = "aa" * 32
OTHER = "ab" * 32
KEY = "kv-abcdefghijkl-" + "x" * 43
ADMIN = "kv-adminadminad-" + "y" * 43
STRANGER = "kv-strangerstra-" + "z" * 43
MARKER = "kv-markermarker-" + "m" * 43
RESTORE = (StageSpan(Stage.DECIDED, 1000), StageSpan(Stage.PROMOTED, 2000), StageSpan(Stage.READY, 30_000))


def key_row(key_id: str, key: str, tenant: str, *scopes: Scope) -> KeyRow:
    """Return a key's row as the registry makes it."""
    return KeyRow(key_id=key_id, secret_sha256=hashlib.sha256(key.encode()).hexdigest(), tenant=tenant, scopes=scopes)


def version_row(tenant: str, model: str, version: str, max_body_bytes: int = 1 << 20) -> VersionRow:
    """Return the row of a version that is ready to serve."""
    limits = Limits(1024, 1024, 8, max_body_bytes)
    return VersionRow(tenant=tenant, model=model, version=version, limits=limits, created_at_s=1)


def replica_row(name: str, max_streams: int = 8, **other: Any) -> ReplicaRow:
    """Return a replica row of the default tenant's model, with other values for some fields."""
    row = ReplicaRow(
        runtime_id=name, tenant="default", model="m", version=VERSION, address=f"rt-{name}.sock",
        max_streams=max_streams, draining=False, restore=RESTORE,
    )  # fmt: skip
    return msgspec.structs.replace(row, **other)


def limited(tenant: str = "default", **limits: Any) -> TenantRow:
    """Return a tenant's row with these limits."""
    return TenantRow(tenant=tenant, suspended=False, limits=TenantLimits(**limits))


def snapshot() -> Feed:
    """Return a feed of two tenants with models and keys. Models of MARKER's tenant show how much was read."""
    return Feed(
        revision=1,
        full=True,
        tenants=tuple(TenantRow(tenant=name, suspended=False) for name in ("default", "stranger")),
        keys=(
            key_row("k1", KEY, "default", Scope.INFER),
            key_row("k2", ADMIN, "default", Scope.INFER, Scope.ADMIN),
            key_row("k3", STRANGER, "stranger", Scope.INFER),
            key_row("k4", MARKER, "marker", Scope.INFER),
        ),
        models=(
            ModelRow(tenant="default", model="m", aliases={"prod": VERSION, "next": OTHER}, created_at_s=7),
            ModelRow(tenant="stranger", model="theirs", aliases={"prod": VERSION}, created_at_s=8),
        ),
        versions=(
            version_row("default", "m", VERSION, 64 << 10),
            version_row("default", "m", OTHER),
            version_row("stranger", "theirs", VERSION),
        ),
    )


class FakeControl:
    """A control plane that keeps what activators send. `publish` sends a line of the feed to each reader."""

    def __init__(self) -> None:
        self.rows = snapshot()
        self.replicas: dict[str, ReplicaRow] = {}
        self.revisions: dict[str, RevisionRow] = {}  # by name
        self.revision = 1
        self.stats: list[ConcurrencyStat] = []
        self.posts: list[Stats] = []
        self.records: list[RequestRecord] = []
        self.used_at_s: dict[str, int] = {}
        self.started_requests = 0  # requests whose head has arrived since the start
        self.forwarded_requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.timelines: dict[tuple[str, str], TimelineAnswer] = {}
        self.refuse_usage = False
        self.silent: set[str] = set()  # paths that are accepted and never answered
        self._readers: set[asyncio.Queue[bytes]] = set()
        self._changed = asyncio.Condition()
        self._listening: StubServer | None = None

    async def start(self, run: Path) -> None:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._silence])
        app.router.add_get("/internal/v1/feed", self._feed)
        app.router.add_post("/internal/v1/stats", self._stats)
        app.router.add_post("/internal/v1/usage/requests", self._usage)
        app.router.add_get("/internal/v1/requests/{id}/timeline", self._timeline)
        app.router.add_post("/internal/v1/keys/uses", self._key_uses)
        app.router.add_route("*", "/{path:.*}", self._echo)
        self._listening = StubServer(app, shutdown_s=0.1)
        await self._listening.start(run / "control.sock")

    async def stop(self) -> None:
        """End every feed and stop listening, as a killed process does."""
        if self._listening is not None:
            for queue in self._readers:
                queue.put_nowait(b"")
            await self._listening.stop()
            self._listening = None

    def publish(
        self,
        *replicas: ReplicaRow,
        removed: tuple[str, ...] = (),
        failures: tuple[RestoreFailure, ...] = (),
        keys: tuple[KeyRow, ...] = (),
        removed_keys: tuple[str, ...] = (),
        tenants: tuple[TenantRow, ...] = (),
        spending: tuple[SpendingRow, ...] = (),
        forecasts: tuple[Forecast, ...] = (),
        starts: tuple[StartRow, ...] = (),
        models: tuple[ModelRow, ...] = (),
        versions: tuple[VersionRow, ...] = (),
        revisions: tuple[RevisionRow, ...] = (),
        removed_revisions: tuple[tuple[str, str, str], ...] = (),
        removed_versions: tuple[tuple[str, str, str], ...] = (),
        start_problems: tuple[StartProblemRow, ...] = (),
    ) -> None:
        """Send a change to all readers of the feed."""
        self.revision += 1
        self.revisions.update((row.name, row) for row in revisions)
        self.replicas.update((row.runtime_id, row) for row in replicas)
        for runtime_id in removed:
            self.replicas.pop(runtime_id, None)
        line = Feed(
            revision=self.revision, replicas=replicas, removed_replicas=removed, failures=failures,
            keys=keys, removed_keys=removed_keys, tenants=tenants, forecasts=forecasts, starts=starts,
            models=models, spending=spending, versions=versions, revisions=revisions,
            removed_revisions=removed_revisions, removed_versions=removed_versions,
            start_problems=start_problems,
        )  # fmt: skip
        for queue in self._readers:
            queue.put_nowait(encode(line) + b"\n")

    def mark(self) -> str:
        """Publish a new model of MARKER's tenant, and return its name. An activator that has it has read all before."""
        self.revision += 1
        name = f"mark-{self.revision}"
        model = ModelRow(tenant="marker", model=name, aliases={"prod": VERSION}, created_at_s=1)
        version = version_row("marker", name, VERSION)
        rows = self.rows
        self.rows = msgspec.structs.replace(rows, models=(*rows.models, model), versions=(*rows.versions, version))
        for queue in self._readers:
            line = Feed(revision=self.revision, models=(model,), versions=(version,))
            queue.put_nowait(encode(line) + b"\n")
        return name

    async def wait_for_records(self, count: int) -> list[RequestRecord]:
        """Wait for `count` usage records. Return all."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: len(self.records) >= count)
        return self.records

    async def wait_for_stat(self, concurrency: float | None = None, count: int = 1) -> None:
        """Wait for `count` stats with that concurrency (None: any)."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(
                lambda: sum(concurrency in (None, stat.concurrency) for stat in self.stats) >= count
            )

    def fall_silent(self, path: str) -> None:
        """Accept requests to paths with this prefix from now on, but never answer them. Open feeds end."""
        self.silent.add(path)
        if path == "/internal/v1/feed":
            for queue in self._readers:
                queue.put_nowait(b"")

    @web.middleware
    async def _silence(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if any(request.path.startswith(path) for path in self.silent):
            await asyncio.Event().wait()
        return await handler(request)

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await answer.prepare(request)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        full = Feed(
            revision=self.revision, full=True, tenants=self.rows.tenants, keys=self.rows.keys, models=self.rows.models,
            versions=self.rows.versions, replicas=tuple(self.replicas.values()),
            revisions=tuple(self.revisions.values()),
        )  # fmt: skip
        queue.put_nowait(encode(full) + b"\n")
        self._readers.add(queue)
        try:
            while line := await queue.get():
                await answer.write(line)
        finally:
            self._readers.discard(queue)
        return answer

    async def _stats(self, request: web.Request) -> web.Response:
        stats = decode(await request.read(), Stats)
        self.posts.append(stats)
        self.stats += stats.stats
        await self._notify()
        return web.Response(status=204)

    async def _usage(self, request: web.Request) -> web.Response:
        if self.refuse_usage:
            return web.Response(status=503)
        self.records += decode(await request.read(), RequestBatch).records
        await self._notify()
        return web.Response(status=204)

    async def _key_uses(self, request: web.Request) -> web.Response:
        self.used_at_s |= decode(await request.read(), KeyUses).used_at_s
        await self._notify()
        return web.Response(status=204)

    async def wait_for_used(self, key_id: str) -> int:
        """Wait until a use of the key was reported. Return its time (Unix seconds)."""
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: key_id in self.used_at_s)
        return self.used_at_s[key_id]

    async def _timeline(self, request: web.Request) -> web.Response:
        found = self.timelines.get((request.query["tenant"], request.match_info["id"]))
        if found is None:
            return web.Response(status=404, body=problem_details(NotFound("request", request.match_info["id"])))
        return web.Response(body=encode(found))

    async def _echo(self, request: web.Request) -> web.Response:
        self.started_requests += 1
        body = await request.read()
        self.forwarded_requests.append((request.method, request.raw_path, dict(request.headers), body))
        return web.Response(status=201, body=b"echo:" + body, headers={"x-kelvin-secret": "no", "x-fine": "yes"})

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
