"""Has the weight cache bring versions before their bytes are asked for. Best effort: whatever fails here, a start does
anew, and says so.

Asked for when an alias names a version, and when a start has to wait for a standby or for a device slot. A start that
has its standby at once leases at once: nothing would be won.
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
    """Each wish is asked for once at a time; `ask` returns when it was accepted, and raises Refused."""

    def __init__(self, ask: Callable[[PrefetchRequest], Awaitable[None]], tasks: Tasks) -> None:
        self._ask = ask
        self._tasks = tasks
        self._in_flight: set[PrefetchRequest] = set()

    def __repr__(self) -> str:
        return f"<Prefetcher asking={len(self._in_flight)}>"

    def named(self, key: VersionKey) -> None:
        """An alias names it: it will be asked for, by and by."""
        self._request(PrefetchRequest(tenant=key.tenant, version=key.version, urgent=False))

    def on_start_waiting(self, key: VersionKey) -> None:
        """Somebody waits for it, and it waits for its process."""
        self._request(PrefetchRequest(tenant=key.tenant, version=key.version, urgent=True))

    def _request(self, wish: PrefetchRequest) -> None:
        if wish in self._in_flight or len(self._in_flight) >= MAX_IN_FLIGHT:
            return
        self._in_flight.add(wish)
        self._tasks.start(self._send(wish), f"prefetch {wish.version[:12]}", detached=not wish.urgent)

    async def _send(self, wish: PrefetchRequest) -> None:
        try:
            await self._ask(wish)
        except Refused as refused:
            seen = {"tenant": wish.tenant, "version": wish.version, "why": refused.failure.message}
            log.info("the weight cache takes no prefetch", extra=seen)
        finally:
            self._in_flight.discard(wish)
