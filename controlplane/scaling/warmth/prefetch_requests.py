"""Ask the weight cache to fetch versions before a start needs their bytes. Best effort: a start fetches what is
missing, and reports errors.

A prefetch is requested when an alias names a version, and when a start waits for a standby or a device slot. A start
that has its standby leases at once, so a prefetch would gain nothing.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from controlplane.registry.policy.domain import VersionKey
from controlplane.tasks import Tasks
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import Wire

log = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 64


class PrefetchRequest(Wire, frozen=True):
    """Body of the agent's `POST /v1/prefetch`. `urgent`: a start waits for it."""

    tenant: str
    version: str
    urgent: bool


class Prefetcher:
    """Sends each prefetch request once at a time. `send_request` returns when the cache accepted it; raises Refused."""

    def __init__(self, send_request: Callable[[PrefetchRequest], Awaitable[None]], tasks: Tasks) -> None:
        self._send_request = send_request
        self._tasks = tasks
        self._in_flight: set[PrefetchRequest] = set()

    def __repr__(self) -> str:
        return f"<Prefetcher in_flight={len(self._in_flight)}>"

    def on_alias_moved(self, key: VersionKey) -> None:
        """Prefetch a version that an alias names, because requests for it will come."""
        self._request(PrefetchRequest(tenant=key.tenant, version=key.version, urgent=False))

    def on_start_waiting(self, key: VersionKey) -> None:
        """Prefetch a version, urgently: a request waits for its start, and the start waits for a process."""
        self._request(PrefetchRequest(tenant=key.tenant, version=key.version, urgent=True))

    def _request(self, request: PrefetchRequest) -> None:
        if request in self._in_flight or len(self._in_flight) >= MAX_IN_FLIGHT:
            return
        self._in_flight.add(request)
        self._tasks.start(self._send(request), f"prefetch {request.version[:12]}", detached=not request.urgent)

    async def _send(self, request: PrefetchRequest) -> None:
        try:
            await self._send_request(request)
        except Refused as refused:
            fields = {"tenant": request.tenant, "version": request.version, "why": refused.failure.message}
            log.info("the weight cache refused a prefetch", extra=fields)
        finally:
            self._in_flight.discard(request)
