"""Measure the control plane's registry, feed and autoscaler with many models, in the database of the argument.

`{"fill": N}` registers models, as pushes would, until there are N; the answer comes when all are durable. `{"active":
A, "ticks": T}` is answered with memory and CPU time of a tick. Send it once per process: memory freed by one
measurement would distort the next. The first A models have one replica each and a constant load. The replicas are only
counted, and an activator's report is made for each second. Time is virtual; CPU time is measured.
"""

import asyncio
import gc
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from coldstart_bench.harness.process_stats import pss_of
from coldstart_bench.harness.synthetic_fleet import (
    CREATED_S,
    model_of,
    registration_of,
    tenant_of,
    tenants_of,
    version_of,
)
from coldstart_bench.programs.json_lines import answer_lines
from controlplane.audit.audit_rows import INSTALLATION_ACTOR
from controlplane.db.database import Database, open_database
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.registry.registry import Registry
from controlplane.registry.tenant_store import TenantStore
from controlplane.scaling.kpa.autoscaler import Autoscaler
from controlplane.scaling.policy.breakeven import Level, LevelChange
from controlplane.scaling.policy.kpa import TICK_S
from controlplane.tasks import Tasks
from kelvin.contracts.serving.control_messages import ConcurrencyStat, Stats


async def register(database: Database, models: int) -> None:
    """Register models until there are `models`. Existing ones stay."""
    feed = FeedHub()
    tenants, registry = TenantStore(database, feed), Registry(database, feed)
    await registry.load()
    known = {tenant.tenant for tenant in await tenants.all_tenants(CREATED_S)}
    for tenant in tenants_of(models):
        if tenant not in known:
            await tenants.create(INSTALLATION_ACTOR, tenant, CREATED_S)
    for number in range(len(registry.all_models()), models):
        await registry.register(registration_of(number), CREATED_S)


class FakeActuator:
    """Reports one replica of each used version, whatever is applied."""

    def __init__(self, used: Sequence[VersionKey]) -> None:
        self._used = dict.fromkeys(used)
        self.applied: dict[VersionKey, int] = {}
        self.slots = None

    def apply(self, key: VersionKey, replicas: int, requested_us: int) -> None:
        self.applied[key] = replicas

    def sleep(self, key: VersionKey, level: Level) -> None:
        self.applied[key] = 0

    def ready_count(self, key: VersionKey) -> int:
        return int(key in self._used)

    live_count = started_count = process_count = ready_count

    def active_versions(self) -> tuple[VersionKey, ...]:
        return tuple(self._used)

    def has_room(self) -> bool:
        return True

    def leaving_count(self) -> int:
        return 0


class SettableClock:
    """A clock that tests and benches set."""

    def __init__(self) -> None:
        self.now_us = 1_000_000

    def monotonic_us(self) -> int:
        return self.now_us

    def wall_s(self) -> int:
        return 1_700_000_000

    async def sleep(self, seconds: float) -> None:
        self.now_us += int(seconds * 1e6)


def _unpriced(model: Model, version: Version) -> Sequence[LevelChange]:
    return (LevelChange(Level.WARM, 0.0),)


async def measured(database: Database, active: int, ticks: int) -> dict[str, Any]:
    """Return CPU seconds and bytes of loading and of ticks."""
    feed, clock = FeedHub(), SettableClock()
    registry = Registry(database, feed)
    gc.collect()
    before = pss_of(os.getpid())
    began = time.process_time()
    await registry.load()
    load_s = time.process_time() - began
    gc.collect()
    grown = pss_of(os.getpid()) - before
    used = [VersionKey(tenant_of(n), model_of(n), version_of(n)) for n in range(active)]
    actuator = FakeActuator(used)
    every = tuple(
        ConcurrencyStat(tenant=key.tenant, model=key.model, version=key.version, concurrency=1.0, requests=1)
        for key in used
    )
    took = []
    async with Tasks() as tasks:
        scaler = Autoscaler(registry, actuator, clock, tasks, _unpriced, feed)
        for _ in range(ticks):
            for _ in range(int(TICK_S)):
                clock.now_us += 1_000_000
                scaler.observe(Stats(activator="activator-0", stats=every))
            began = time.process_time()
            scaler.tick()
            took.append(time.process_time() - began)
    decided = sum(replicas == 1 for replicas in actuator.applied.values())
    return {
        "models": len(registry.all_models()), "decided": decided, "load_s": load_s, "ticks_s": took, "bytes": grown,
    }  # fmt: skip


def main(path: Path) -> None:
    """Answer lines until stdin ends."""
    with closing(open_database(path)) as database:

        def answer(fill: int | None = None, active: int = 0, ticks: int = 0) -> dict[str, Any]:
            if fill is None:
                return asyncio.run(measured(database, active, ticks))
            asyncio.run(register(database, fill))
            return {"models": fill}

        answer_lines(answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
