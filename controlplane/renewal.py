"""Orders to replace every replica of a model by a new one, one after another. One order at a time for each model.

How many replicas there are stays the autoscaler's to say: an order changes which ones they are. It is kept in memory:
a control plane that dies takes it along, and the next one adopts every replica, old or new, that lives.
"""

import logging
import secrets
from dataclasses import dataclass, field
from typing import Final

from contracts.errors import Conflict, Failure, Refused
from contracts.problem import code_of
from contracts.traffic_errors import Overloaded
from controlplane.answers import Renewal
from controlplane.clock import Clock
from controlplane.facts import Model, VersionKey
from controlplane.policy.renewal import Due, Step, step
from controlplane.policy.replica_life import ReplicaState
from controlplane.replicas import Replica, ReplicaTable
from controlplane.scaling.fleet import Fleet
from controlplane.scaling.local import RESTORE_S, LocalActuator
from controlplane.scaling.relief import LAST_S
from controlplane.tasks import Tasks

log = logging.getLogger(__name__)

POLL_S: Final = 0.05
NONE: Final = Renewal(order="", state="none", replicas=0, replaced=0)


@dataclass(slots=True)
class _Order:
    """One order. `failures` are the last ones of starts, by version."""

    name: str
    model: str
    old: dict[str, VersionKey]
    replaced: int = 0
    reason: str | None = None
    is_over: bool = False
    failures: dict[VersionKey, Failure] = field(default_factory=dict)

    def told(self) -> Renewal:
        """As the API says it."""
        counts = (len(self.old), self.replaced)
        if not self.is_over:
            return Renewal(self.name, "running", *counts)
        return Renewal(self.name, "done" if self.reason is None else "failed", *counts, self.reason)


class Renewals:
    """Also the actuator's listener: why a start failed is the order's answer."""

    def __init__(self, fleet: Fleet, actuator: LocalActuator, drain_s: float) -> None:
        self._fleet = fleet
        self._table: ReplicaTable = fleet.table
        self._actuator = actuator
        self._clock: Clock = fleet.clock
        self._tasks: Tasks = fleet.tasks
        self._limit_s = 2 * (RESTORE_S + drain_s + LAST_S)
        self._orders: dict[tuple[str, str], _Order] = {}  # the last of each model

    def __repr__(self) -> str:
        return f"<Renewals running={sum(not order.is_over for order in self._orders.values())}>"

    def state(self, model: Model) -> Renewal:
        """How the model's last order goes, or went, under this control plane."""
        order = self._orders.get((model.tenant, model.model))
        return NONE if order is None else order.told()

    def check(self, model: Model) -> None:
        """Raises Refused(Conflict) while an order for the model runs."""
        last = self._orders.get((model.tenant, model.model))
        if last is not None and not last.is_over:
            so_far = f"{last.replaced} of {len(last.old)} replicas are replaced"
            raise Refused(Conflict(f"model '{model.model}'", f"is being restarted already; {so_far}"))

    def begin(self, model: Model) -> Renewal:
        """Replace all that is there now. Raises as `check`."""
        self.check(model)
        old = {
            replica.runtime_id: version.key
            for version in model.versions
            for replica in self._table.of(version.key)
            if replica.state not in (ReplicaState.DRAINING, ReplicaState.ENDING)
        }
        order = self._orders[model.tenant, model.model] = _Order(f"o{secrets.token_hex(6)}", model.model, old)
        log.info("a restart is ordered", extra={"model": model.model, "order": order.name, "replicas": len(old)})
        self._tasks.start(self._run(order), f"restart {model.model}", for_nobody=True)
        return order.told()

    def ready(self, replica: Replica) -> None:
        """Seen in the table."""

    def failed(self, key: VersionKey, failure: Failure) -> None:
        """It may be why none took a place."""
        for order in self._orders.values():
            if not order.is_over and key in order.old.values():
                order.failures[key] = failure

    def lost(self, replica: Replica) -> None:
        """Seen in the table."""

    async def _run(self, order: _Order) -> None:
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

    async def _replace(self, order: _Order, runtime_id: str, key: VersionKey) -> None:
        """Returns once it is dead and another one serves. Raises Refused: why none does."""
        limit_us = self._clock.monotonic_us() + int(self._limit_s * 1e6)
        relieved, beside, before = False, True, 0
        while True:
            state = self._table[runtime_id].state if runtime_id in self._table else None
            new, failure = self._new(order, key), order.failures.get(key)
            due = Due(state, relieved, self._table.coming(key), relieved and new > before, failure is not None)
            match step(due):
                case Step.OVER:
                    return
                case Step.END:
                    self._fleet.end(self._fleet[runtime_id])
                case Step.RELIEVE:
                    order.failures.pop(key, None)
                    relieved, before = True, new
                    beside = self._relieve(runtime_id, beside)
                case Step.FAILED if beside and failure is not None and code_of(failure) == Overloaded.code:
                    relieved, beside = False, False  # memory does not hold two of them: one after the other
                case Step.FAILED:
                    raise Refused(failure or Conflict("the new replica", "was not ready; the one before it stays"))
                case Step.WAIT if self._clock.monotonic_us() > limit_us:
                    raise Refused(Conflict("a replica", f"was not replaced within {self._limit_s:.0f} s"))
                case Step.WAIT:
                    pass
            await self._clock.sleep(POLL_S)

    def _relieve(self, runtime_id: str, beside: bool) -> bool:
        """Whether the other one comes beside it."""
        if beside and self._actuator.has_room():
            self._actuator.relieve(runtime_id, beside=True)
            return True
        self._actuator.relieve(runtime_id, beside=False)
        return False

    def _new(self, order: _Order, key: VersionKey) -> int:
        """Replicas that are ready and were not there when the order came."""
        return sum(
            each.state is ReplicaState.READY and each.runtime_id not in order.old for each in self._table.of(key)
        )
