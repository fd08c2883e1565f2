"""Replace running replicas: all of a model's when an operator orders it, and those whose memory is damaged.

`policy/replacement_steps.py` decides the next step of each, and `local_actuator.py` carries it out. The autoscaler
decides how many replicas there are; a replacement only changes which ones. Orders are kept in memory. If the control
plane dies, its orders are lost, and the next one adopts every live replica, old or new.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from controlplane.api.types.admin_types import Renewal
from controlplane.registry.policy.domain import Model, VersionKey
from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.local.local_actuator import RESTORE_S, LocalActuator
from controlplane.scaling.policy.replacement_steps import (
    ReplacedReplica,
    ReplacementStep,
    choose_step_if_damaged,
    next_replacement_step,
)
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.replicas import Replica
from kelvin.contracts.errors import Conflict, Failure, Refused
from kelvin.process.loops import contain_errors
from kelvin.telemetry.policy.instruments import MetricsPage

log = logging.getLogger(__name__)

POLL_S: Final = 0.05
DAMAGE_POLL_S: Final = 2.0
NO_REPLACEMENT: Final = Renewal(order="", state="none", replicas=0, replaced=0)


@dataclass(slots=True)
class _ReplacementOrder:
    """One order. `failures` has the last failed start of each version."""

    name: str
    model: str
    old: dict[str, VersionKey]
    replaced: int = 0
    reason: str | None = None
    is_over: bool = False
    failures: dict[VersionKey, Failure] = field(default_factory=dict)

    def to_renewal(self) -> Renewal:
        """Return the order as the API shows it."""
        counts = (len(self.old), self.replaced)
        if not self.is_over:
            return Renewal(self.name, "running", *counts)
        return Renewal(self.name, "done" if self.reason is None else "failed", *counts, self.reason)


class ReplicaReplacement:
    """Orders to replace every replica of a model, one after another. A model has one order at a time.

    Also a listener of the actuator: if a start fails, the order fails with its reason.
    """

    def __init__(self, fleet: Fleet, actuator: LocalActuator) -> None:
        self._fleet = fleet
        self._table = fleet.table
        self._actuator = actuator
        self._clock = fleet.clock
        self._limit_s = 2 * (RESTORE_S + actuator.drain_max_s)  # for one replica
        self._orders: dict[tuple[str, str], _ReplacementOrder] = {}  # the last order of each model

    def __repr__(self) -> str:
        return f"<ReplicaReplacement running={sum(not order.is_over for order in self._orders.values())}>"

    def state(self, model: Model) -> Renewal:
        """Return the state of the model's last order under this control plane."""
        order = self._orders.get((model.tenant, model.model))
        return NO_REPLACEMENT if order is None else order.to_renewal()

    def check(self, model: Model) -> None:
        """Raise Refused(Conflict) while an order for the model runs."""
        last = self._orders.get((model.tenant, model.model))
        if last is not None and not last.is_over:
            so_far = f"{last.replaced} of {len(last.old)} replicas are replaced"
            raise Refused(Conflict(f"model '{model.model}'", f"is being restarted already; {so_far}"))

    def begin(self, model: Model) -> Renewal:
        """Begin to replace all replicas that exist now. Raises Refused(Conflict) while an order for the model runs."""
        self.check(model)
        old = {
            replica.runtime_id: version.key
            for version in model.versions
            for replica in self._table.replicas_of(version.key)
            if replica.state not in (ReplicaState.DRAINING, ReplicaState.ENDING)
        }
        order = self._orders[model.tenant, model.model] = _ReplacementOrder(
            f"o{secrets.token_hex(6)}", model.model, old
        )
        log.info("a restart is ordered", extra={"model": model.model, "order": order.name, "replicas": len(old)})
        self._fleet.tasks.start(self._run(order), f"restart {model.model}", detached=True)
        return order.to_renewal()

    def on_replica_ready(self, replica: Replica) -> None:
        """Do nothing: `_replace` polls the table."""

    def on_start_failed(self, key: VersionKey, failure: Failure) -> None:
        """Remember the failure: it may be the reason that a replacement did not come."""
        for order in self._orders.values():
            if not order.is_over and key in order.old.values():
                order.failures[key] = failure

    def on_replica_lost(self, replica: Replica) -> None:
        """Do nothing: `_replace` polls the table."""

    async def _run(self, order: _ReplacementOrder) -> None:
        try:
            for runtime_id, key in order.old.items():
                await self._replace(order, runtime_id, key)
                order.replaced += 1
        except Refused as refused:
            order.reason = refused.failure.message
        except Exception:
            order.reason = "internal error"
            raise
        finally:
            order.is_over = True
            log.info("a restart is over", extra={"model": order.model, "order": order.name, "why": order.reason})

    async def _replace(self, order: _ReplacementOrder, runtime_id: str, key: VersionKey) -> None:
        """Replace one replica. Return once it is dead and another one serves, else raise Refused (the reason)."""
        began_us, ready_before = self._clock.monotonic_us(), 0
        start_step: ReplacementStep | None = None
        while True:
            new, failure = self._count_new(order, key), order.failures.get(key)
            old = ReplacedReplica(
                state=self._table[runtime_id].state if runtime_id in self._table else None,
                start_step=start_step,
                has_room=self._actuator.has_room(),
                coming=self._table.starting_count(key),
                is_new_ready=new > ready_before,
                failure=failure,
            )
            step = next_replacement_step(old, (self._clock.monotonic_us() - began_us) / 1e6, self._limit_s)
            match step:
                case ReplacementStep.OVER:
                    return
                case ReplacementStep.FAILED:
                    raise Refused(failure or Conflict("the new replica", "was not ready; the one before it stays"))
                case ReplacementStep.LATE:
                    raise Refused(Conflict("a replica", f"was not replaced within {self._limit_s:.0f} s"))
                case ReplacementStep.BESIDE | ReplacementStep.AFTER:
                    order.failures.pop(key, None)
                    start_step, ready_before = step, new
            if step is not ReplacementStep.WAIT:
                self._actuator.carry_out(runtime_id, step)
            await self._clock.sleep(POLL_S)

    def _count_new(self, order: _ReplacementOrder, key: VersionKey) -> int:
        """Count the ready replicas that did not exist when the order was given."""
        return sum(
            each.state is ReplicaState.READY and each.runtime_id not in order.old
            for each in self._table.replicas_of(key)
        )


class DamageLoop:
    """Ends replicas whose memory is damaged. `find_damaged_pids` asks the cache agent. Each replica is told
    and counted once.
    """

    def __init__(
        self,
        find_damaged_pids: Callable[[], Awaitable[frozenset[int]]],
        fleet: Fleet,
        actuator: LocalActuator,
        page: MetricsPage,
    ) -> None:
        self._find_damaged_pids = find_damaged_pids
        self._fleet = fleet
        self._actuator = actuator
        self._handled_ids: set[str] = set()
        self._counter = page.counter("kelvin_condemned_replicas_total", "Replicas whose memory was found wrong.", ())

    async def run(self) -> None:
        """Check periodically until cancelled."""
        while True:
            await self._fleet.clock.sleep(DAMAGE_POLL_S)
            await self.end_damaged()

    async def end_damaged(self) -> None:
        """Check once. If the cache agent does not answer, the next check asks again."""
        table = self._fleet.table
        if all(choose_step_if_damaged(replica.state) is ReplacementStep.WAIT for replica in table):
            return
        try:
            pids = await self._find_damaged_pids()
        except Refused:
            return
        self._handled_ids = {runtime_id for runtime_id in self._handled_ids if runtime_id in table}
        for replica in table:
            step = choose_step_if_damaged(replica.state)
            if replica.pid not in pids or replica.runtime_id in self._handled_ids or step is ReplacementStep.WAIT:
                continue
            with contain_errors(replica.runtime_id):
                self._actuator.carry_out(replica.runtime_id, step)
                self._handled_ids.add(replica.runtime_id)
                self._counter.add(())
                fields = {"runtime_id": replica.runtime_id, "version": str(replica.key), "state": replica.state}
                log.error("a replica has memory that was found wrong", extra=fields)
