"""Replica replacement on real processes. An order replaces all replicas of a model: serving ones stay as many, slots
are not exceeded, and a failure has a reason.

A replica with damaged memory is ended at once. Other replicas stay, also while the cache agent is away.
"""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from controlplane.api.types.admin_types import Renewal
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.registry.policy.version_lifecycle import VersionState
from controlplane.scaling.local import drain
from controlplane.scaling.local.local_actuator import LocalActuator
from controlplane.scaling.local.replica_replacement import DamageLoop, ReplicaReplacement
from controlplane.scaling.policy.breakeven import Level
from controlplane.scaling.policy.replacement_steps import ReplacementStep
from controlplane.scaling.policy.replica_lifecycle import SERVING, ReplicaState
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.telemetry.policy.instruments import MetricsPage
from tests.controlplane.builders import TENANT, key, registration
from tests.controlplane.machine_fixture import LocalMachine, RunDirectory, local
from tests.eventually import eventually


class ReplacementScenario:
    """Replacement orders on an actuator, while the autoscaler always wants `wanted` replicas."""

    def __init__(self, it: LocalMachine, model: str, wanted: int) -> None:
        self.it = it
        self.which: VersionKey = key(model)
        self.wanted = wanted
        self.fewest = wanted
        self.most_held = 0
        self.replacement = ReplicaReplacement(it.fleet, it.actuator)
        it.actuator.add_listener(self.replacement)
        version = Version(registration(model), 0, VersionState.READY)
        self.model = Model(TENANT, model, 0, versions=(version,))

    def ids(self) -> set[str]:
        return {each.runtime_id for each in self.it.table.replicas_of(self.which) if each.state in SERVING}

    async def up(self) -> set[str]:
        """Start the wanted replicas and return their ids."""
        self.it.apply(self.which, self.wanted)
        await self.it.wait_until_ready(self.which, self.wanted)
        await eventually(lambda: self.it.table.held_slots == self.wanted)
        return self.ids()

    def tick(self) -> None:
        """Apply the wanted scale as the autoscaler does, and check the invariants."""
        table = self.it.table
        self.it.apply(self.which, self.wanted)
        self.it.check_integrity()
        assert table.live_count(self.which) == self.wanted, "the autoscaler counts as many as it wants"
        self.fewest = min(self.fewest, sum(not row.draining for row in self.it.feed.snapshot().replicas))
        self.most_held = max(self.most_held, table.held_slots)
        assert table.held_slots <= table.slots

    async def over(self, holds: Callable[[], bool] = lambda: False) -> Renewal:
        """Return the order's final state. Ticks all the time until then."""

        def is_over() -> bool:
            self.tick()
            return holds() or self.replacement.state(self.model).state != "running"

        await eventually(is_over, "the order is over")
        return self.replacement.state(self.model)


@asynccontextmanager
async def running_replacement(
    run: RunDirectory, model: str = "m", wanted: int = 2, slots: int = 4
) -> AsyncIterator[ReplacementScenario]:
    async with local(run, slots=slots) as it:
        yield ReplacementScenario(it, model, wanted)


async def test_new_replica_serves_before_old_one_drains(run: RunDirectory) -> None:
    """With one spare slot all replicas are replaced, and never fewer serve."""
    async with running_replacement(run, slots=3) as r:
        old = await r.up()
        ordered = r.replacement.begin(r.model)
        assert (ordered.state, ordered.replicas, ordered.replaced) == ("running", 2, 0)
        done = await r.over()
        assert (done.order, done.state, done.replaced, done.reason) == (ordered.order, "done", 2, None)
        assert r.ids().isdisjoint(old)
        assert (len(r.ids()), r.fewest, r.most_held) == (2, 2, 3)
        assert len(run.calls("bind:m")) == 4
        assert {runtime_id for runtime_id, _ in run.calls("drain")} == old


async def test_old_replica_drains_first_without_a_free_slot(run: RunDirectory) -> None:
    """One fewer serves meanwhile, so the check of the test above can fail. Slots are never exceeded."""
    async with running_replacement(run, slots=2) as r:
        old = await r.up()
        r.replacement.begin(r.model)
        assert (await r.over()).state == "done"
        assert r.ids().isdisjoint(old)
        assert (len(r.ids()), r.fewest, r.most_held) == (2, 1, 2)


async def test_draining_at_once_is_caught(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the check sees an actuator that drains first although there is room."""

    def hasty(self: LocalActuator, runtime_id: str, step: ReplacementStep) -> None:
        carry_out(self, runtime_id, ReplacementStep.AFTER if step is ReplacementStep.BESIDE else step)

    carry_out = LocalActuator.carry_out
    monkeypatch.setattr(LocalActuator, "carry_out", hasty)
    async with running_replacement(run, slots=3) as r:
        await r.up()
        r.replacement.begin(r.model)
        assert (await r.over()).state == "done"
        assert r.fewest == 1


async def test_replacement_waits_for_running_requests(run: RunDirectory) -> None:
    """The order waits for the old replica's requests. The new replica serves meanwhile."""
    async with running_replacement(run, "busy", 1) as r:
        (old,) = await r.up()
        r.replacement.begin(r.model)
        await r.over(lambda: bool(run.calls("drain")))
        assert r.it.table[old].state is ReplicaState.DRAINING
        assert r.it.table.ready_count(r.which) == 1
        assert r.replacement.state(r.model).replaced == 0
        run.tell("idle")
        assert (await r.over()).state == "done"
        assert r.fewest == 1


async def test_second_replacement_is_refused_while_one_runs(run: RunDirectory) -> None:
    """The error says how far the first one is. Another may begin afterwards."""
    async with running_replacement(run, wanted=1) as r:
        await r.up()
        first = r.replacement.begin(r.model)
        with pytest.raises(Refused, match="is being restarted already; 0 of 1 replicas are replaced"):
            r.replacement.begin(r.model)
        await r.over()
        assert r.replacement.begin(r.model).order != first.order
        assert (await r.over()).state == "done"


@pytest.mark.parametrize("slots", [pytest.param(3, id="beside"), pytest.param(1, id="after")])
async def test_failed_new_replica_fails_the_replacement(run: RunDirectory, slots: int) -> None:
    """With a spare slot the old replica keeps serving. Without one it is gone, and the order says why no new one
    started.
    """
    async with running_replacement(run, "corrupt", 1, slots=slots) as r:
        run.tell("healed")
        old = await r.up()
        (run.path / "healed").unlink()
        r.replacement.begin(r.model)
        await eventually(lambda: r.replacement.state(r.model).state == "failed")
        failed = r.replacement.state(r.model)
        assert failed.replaced == 0
        assert failed.reason is not None
        assert "chunk" in failed.reason
        assert r.ids() == (old if slots > 1 else set())


async def test_old_replica_drains_first_if_memory_is_short(run: RunDirectory) -> None:
    """The new replica's lease is refused as long as the old one has its own."""
    async with running_replacement(run, "full", 1) as r:
        old = await r.up()
        run.tell("crowded")
        r.replacement.begin(r.model)
        await r.over(lambda: bool(run.calls("drain")))
        (run.path / "crowded").unlink()
        assert (await r.over()).state == "done"
        assert r.ids().isdisjoint(old)


async def test_killed_new_replica_is_started_again(run: RunDirectory) -> None:
    """The old replicas serve all the time."""
    async with running_replacement(run, "held") as r:
        run.tell("release")
        old = await r.up()
        (run.path / "release").unlink()
        r.replacement.begin(r.model)
        await r.over(lambda: len(run.calls("bind:held")) == 3)
        (restoring,) = [each for each in r.it.table.replicas_of(r.which) if each.state is ReplicaState.RESTORING]
        os.kill(restoring.pid, signal.SIGKILL)
        await eventually(lambda: len(run.calls("bind:held")) == 4)
        assert r.ids() == old
        run.tell("release")
        assert (await r.over()).state == "done"
        assert r.ids().isdisjoint(old)
        assert r.fewest == 2


async def begin_held_replacement(run: RunDirectory, r: ReplacementScenario) -> None:
    """Begin a replacement whose new replica is held in its restore. The old one still serves."""
    run.tell("release")
    await r.up()
    (run.path / "release").unlink()
    r.replacement.begin(r.model)
    await r.over(lambda: r.it.table.count(ReplicaState.RELIEVED) == 1)


async def test_scale_to_zero_ends_a_replacement(run: RunDirectory) -> None:
    """The replica being replaced ends as well, and the order is done."""
    async with running_replacement(run, "held") as r:
        await begin_held_replacement(run, r)
        r.wanted = 0
        assert (await r.over()).state == "done"
        assert r.it.table.held_slots == 0


async def test_scale_down_ends_the_relieved_replica(run: RunDirectory) -> None:
    """Fewer replicas are wanted while a new one restores: that start is given up, and no more than wanted serve."""
    async with running_replacement(run, "held") as r:
        await begin_held_replacement(run, r)
        r.wanted = 1
        run.tell("release")
        assert (await r.over()).state == "done"
        assert len(r.ids()) == 1


async def test_sleeping_replica_is_ended_by_replacement(run: RunDirectory) -> None:
    """A sleeping replica serves no request. The next request starts a new one."""
    async with running_replacement(run, wanted=1) as r:
        await r.up()
        r.it.actuator.sleep(r.which, Level.ASLEEP)
        await eventually(lambda: r.it.table.count(ReplicaState.ASLEEP) == 1)
        r.replacement.begin(r.model)
        await eventually(lambda: r.replacement.state(r.model).state == "done")
        assert r.it.table.replicas_of(r.which) == ()


async def test_replacement_ends_with_its_control_plane(run: RunDirectory) -> None:
    """The next control plane adopts the old and the new replica. The autoscaler decides which of them stay."""
    async with running_replacement(run, "held", 1) as r:
        run.tell("release")
        await r.up()
        (run.path / "release").unlink()
        r.replacement.begin(r.model)
        await eventually(lambda: len(run.calls("bind:held")) == 2)
    async with running_replacement(run, "held", 1) as r:
        assert r.replacement.state(r.model).state == "none"
        assert r.it.table.live_count(r.which) == 2
        run.tell("release")
        await r.it.wait_until_ready(r.which, 2)
        assert run.calls("drain") == []
        r.it.apply(r.which, 1)
        await r.it.wait_until_ready(r.which, 1)


async def test_damaged_replica_is_ended(run: RunDirectory) -> None:
    """It is found by its pid, told the reason, ended although it is busy, and counted once. The other replica keeps
    serving.
    """
    async with local(run) as it:
        damaged: set[int] = set()

        async def ask() -> frozenset[int]:
            if not damaged:
                raise Refused(Unavailable("cache"))
            return frozenset(damaged)

        page = MetricsPage("controlplane")
        loop = DamageLoop(ask, it.fleet, it.actuator, page)
        await loop.end_damaged()
        for name in ("busy", "b"):
            it.apply(key(name), 1)
            await it.wait_until_ready(key(name))
        await loop.end_damaged()
        assert it.table.ready_count(key("busy")) == 1
        (one,) = it.table.replicas_of(key("busy"))
        damaged.add(one.pid)
        await loop.end_damaged()
        assert it.table[one.runtime_id].state is ReplicaState.DRAINING
        await loop.end_damaged()
        assert (it.table.ready_count(key("busy")), it.table.ready_count(key("b"))) == (0, 1)
        await eventually(lambda: one.runtime_id not in it.table, "the damaged one is gone")
        assert f"condemn {one.runtime_id}" in (run.path / "calls.log").read_text()
        (counted,) = [family for family in page.families() if family.name == "kelvin_condemned_replicas_total"]
        assert counted.values == {(): 1}


async def test_damaged_replica_drains_before_activators_know(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feed reader that takes nothing does not delay the drain of a replica with damaged memory."""
    monkeypatch.setattr(drain, "DRAIN_DELIVERY_LIMIT_S", 600.0)
    async with local(run) as it:
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        (one,) = it.table.replicas_of(key("busy"))
        with it.feed.subscribe():
            it.actuator.carry_out(one.runtime_id, ReplacementStep.CONDEMN)
            await eventually(lambda: one.runtime_id not in it.table, "the damaged one is gone")


async def test_damaged_draining_replica_is_ended(run: RunDirectory) -> None:
    """A draining replica still answers requests, so it must end too."""
    async with local(run) as it:
        it.apply(key("busy"), 1)
        await it.wait_until_ready(key("busy"))
        (one,) = it.table.replicas_of(key("busy"))

        async def ask() -> frozenset[int]:
            return frozenset({one.pid})

        it.actuator.drain(it.fleet[one.runtime_id])
        await DamageLoop(ask, it.fleet, it.actuator, MetricsPage("controlplane")).end_damaged()
        await eventually(lambda: one.runtime_id not in it.table, "the damaged one is gone")
