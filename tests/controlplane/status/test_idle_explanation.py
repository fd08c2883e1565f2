"""The status says what follows an idle level, and the autoscaler does that. In virtual time."""

import pytest

from controlplane.billing.price_book import default_price_book
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.breakeven import Level
from controlplane.scaling.policy.eta import RestoreHistory
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.replicas import Replica, ReplicaTable
from controlplane.scaling.warmth.warmth_cost import WarmthCost
from controlplane.status.idle_explanation import explain_idle
from tests.controlplane.scaling.autoscaler_fixture import (
    FAST,
    AutoscalerScenario,
    replace_scale,
    running_autoscaler,
    wake_version,
)


def _next(w: AutoscalerScenario, which: VersionKey) -> str | None:
    """Return the level that the status announces for a version with one warm replica."""
    table = ReplicaTable(8)
    table.add(Replica("r", ReplicaState.READY, 0, key=which))
    warmth_cost = WarmthCost(default_price_book(), RestoreHistory(), w.clock, kv_bytes=0, memory_price=1.0)
    found = w.catalogue.find(which)
    assert found is not None
    versions = explain_idle(found[0], table, w.scaler, warmth_cost, w.clock).versions
    return next(each.next_level for each in versions if each.version == which.version)


@pytest.mark.parametrize("idle", ["zero", "sleep", "sleep2", "warm", "auto"])
@pytest.mark.parametrize("minimum", [0, 1])
async def test_version_without_a_name_goes_to_zero(idle: str, minimum: int) -> None:
    """A model's idle setting and minimum apply only to versions with an alias or a split."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, idle=idle, min=minimum))
        await wake_version(w, which)
        w.catalogue.deploy("m", "b")
        assert _next(w, which) == Level.ZERO
        await w.pass_seconds(14)
        assert w.actuator.ready_count(which) == 0


async def test_minimum_that_does_not_hold_keeps_nothing() -> None:
    """A stopped version's minimum does not hold until the next request. Control: before the stop it does."""
    async with running_autoscaler() as w:
        which = w.catalogue.add("m", replace_scale(FAST, min=1))
        await wake_version(w, which)
        assert _next(w, which) is None
        w.catalogue.set_stopped(which, 1)
        assert _next(w, which) == Level.ZERO
