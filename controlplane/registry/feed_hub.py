"""Publish the feed: a snapshot of all state, then every change in order, to any number of activators.

A reader that falls behind is cut off. So memory stays bounded, and the reader starts again from a snapshot. Other
stores supply the rows. Failures and forecasts of starts in progress are events, not state: a snapshot holds none.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from msgspec.structs import replace

from kelvin.contracts.accounting.spending import SpendingRow
from kelvin.contracts.serving.control_messages import (
    Feed,
    KeyRow,
    ModelRow,
    PoolRow,
    ReplicaRow,
    RevisionRow,
    StartProblem,
    StartProblemRow,
    TenantRow,
    VersionRow,
)
from kelvin.contracts.serving.machine import Machine
from kelvin.contracts.serving.start_forecast import StartRow
from kelvin.contracts.wire import encode

MAX_LINES: Final = 1024
HEARTBEAT_S: Final = 5.0
DRAIN_DELIVERY_LIMIT_S: Final = 2.0  # limit for delivering to activators that a replica drains
RECONNECT_S: Final = 3.0  # a reader that left is expected back for so long: longer than a reconnect takes


class FellBehind(Exception):
    """The reader was cut off. It must subscribe again and take the snapshot."""


class FeedEnded(Exception):
    """The control plane is ending. No line follows those that were taken."""


class Subscription:
    """One reader's position in the feed. Calls of `next_line` and `record_sent` alternate."""

    def __init__(self, hub: "FeedHub", snapshot: bytes, revision: int, max_lines: int, name: str = "") -> None:
        self._hub = hub
        self.name = name
        self._lines: deque[tuple[int, bytes]] = deque([(revision, snapshot)])
        self._max_lines = max_lines
        self._has_lines = asyncio.Event()
        self._has_lines.set()
        self._taken = 0
        self.sent_revision = 0
        self.is_cut = False
        self.is_over = False

    def __repr__(self) -> str:
        return f"<Subscription sent={self.sent_revision} waiting={len(self._lines)} cut={self.is_cut}>"

    def offer(self, revision: int, line: bytes) -> None:
        """Queue a line, or cut the reader off if its queue is full."""
        if len(self._lines) >= self._max_lines:
            self._lines.clear()
            self.is_cut = True
        if not self.is_cut:
            self._lines.append((revision, line))
        self._has_lines.set()

    def end(self) -> None:
        """End the feed after the queued lines."""
        self.is_over = True
        self._has_lines.set()

    async def next_line(self, heartbeat_s: float = HEARTBEAT_S) -> bytes:
        """Return the next line with its newline, or a heartbeat after `heartbeat_s` without one.

        Raises FellBehind if the reader was cut off, FeedEnded after the last line.
        """
        try:
            async with asyncio.timeout(heartbeat_s):
                await self._has_lines.wait()
        except TimeoutError:
            return self._hub.heartbeat()
        if self.is_cut:
            raise FellBehind
        if not self._lines:
            raise FeedEnded
        self._taken, line = self._lines.popleft()
        if not self._lines and not self.is_over:
            self._has_lines.clear()
        return line

    def record_sent(self) -> None:
        """Note that the last taken line was written to the reader's socket."""
        self.sent_revision = max(self.sent_revision, self._taken)
        self._hub.notify_progress()


class FeedHub:
    """Owns the rows and the feed's revision. Use it from one event loop. `publish` returns once all queues have it."""

    def __init__(self, max_lines: int = MAX_LINES, machine: Machine | None = None) -> None:
        self._machine = machine
        self._revision = 1
        self._tenants: dict[str, TenantRow] = {}
        self._keys: dict[str, KeyRow] = {}
        self._models: dict[tuple[str, str], ModelRow] = {}
        self._versions: dict[tuple[str, str, str], VersionRow] = {}
        self._replicas: dict[str, ReplicaRow] = {}
        self._starts: dict[tuple[str, str, str], StartRow] = {}  # for versions without a ready replica
        self._spending: dict[str, SpendingRow] = {}
        self._revisions: dict[tuple[str, str, str], RevisionRow] = {}
        self._pools: tuple[PoolRow, ...] = ()
        self._start_problems: dict[tuple[str, str, str], StartProblemRow] = {}
        self._subscriptions: set[Subscription] = set()
        self._recently_left: dict[
            str, float
        ] = {}  # named readers that left -> when they stop being expected back, in loop time
        self._max_lines = max_lines
        self._progress = asyncio.Event()
        self._is_over = False

    def __repr__(self) -> str:
        return (
            f"<FeedHub revision={self._revision} models={len(self._models)} replicas={len(self._replicas)} "
            f"readers={len(self._subscriptions)} away={len(self._recently_left)}>"
        )

    def publish(self, change: Feed) -> int:
        """Apply the change and queue it for every reader. Return the revision that holds it."""
        self._tenants.update((row.tenant, row) for row in change.tenants)
        self._keys.update((row.key_id, row) for row in change.keys)
        self._models.update(((row.tenant, row.model), row) for row in change.models)
        self._versions.update(((row.tenant, row.model, row.version), row) for row in change.versions)
        self._replicas.update((row.runtime_id, row) for row in change.replicas)
        self._starts.update(((row.tenant, row.model, row.version), row) for row in change.starts)
        self._spending.update((row.tenant, row) for row in change.spending)
        self._revisions.update(((row.tenant, row.model, row.version), row) for row in change.revisions)
        self._pools = change.pools or self._pools
        self._start_problems.update(((row.tenant, row.model, row.version), row) for row in change.start_problems)
        for replica in change.replicas:
            if not (replica.draining or replica.unproven):
                self._starts.pop((replica.tenant, replica.model, replica.version), None)
        for tenant in change.removed_tenants:
            self._tenants.pop(tenant, None)
            self._spending.pop(tenant, None)
        for key_id in change.removed_keys:
            self._keys.pop(key_id, None)
        for runtime_id in change.removed_replicas:
            self._replicas.pop(runtime_id, None)
        for model in change.removed_models:
            self._models.pop(model, None)
        for version in change.removed_versions:
            self._versions.pop(version, None)
            self._starts.pop(version, None)
        for version in (*change.removed_versions, *change.removed_revisions):
            self._revisions.pop(version, None)
        for version in (*change.removed_versions, *change.removed_start_problems):
            self._start_problems.pop(version, None)
        self._revision += 1
        line = encode(replace(change, revision=self._revision)) + b"\n"
        for subscription in self._subscriptions:
            subscription.offer(self._revision, line)
        return self._revision

    def snapshot(self) -> Feed:
        """Return all rows, with the current revision."""
        return Feed(
            revision=self._revision,
            full=True,
            tenants=tuple(self._tenants.values()),
            keys=tuple(self._keys.values()),
            models=tuple(self._models.values()),
            versions=tuple(self._versions.values()),
            replicas=tuple(self._replicas.values()),
            starts=tuple(self._starts.values()),
            spending=tuple(self._spending.values()),
            revisions=tuple(self._revisions.values()),
            pools=self._pools,
            start_problems=tuple(self._start_problems.values()),
            machine=self._machine,
        )

    @property
    def readers(self) -> int:
        """The number of readers that are connected, or left so recently that they are expected back."""
        self._drop_expired()
        return len(self._subscriptions) + len(self._recently_left)

    def is_suspended(self, tenant: str) -> bool:
        """Return whether the tenant is suspended, so that its keys are refused."""
        row = self._tenants.get(tenant)
        return row is not None and row.suspended

    def reader_names(self) -> set[str]:
        """Return the names of readers that are connected, or left so recently that they are expected back."""
        self._drop_expired()
        return {each.name for each in self._subscriptions if each.name} | set(self._recently_left)

    def weight(self, tenant: str) -> int:
        """Return the tenant's weight for fair sharing."""
        row = self._tenants.get(tenant)
        return 1 if row is None or row.limits.weight is None else row.limits.weight

    def has_budget(self, tenant: str) -> bool:
        """Return whether the tenant has a budget."""
        row = self._tenants.get(tenant)
        return row is not None and row.limits.budget_micros is not None

    def budgets(self) -> list[str]:
        """Return the tenants that have a budget, by name."""
        return sorted(tenant for tenant in self._tenants if self.has_budget(tenant))

    def is_spent(self, tenant: str) -> bool:
        """Return whether the tenant's budget of this month is spent, as far as the ledger was read."""
        row, spending = self._tenants.get(tenant), self._spending.get(tenant)
        if row is None or row.limits.budget_micros is None or spending is None:
            return False
        return spending.spent_micros >= row.limits.budget_micros

    def start_problem(self, version: tuple[str, str, str]) -> StartProblem | None:
        """Return why the version (tenant, model, digest) does not start, if that was published."""
        row = self._start_problems.get(version)
        return None if row is None else row.problem

    def heartbeat(self) -> bytes:
        """Return a line without changes, which shows that the control plane lives."""
        return encode(Feed(revision=self._revision)) + b"\n"

    @contextmanager
    def subscribe(self, name: str = "") -> Iterator[Subscription]:
        """Subscribe a reader, beginning with a snapshot, until the block is left. A named reader that leaves before the
        feed ends is expected back for RECONNECT_S.
        """
        subscription = Subscription(self, encode(self.snapshot()) + b"\n", self._revision, self._max_lines, name)
        self._subscriptions.add(subscription)
        self._recently_left.pop(name, None)
        if self._is_over:
            subscription.end()
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            if name and not subscription.is_over and all(each.name != name for each in self._subscriptions):
                self._drop_expired()
                self._recently_left[name] = asyncio.get_running_loop().time() + RECONNECT_S
            self.notify_progress()

    def end(self) -> None:
        """End every reader's feed after the queued lines. A reader that subscribes later gets only the snapshot, since
        activators reconnect at once and the server may still accept connections.
        """
        self._is_over = True
        for subscription in self._subscriptions:
            subscription.end()

    async def wait_until_delivered(self, revision: int, timeout_s: float) -> bool:
        """Wait until every reader was sent `revision`. That includes named readers that left moments ago and are
        expected back.

        Return False after `timeout_s`: some reader may not have it.
        """
        now_s = asyncio.get_running_loop().time
        end_s = now_s() + timeout_s
        while self._is_behind(revision):
            if now_s() >= end_s:
                return False
            self._progress.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min((end_s, *self._recently_left.values()))):
                    await self._progress.wait()
        return True

    def _is_behind(self, revision: int) -> bool:
        self._drop_expired()
        lag = (each for each in self._subscriptions if each.sent_revision < revision)
        # A named reader that was cut off comes back.
        return bool(self._recently_left) or any(each.name or not each.is_cut for each in lag)

    def _drop_expired(self) -> None:
        """Forget readers that are no longer expected back."""
        if self._recently_left:
            now_s = asyncio.get_running_loop().time()
            self._recently_left = {name: until_s for name, until_s in self._recently_left.items() if until_s > now_s}

    def notify_progress(self) -> None:
        """Wake `wait_until_delivered`, because a reader was sent a line or left."""
        self._progress.set()
