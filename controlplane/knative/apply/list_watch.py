"""List all objects of a kind once, watch their changes from there, and list again after a gap.

See https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from controlplane import dependencies
from controlplane.clock import Clock
from controlplane.knative.apply.api_errors import failure_from_event
from controlplane.knative.apply.cluster import (
    ApiFailure,
    Busy,
    Change,
    ClusterError,
    Deleted,
    Expired,
    Json,
    Ref,
    Synced,
    Unreachable,
    Upsert,
    collection_path,
)
from controlplane.knative.apply.transport import Query, Transport
from kelvin.contracts.backoff import ExponentialBackoff
from kelvin.contracts.wire import decode_any

PAGE: Final = 500
SERVER_TIMEOUT_MARGIN_S: Final = 15.0  # the server ends a watch this much before a silent connection counts as dead
WATCH_BACKOFF: Final = ExponentialBackoff(0.2, 30.0)
_LOG = logging.getLogger("kelvin.cluster")


class ListWatch:
    """Lists and watches the objects of one kind."""

    def __init__(
        self,
        transport: Transport,
        api_version: str,
        kind: str,
        clock: Clock,
        *,
        labels: str = "",
        luck: Callable[[], float] = random.random,
    ) -> None:
        self._transport, self._clock, self._luck = transport, clock, luck
        self._api_version, self._kind = api_version, kind
        self._path = collection_path(api_version, kind, None)
        self._selected: Query = [("labelSelector", labels)] if labels else []
        self._version = ""  # the last version that was seen; empty: none
        self._failures = 0
        self._trouble: ApiFailure | None = None  # why the watch fails now

    def __repr__(self) -> str:
        return f"<ListWatch {self._kind} at={self._version or 'none'} trouble={self._trouble}>"

    async def changes(self) -> AsyncGenerator[Change, None]:
        """Yield changes until it is closed."""
        while True:
            try:
                if not self._version:
                    yield await self._list()
                async with aclosing(self._watch()) as watched:
                    async for change in watched:
                        yield change
            except ClusterError as error:
                await self._back_off(error.api_failure)

    async def _list(self) -> Synced:
        """Read every page of one list. Raises ClusterError; after Expired the list starts from its first page."""
        objects: list[Json] = []
        continue_token, version = "", ""
        while True:
            query = [*self._selected, ("limit", str(PAGE)), *([("continue", continue_token)] if continue_token else [])]
            page = await self._transport.send_request("GET", self._path, query, limit_s=dependencies.CLUSTER.timeout_s)
            # Items of built-in kinds don't have their kind.
            head = {"apiVersion": self._api_version, "kind": self._kind}
            objects += ({**head, **each} for each in page.get("items") or ())
            metadata = page.get("metadata") or {}
            version, continue_token = metadata.get("resourceVersion", ""), metadata.get("continue", "")
            if not continue_token:
                break
        if not version:
            raise ClusterError(Unreachable("a list without a version"))
        self._version = version
        self._log_recovery()
        return Synced(tuple(objects), version)

    async def _watch(self) -> AsyncGenerator[Change, None]:
        """Yield changes since the last version, until the server ends the watch."""
        silence_s = dependencies.WATCH.timeout_s
        query = [
            *self._selected,
            ("watch", "true"),
            ("resourceVersion", self._version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(max(1, int(silence_s - SERVER_TIMEOUT_MARGIN_S)))),
        ]
        begun_us = self._clock.monotonic_us()
        async with self._transport.stream_lines(self._path, query, silence_s=silence_s) as lines:
            async for line in lines:
                change = self._read(line)
                self._record_success()
                if change is not None:
                    yield change
        # If a proxy ends each watch at once, back off.
        if self._clock.monotonic_us() - begun_us < 1_000_000:
            raise ClusterError(Unreachable("the watch ended at once"))
        self._record_success()

    def _read(self, line: bytes) -> Change | None:
        try:
            event: dict[str, Any] = decode_any(line)
            kind, obj = event["type"], event["object"]
            if kind == "ERROR":
                raise ClusterError(failure_from_event(obj))
            metadata = obj["metadata"]
            version = metadata["resourceVersion"]
            change: Change | None = None
            if kind in ("ADDED", "MODIFIED"):
                Ref.of(obj)
                change = Upsert(obj)
            elif kind == "DELETED":
                change = Deleted(Ref.of(obj), metadata.get("uid", ""), version)
        except (ValueError, KeyError, TypeError) as error:  # a broken connection may end in half a line
            raise ClusterError(Unreachable(f"not an event: {line[:80]!r}")) from error
        self._version = version
        return change

    def _log_recovery(self) -> None:
        if self._trouble is not None:
            _LOG.info("%s is watched again", self._path)
        self._trouble = None

    def _record_success(self) -> None:
        """Reset the back-off. Call it only after a watch: if each list expires at once, the back-off must grow."""
        self._log_recovery()
        self._failures = 0

    async def _back_off(self, api_failure: ApiFailure) -> None:
        if isinstance(api_failure, Expired):
            _LOG.info("%s: %s; all objects are listed again", self._path, api_failure)
            self._version = ""
        elif self._trouble is None and self._failures > 0:
            _LOG.warning("%s is not watched: %s", self._path, api_failure)
            self._trouble = api_failure
        self._failures += 1
        pause_s = WATCH_BACKOFF.delay_s(self._failures, self._luck())
        await self._clock.sleep(max(pause_s, api_failure.retry_after_s if isinstance(api_failure, Busy) else 0.0))
