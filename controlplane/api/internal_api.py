"""Serve the routes that other processes of the installation call: feed, reports, registrations, jobs, usage, backups.

They are plain Starlette routes because FastAPI's cost time: a report that wakes a version is part of its cold start.
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from controlplane import dependencies
from controlplane.backup.backups import Backups
from controlplane.clock import Clock
from controlplane.db.nul_characters import read_json
from controlplane.ledger.usage_batches import read_batch
from controlplane.ledger.usage_ledger import Ledger
from controlplane.registry.feed_hub import FeedEnded, FeedHub, FellBehind
from controlplane.registry.registry import Registry
from controlplane.scaling.interfaces import ReplicaBackend
from kelvin.contracts.accounting.usage import LifetimeRecord, RequestRecord
from kelvin.contracts.errors import CapacityExceeded, InvalidRequest, Refused
from kelvin.contracts.serving.control_messages import (
    READER_HEADER,
    LifetimeBatch,
    NamedVersions,
    RequestBatch,
    RunningLifetimes,
    Stats,
    TimelineAnswer,
    VersionRegistration,
)
from kelvin.ipc.engine_jobs import job_routes
from kelvin.ipc.http_bodies import LARGE_BYTES, empty_response, json_response, read_body
from kelvin.process.race import wait_disconnected

LINE_WRITE_LIMIT_S: Final = dependencies.READERS.timeout_s  # limit for writing one line to a reader of the feed
_READER: Final = READER_HEADER.encode()


@dataclass(frozen=True, slots=True)
class InternalServices:
    """The services behind the internal routes."""

    feed: FeedHub
    timeline_of: Callable[[str, str], Awaitable[TimelineAnswer]]  # by tenant and id of an ended request; raises Refused
    registry: Registry
    backend: ReplicaBackend
    clock: Clock


class FeedStream:
    """`GET /internal/v1/feed` as a plain ASGI application. Sends one line per write until the reader disconnects."""

    def __init__(self, feed: FeedHub, write_s: float = LINE_WRITE_LIMIT_S) -> None:
        self._feed = feed
        self._write_s = write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the feed. If the reader falls behind, end without a last chunk: the reader has to subscribe again."""
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        leaving = asyncio.ensure_future(wait_disconnected(receive))
        streaming = asyncio.ensure_future(self._stream(send, _reader(scope)))
        try:
            await asyncio.wait((leaving, streaming), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            streaming.cancel()
            await asyncio.wait((leaving, streaming))

    async def _stream(self, send: Send, reader: str) -> None:
        with self._feed.subscribe(reader) as subscription:
            while True:
                try:
                    line = await subscription.next_line()
                    async with asyncio.timeout(self._write_s):
                        await send({"type": "http.response.body", "body": line, "more_body": True})
                except (FellBehind, TimeoutError):
                    return
                except FeedEnded:
                    await send({"type": "http.response.body", "body": b""})
                    return
                subscription.record_sent()


def _reader(scope: Scope) -> str:
    """Return the name from the reader's header; "" without one."""
    raw_headers: Iterable[tuple[bytes, bytes]] = scope.get("headers", ())
    return next((value.decode("latin-1")[:128] for name, value in raw_headers if name == _READER), "")


def routes(internals: InternalServices) -> list[Route]:
    """Return the internal routes, the most frequent first, because they are matched in order."""

    async def stats(request: Request) -> Response:
        internals.backend.scaler.observe(await read_json(request, Stats, LARGE_BYTES))
        return empty_response()

    async def versions(request: Request) -> Response:
        registration = await read_json(request, VersionRegistration)
        registered = await internals.registry.register(registration, internals.clock.wall_s())
        is_taken_in = registered.is_new or registered.was_deleted
        if (find_start_obstacle := internals.backend.find_start_obstacle) is not None:
            problem = await find_start_obstacle(registration.tenant)
            registered = msgspec.structs.replace(registered, start_problem=problem)
        return json_response(registered, 201 if is_taken_in else 200)

    async def named(request: Request) -> Response:
        return json_response(NamedVersions(versions=internals.registry.version_digests(_tenant(request))))

    async def timeline(request: Request) -> Response:
        return json_response(await internals.timeline_of(_tenant(request), request.path_params["request_id"]))

    async def healthz(_: Request) -> Response:
        return Response("ok")

    async def readyz(_: Request) -> Response:
        return Response("ok") if await internals.backend.is_ready() else Response("not ready", 503)

    return [
        Route("/internal/v1/stats", stats, methods=["POST"]),
        Route("/internal/v1/feed", FeedStream(internals.feed), methods=["GET"]),
        Route("/internal/v1/versions", versions, methods=["POST"]),
        Route("/internal/v1/versions", named, methods=["GET"]),
        *job_routes(internals.backend.jobs),
        Route("/internal/v1/requests/{request_id}/timeline", timeline, methods=["GET"]),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
    ]


def usage_routes(
    ledger: Ledger,
    on_requests: Callable[[tuple[RequestRecord, ...]], None],
    on_lifetimes: Callable[[tuple[LifetimeRecord, ...]], None],
    clock: Clock,
) -> list[Route]:
    """Return the routes that receive usage records and lifetimes, and reports of running pods' replicas.

    204 means durable. Repeats are harmless. A batch is one transaction; after it `on_requests` or `on_lifetimes` is
    called.
    """

    async def requests(request: Request) -> Response:
        body = await read_body(request, LARGE_BYTES)
        records, unreadable = read_batch(body, RequestRecord, clock.wall_s() * 1_000_000)
        await ledger.append_requests(RequestBatch(records=records), unreadable)
        on_requests(records)
        return empty_response()

    async def lifetimes(request: Request) -> Response:
        body = await read_body(request, LARGE_BYTES)
        records, unreadable = read_batch(body, LifetimeRecord, clock.wall_s() * 1_000_000)
        await ledger.append_lifetimes(LifetimeBatch(records=records), unreadable)
        on_lifetimes(records)
        return empty_response()

    async def lives(request: Request) -> Response:
        await ledger.record_running_replicas(
            await read_json(request, RunningLifetimes, LARGE_BYTES), clock.wall_s() * 1_000_000
        )
        return empty_response()

    return [
        Route("/internal/v1/usage/requests", requests, methods=["POST"]),
        Route("/internal/v1/usage/lifetimes", lifetimes, methods=["POST"]),
        Route("/internal/v1/usage/lives", lives, methods=["POST"]),
    ]


def backup_routes(backups: Backups) -> list[Route]:
    """Return the route of a backup for the command line. Only the socket serves it, as a backup holds secrets.

    A truncated answer is not a backup, because it lacks its index.
    """

    async def backup(_: Request) -> Response:
        backups.check()
        snapshot = await backups.begin()
        pieces = backups.pieces(snapshot, backups.data)
        try:
            first = await asyncio.to_thread(next, pieces)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise Refused(CapacityExceeded("bytes on the disk of DATA, for a copy of kelvin.db", 1, 0)) from error
        return StreamingResponse(chain((first,), pieces), media_type="application/x-tar")

    return [Route("/internal/v1/backup", backup, methods=["GET"])]


def _tenant(request: Request) -> str:
    tenant = request.query_params.get("tenant")
    if tenant is None:
        raise Refused(InvalidRequest("tenant", "", "is required"))
    return tenant
