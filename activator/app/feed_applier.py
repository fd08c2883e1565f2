"""Apply lines of the feed to the queue, the routing table, the budgets and the sessions with replicas."""

import asyncio

from activator.limits.tenant_budgets import TenantBudgets
from activator.queue.throttler import Throttler
from activator.routing.routing_table import RoutingTable
from activator.upstream.replica_sessions import ReplicaSessions
from kelvin.contracts.serving.control_messages import Feed, ReplicaRow


class FeedApplier:
    """Applies lines of the feed to all parts that follow it."""

    def __init__(
        self, throttler: Throttler, table: RoutingTable, budgets: TenantBudgets, replica_sessions: ReplicaSessions
    ) -> None:
        self._throttler = throttler
        self._table = table
        self._budgets = budgets
        self._replica_sessions = replica_sessions
        self.tenants_changed = asyncio.Event()

    def apply(self, line: Feed) -> None:
        """Apply a line of the feed. Waiting requests get their replicas first."""
        self._throttler.apply(line)
        self._table.apply(line)
        self._budgets.apply(line)
        if line.full or line.removed_replicas:
            self._replica_sessions.retain(self._throttler.replica_addresses())
        if line.tenants:
            self.tenants_changed.set()

    def apply_replica(self, row: ReplicaRow) -> None:
        """Apply a replica's row that is no line of the feed."""
        self.apply(Feed(revision=self._table.revision, replicas=(row,)))
