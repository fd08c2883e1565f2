"""Repairs of the control plane of one machine."""

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.registry.registry_rows import set_stops
from controlplane.scaling.kpa import minimums
from controlplane.scaling.local.local_actuator import LocalActuator
from controlplane.scaling.policy.reclaim import SlotHolder, choose_victim
from controlplane.tasks import Tasks
from kelvin.contracts.traffic_errors import Overloaded
from tests.simulation.undone import Undoing, repair


@repair(r"^a_full_machine_is_no_failed_restore")
def full_machine_is_a_failed_restore(undoing: Undoing) -> None:
    """A start that needs more device slots than there are is reported as a failed restore every two seconds, and
    replaces the last real result.
    """
    repaired = LocalActuator._begin

    def begin(self: LocalActuator, key: VersionKey, requested_us: int) -> bool:
        if not repaired(self, key, requested_us):
            self.fail_start(key, Overloaded("this machine", self.slots, 1.0))
            return False
        return True

    undoing.method(LocalActuator, "_begin", begin)


@repair(r"^loops_live")
def loop_ends_at_its_first_error(undoing: Undoing) -> None:
    """A background loop of the control plane ends at its first unexpected error. After one database error, budgets are
    never published again.
    """

    def start_loop(self: Tasks, name: str, body: Callable[[], Coroutine[Any, Any, None]], **_: object) -> None:
        self.start(body(), name)

    undoing.method(Tasks, "start_loop", start_loop)


@repair(r"^minimums_(hold|are_kept)", seed=389_707_896_248)
def minimum_of_versions_without_a_name(undoing: Undoing) -> None:
    """A minimum holds for versions without a name. After a deploy on a full machine, the old version keeps the device
    slot and the new one does not start.
    """

    def holds(model: Model, version: Version) -> bool:
        return version.stopped_at_s is None and not version.is_deleted

    undoing.name(minimums, "_holds", holds)


@repair(r"^(minimums_|what_is_in_use)", seed=632_955_920_026)
def room_is_made_below_a_minimum(undoing: Undoing) -> None:
    """Making room for a requested version takes replicas below their version's minimum. That version takes them back at
    once, and so on without end.
    """

    def choose_any(holders: Iterable[SlotHolder[VersionKey]], now: float) -> VersionKey | None:
        return choose_victim((replace(holder, minimum=0) for holder in holders), now)

    undoing.function(choose_victim, choose_any)


@repair(r"^a_restart_forgets_nothing")
def stop_is_lost_at_a_restart(undoing: Undoing) -> None:
    """A stop by an operator is kept in memory only. After a restart, the minimum starts the version again."""

    def forget_stops(connection: Connection, before: Model, model: Model) -> None:
        return

    undoing.function(set_stops, forget_stops)


@repair(r"^nothing_runs_of_suspended_tenants", seed=889_975_113_327)
def suspended_tenants_start_again(undoing: Undoing) -> None:
    """Scaling decisions ignore that a tenant is suspended. Its minimum starts its model again, and it is billed."""

    def is_suspended(self: FeedHub, tenant: str) -> bool:
        return False

    undoing.method(FeedHub, "is_suspended", is_suspended)
