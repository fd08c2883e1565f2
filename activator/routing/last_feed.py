"""Keep the last feed on disk, so that an activator can start while the control plane is away.

The file contains digests of API keys, no keys. It is written atomically with mode 0600, after a change at most every
`WRITE_INTERVAL_S`. Without changes it is written every `REWRITE_INTERVAL_S`, because it records when the control plane
was last connected.

A feed older than `max_age_s`, on disk or in memory, is not used. That bounds how long a cut-off activator accepts a
revoked key. Within one boot, the file's age is measured by the monotonic clock, so a step of the wall clock does not
change it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from activator import dependencies
from activator.routing.routing_table import RoutingTable
from kelvin.contracts.serving.control_messages import Feed, ReplicaRow
from kelvin.contracts.wire import BadJson, Wire, decoder, encode
from kelvin.ipc.peer_settings import is_remote
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.atomic_file import remove_pending_files, write_atomic
from kelvin.process.procfs import boot_id

log = logging.getLogger(__name__)

NAME: Final = "feed"
FORMAT: Final = 1
WRITE_INTERVAL_S: Final = 2.0
REWRITE_INTERVAL_S: Final = 30.0
CLOCK_STEP_S: Final = 60.0  # tolerated backward step of the wall clock between two boots


class _StoredFeed(Wire, frozen=True):
    """The content of the file."""

    format: int
    heard_at_s: Annotated[float, Meta(ge=0)]  # seconds since 1970
    feed: Feed
    boot: str = ""  # id of the boot in which it was heard; "" if unknown
    heard_monotonic_s: float | None = None  # all processes of one boot share the monotonic clock


class LastFeed:
    """Receives each feed message after the routing table, and writes the file. Use from one event loop."""

    def __init__(
        self,
        directory: SocketDirectory,
        table: RoutingTable,
        max_age_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._path = directory.path / NAME
        self._table = table
        self._max_age_s = max_age_s
        self._clock = clock
        self._wall_s = wall_s
        self._boot = boot_id()
        self._received_s: float | None = None  # on `clock`
        self._replicas: dict[str, ReplicaRow] = {}
        self._written_s = float("-inf")
        self._due = asyncio.Event()
        self._is_failing = False

    def __repr__(self) -> str:
        return f"<LastFeed age={self.age_s():.1f} s of {self._max_age_s:g}>"

    def age_s(self) -> float:
        """Return the seconds since this process or its predecessor heard the control plane; inf if never."""
        return float("inf") if self._received_s is None else max(0.0, self._clock() - self._received_s)

    def is_fresh(self) -> bool:
        """Return whether the feed is recent enough to admit requests."""
        return self._received_s is not None and self._clock() - self._received_s <= self._max_age_s

    def record_received(self, feed: Feed) -> None:
        """Record a message from the control plane. A message without rows confirms that nothing has changed."""
        self._received_s = self._clock()
        self._apply_replicas(feed)
        if feed != Feed(revision=feed.revision) or self._received_s - self._written_s >= REWRITE_INTERVAL_S:
            self._due.set()

    def record_local_change(self, feed: Feed) -> None:
        """Record a change that this activator found out itself. It does not make the feed fresher."""
        self._apply_replicas(feed)
        self._due.set()

    def try_load(self) -> Feed | None:
        """Return the predecessor's last feed as a snapshot, without local replicas that no longer listen. Return None
        if there is none, or it is too old. Reads the disk and connects to each local replica.
        """
        try:
            stored = decoder(_StoredFeed).decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, BadJson) as error:
            log.warning("the feed that was kept can't be read", extra={"error": str(error)})
            return None
        age_s = self._age_on_disk_s(stored)
        if stored.format != FORMAT or not -CLOCK_STEP_S <= age_s <= self._max_age_s:
            log.warning("the feed that was kept does not count", extra={"format": stored.format, "age_s": int(age_s)})
            return None
        self._received_s = self._clock() - max(0.0, age_s)
        replicas = tuple(row for row in stored.feed.replicas if self._is_listening(row))
        feed = msgspec.structs.replace(stored.feed, full=True, replicas=replicas)
        self._apply_replicas(feed)
        log.warning("no control plane answers; going on from the feed that was kept", extra={"age_s": int(age_s)})
        return feed

    async def run(self) -> None:
        """Write pending changes until cancelled."""
        await asyncio.to_thread(remove_pending_files, self._path.parent, NAME)
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self._write()
            except Exception:
                self._due.set()  # try again later, whatever failed
                raise
            await asyncio.sleep(WRITE_INTERVAL_S)

    async def _write(self) -> None:
        """Write the file in a thread, because the disk may be slow. Only the rows are collected on the event loop."""
        feed = msgspec.structs.replace(self._table.snapshot(), replicas=tuple(self._replicas.values()))
        self._written_s = self._clock()
        stored = _StoredFeed(FORMAT, self._wall_s() - self.age_s(), feed, self._boot, self._received_s)
        try:
            await asyncio.to_thread(lambda: write_atomic(self._path, encode(stored), 0o600))
        except OSError as error:
            if not self._is_failing:
                log.warning("the feed can't be written to disk", extra={"error": str(error)})
            self._is_failing = True
            self._due.set()
        else:
            self._is_failing = False

    def _age_on_disk_s(self, stored: _StoredFeed) -> float:
        if self._boot and stored.boot == self._boot and stored.heard_monotonic_s is not None:
            age_s = self._clock() - stored.heard_monotonic_s
            if age_s >= 0:  # otherwise another clock: a container may have its own monotonic clock
                return age_s
        return self._wall_s() - stored.heard_at_s

    def _apply_replicas(self, feed: Feed) -> None:
        if feed.full:
            self._replicas.clear()
        for runtime_id in feed.removed_replicas:
            self._replicas.pop(runtime_id, None)
        self._replicas.update((row.runtime_id, row) for row in feed.replicas)

    def _is_listening(self, row: ReplicaRow) -> bool:
        if is_remote(row.address):
            return True  # a remote host may not answer: leave it to the first attempt, which can use other replicas
        try:
            self._directory.connect(row.address, timeout_s=dependencies.REPLICA.timeout_s).close()
        except (OSError, ValueError):
            return False
        return True
