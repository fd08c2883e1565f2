"""The feed: the whole state once, then every change in order, to any number of activators. Rows come from others.

A reader that falls behind is cut rather than waited for: memory stays bounded, and the reader starts again from a
snapshot. Failures and forecasts of starts under way are news, not state: a snapshot holds none.
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
DRAIN_DELIVERY_LIMIT_S: Final = 2.0  # for activators to hear that a replica leaves
RECONNECT_S: Final = 3.0  # a reader that left: longer than one whose feed broke takes to come back


class FellBehind(Exception):
    """The reader was cut; it must subscribe again and take the snapshot."""


class FeedEnded(Exception):
    """The control plane is ending; nothing comes after the lines that were taken."""


class Subscription:
    """One reader's place in the feed. `take` and `sent` alternate."""

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
        """Queue a line, or cut the reader where its queue is full."""
        if len(self._lines) >= self._max_lines:
            self._lines.clear()
            self.is_cut = True
        if not self.is_cut:
            self._lines.append((revision, line))
        self._has_lines.set()

    def end(self) -> None:
        """Nothing follows what is queued."""
        self.is_over = True
        self._has_lines.set()

    async def take(self, heartbeat_s: float = HEARTBEAT_S) -> bytes:
        """The next line, newline included; a heartbeat after `heartbeat_s` of silence.

        Raises FellBehind where the reader was cut, FeedEnded after the last line.
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

    def sent(self) -> None:
        """What was taken last is with the reader's socket."""
        self.sent_revision = max(self.sent_revision, self._taken)
        self._hub.notify_progress()


class FeedHub:
    """Owns the rows and the revision. Everything is one event loop's: a publication is in every queue on return."""

    def __init__(self, max_lines: int = MAX_LINES, machine: Machine | None = None) -> None:
        self._machine = machine
        self._revision = 1
        self._tenants: dict[str, TenantRow] = {}
        self._keys: dict[str, KeyRow] = {}
        self._models: dict[tuple[str, str], ModelRow] = {}
        self._versions: dict[tuple[str, str, str], VersionRow] = {}
        self._replicas: dict[str, ReplicaRow] = {}
        self._starts: dict[tuple[str, str, str], StartRow] = {}  # of versions without a replica
        self._spending: dict[str, SpendingRow] = {}
        self._revisions: dict[tuple[str, str, str], RevisionRow] = {}
        self._pools: tuple[PoolRow, ...] = ()
        self._start_problems: dict[tuple[str, str, str], StartProblemRow] = {}
        self._subscriptions: set[Subscription] = set()
        self._recently_left: dict[
            str, float
        ] = {}  # named readers that left: until when they are remembered, by the loop
        self._max_lines = max_lines
        self._progress = asyncio.Event()
        self._is_over = False

    def __repr__(self) -> str:
        return (
            f"<FeedHub revision={self._revision} models={len(self._models)} replicas={len(self._replicas)} "
            f"readers={len(self._subscriptions)} away={len(self._recently_left)}>"
        )

    def publish(self, change: Feed) -> int:
        """Take the rows over and tell every reader. Returns the revision that holds them."""
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
        """All rows as they are."""
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
        """Return how many readers are here, or left so recently that they are expected back."""
        self._drop_expired()
        return len(self._subscriptions) + len(self._recently_left)

    def is_suspended(self, tenant: str) -> bool:
        """Whether its keys are refused."""
        row = self._tenants.get(tenant)
        return row is not None and row.suspended

    def reader_names(self) -> set[str]:
        """Return the names of the readers that are here, or left so lately that they are expected back."""
        self._drop_expired()
        return {each.name for each in self._subscriptions if each.name} | set(self._recently_left)

    def weight(self, tenant: str) -> int:
        """Return the tenant's weight beside others."""
        row = self._tenants.get(tenant)
        return 1 if row is None or row.limits.weight is None else row.limits.weight

    def has_budget(self, tenant: str) -> bool:
        """Return whether the tenant has a budget of its own."""
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
        """Return why the version (tenant, model, digest) does not start, where that was published."""
        row = self._start_problems.get(version)
        return None if row is None else row.problem

    def heartbeat(self) -> bytes:
        """A line that says no more than that we live."""
        return encode(Feed(revision=self._revision)) + b"\n"

    @contextmanager
    def subscribe(self, name: str = "") -> Iterator[Subscription]:
        """A reader, from a snapshot on, for as long as the block lasts. One with a name of its own, that leaves before
        the feed ends, is expected back for RECONNECT_S.
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
        """End every reader's feed once it was sent what is queued. A reader that comes later gets the snapshot alone:
        activators come again at once, and the server may still take connections then.
        """
        self._is_over = True
        for subscription in self._subscriptions:
            subscription.end()

    async def wait_until_delivered(self, revision: int, timeout_s: float) -> bool:
        """Wait until every reader was sent `revision`, readers included that left under a name moments ago and are
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
        return bool(self._recently_left) or any(
            each.name or not each.is_cut for each in lag
        )  # who was cut and is named returns

    def _drop_expired(self) -> None:
        """Forget readers that have been away for so long that they are not expected back."""
        if self._recently_left:
            now_s = asyncio.get_running_loop().time()
            self._recently_left = {name: until_s for name, until_s in self._recently_left.items() if until_s > now_s}

    def notify_progress(self) -> None:
        """A reader came on or left."""
        self._progress.set()
