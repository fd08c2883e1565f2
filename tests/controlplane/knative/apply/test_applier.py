"""Applier on a cluster in memory: objects become as wanted and stay so, whatever others do and however the cluster
answers.
"""

import asyncio
from collections import deque
from copy import deepcopy
from typing import Any

import pytest

from controlplane.knative.apply.applier import (
    DEFECT_RETRY_S,
    MAX_CONCURRENT_CALLS,
    OUTAGE_RETRY_MAX_S,
    SPACING_S,
    Applier,
)
from controlplane.knative.apply.cluster import Busy, Invalid, Json, Ref, Unreachable, Upsert
from controlplane.knative.policy import apply_steps as policy
from controlplane.knative.policy.apply_steps import CHECK_S, Refusal, with_digest
from controlplane.knative.policy.object_labels import APPLIED
from tests.controlplane.knative.fake_cluster import HERE, SERVICE, THERE, FakeCluster, M, running_applier, service
from tests.controlplane.virtual_time import VirtualClock

IMAGE = ("spec", "template", "spec", "containers", 0, "image")


def image(world: FakeCluster, ref: Ref = M) -> Any:
    place: Any = world.objects[ref]
    for step in IMAGE:
        place = place[step]
    return place


async def test_applier_creates_updates_and_deletes() -> None:
    """Each write happens once. Later checks apply an object again, which changes nothing."""
    async with running_applier() as (world, it, clock):
        it.set_wanted([service("m"), service("n")])
        await clock.advance(1)
        it.set_wanted([service("m", image="two"), service("n")])
        await clock.advance(1)
        assert image(world) == "two"
        it.set_wanted([service("n")])
        await clock.advance(CHECK_S - 10)
        n = Ref(*SERVICE, "models", "n")
        assert world.calls == [("apply", M), ("apply", n), ("apply", M), ("delete", M)]
        await clock.advance(3 * CHECK_S)
        assert world.calls[4:] == [("apply", n)] * 3
        assert world.writes == [M, n, M]
        assert list(world.objects) == [n]
        assert it.refusals() == {}


async def test_nothing_is_written_before_wanted_is_set() -> None:
    """A control plane that has not read its registry must not delete running Services."""
    async with running_applier() as (world, it, clock):
        world.put(with_digest(service("m"), HERE))
        await clock.advance(3600)
        assert it.find_observed(M) is not None
        assert world.calls == []
        it.set_wanted([])
        await clock.advance(1)
        assert world.calls == [("delete", M)]


async def test_foreign_objects_are_left_alone() -> None:
    """This includes an object as we render it that another client applied."""
    async with running_applier() as (world, it, clock):
        world.put(service("m", labels=False))
        world.put(service("as rendered"))
        it.set_wanted([])
        await clock.advance(3600)
        assert world.calls == []


async def test_two_installations_do_not_interfere() -> None:
    """An object of the other installation is neither deleted nor overwritten. It is reported until it is gone or not
    wanted.
    """
    async with running_applier() as (world, it, clock):
        world.put(with_digest(service("m", image="theirs"), THERE))
        world.put(with_digest(service("n"), THERE))
        it.set_wanted([service("m")])
        await clock.advance(3600)
        assert (world.calls, image(world)) == ([], "theirs")
        assert it.refusals() == {M: Refusal("Foreign", "it belongs to the installation in kelvin-staging")}
        await world.delete(M)
        await clock.advance(1)
        assert (world.calls.pop(), image(world), it.refusals()) == (("apply", M), "one", {})
        n = Ref(*SERVICE, "models", "n")
        it.set_wanted([service("m"), service("n")])
        await clock.advance(1)
        assert it.refusals().keys() == {n}
        it.set_wanted([service("m")])
        await clock.advance(1)
        assert it.refusals() == {}
        assert n in world.objects


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param(IMAGE, "evil", id="a changed value"),
        pytest.param((*IMAGE[:-1], "command"), ["evil"], id="an extra field in a list that is written whole"),
        pytest.param(("metadata", "labels", "app.kubernetes.io/managed-by"), "me", id="a changed label"),
        pytest.param(("metadata", "annotations", APPLIED), "x", id="a changed digest"),
    ],
)
async def test_foreign_edit_is_repaired(path: tuple[str | int, ...], value: Any) -> None:
    """The repair is immediate and takes one call."""
    async with running_applier() as (world, it, clock):
        it.set_wanted([service("m")])
        await clock.advance(1)
        world.edit(M, path, value)
        await clock.advance(0.1)
        assert world.calls == [("apply", M)] * 2
        place: Any = world.objects[M]
        for step in path[:-1]:
            place = place[step]
        assert place.get(path[-1]) != value


@pytest.mark.parametrize("edited", [True, False])
async def test_new_leader_checks_existing_objects(edited: bool) -> None:
    """The digest on an object says what was wanted, not whether another client changed it since."""
    async with running_applier() as (world, it, clock):
        await world.apply(with_digest(service("m"), HERE))
        if edited:
            world.edit(M, IMAGE, "evil")
        it.set_wanted([service("m")])
        await clock.advance(1)
        assert image(world) == "one"
        assert world.writes == [M] * (2 if edited else 1)


async def test_status_updates_of_settled_object_schedule_nothing() -> None:
    """The status may change each second. The next check stays half an hour away."""
    async with running_applier() as (world, it, clock):
        it.set_wanted([service("m")])
        await clock.advance(1)
        for number in range(200):
            world.put(deepcopy(world.objects[M]) | {"status": {"number": number}})
            await clock.advance(0.1)
        assert "due=1 timers=1 " in repr(it)
        await clock.advance(CHECK_S)
        assert world.calls == [("apply", M)] * 2


async def test_checks_delay_no_change() -> None:
    """A new leader checks objects one after another, and writes changes meanwhile."""
    async with running_applier() as (world, it, clock):
        names = [f"m{number}" for number in range(200)]
        for name in names:
            await world.apply(with_digest(service(name), HERE))
        world.calls.clear()
        it.set_wanted([*map(service, names), service("m")])
        await clock.advance(1)
        assert M in world.objects
        assert len(world.calls) < 30
        await clock.advance(200 * SPACING_S)
        assert len(world.calls) == 201
        assert world.writes == [*(Ref(*SERVICE, "models", name) for name in names), M]


async def test_foreign_deletion_is_repaired() -> None:
    """Repeated deletions are repaired with back-off."""
    async with running_applier() as (world, it, clock):
        it.set_wanted([service("m")])
        await clock.advance(1)
        for _ in range(600):
            if M in world.objects:
                world.remove(M)
            await clock.advance(0.1)
        assert len(world.calls) < 12
        await clock.advance(120)
        assert M in world.objects


async def test_refusal_is_recorded_and_retried() -> None:
    """Other objects are not delayed. A new wanted state is tried at once."""
    async with running_applier() as (world, it, clock):
        world.refuse[M] = deque([Invalid("bad image")] * 100)
        it.set_wanted([service("m"), service("n")])
        await clock.advance(60)
        assert Ref(*SERVICE, "models", "n") in world.objects
        (ref,), (why,) = it.refusals().keys(), it.refusals().values()
        assert (ref, why.reason, why.message) == (M, "Invalid", "bad image")
        assert 5 <= world.calls.count(("apply", M)) <= 7
        world.refuse[M].clear()
        it.set_wanted([service("m", image="two"), service("n")])
        await clock.advance(0.1)
        assert image(world) == "two"
        assert it.refusals() == {}


async def test_refusal_of_unwanted_object_is_dropped() -> None:
    """It is neither reported nor retried."""
    async with running_applier() as (world, it, clock):
        world.refuse[M] = deque([Invalid("bad image")] * 100)
        it.set_wanted([service("m")])
        await clock.advance(1)
        it.set_wanted([])
        await clock.advance(1)
        assert it.refusals() == {}
        calls = len(world.calls)
        await clock.advance(3600)
        assert len(world.calls) == calls


@pytest.mark.parametrize(
    ("trouble", "calls"),
    [
        pytest.param(Unreachable("away"), 8, id="the cluster is away"),
        pytest.param(Busy("busy", 20.0), 5, id="the cluster is busy for 20 s"),
    ],
)
async def test_unreachable_cluster_is_not_called_per_object(trouble: Unreachable | Busy, calls: int) -> None:
    """Only a few calls test the cluster. All objects are written afterwards."""
    async with running_applier() as (world, it, clock):
        names = [f"m{each}" for each in range(50)]
        world.refuse = {Ref(*SERVICE, "models", name): deque([trouble] * 1000) for name in names}
        it.set_wanted([service(name) for name in names])
        await clock.advance(60)
        assert len(world.calls) <= calls * MAX_CONCURRENT_CALLS
        world.refuse.clear()
        for _ in range(60):  # one advance runs only a few turns of the loop
            await clock.advance(10)
        assert len(world.objects) == 50
        assert it.refusals() == {}


async def test_failing_object_delays_others_briefly() -> None:
    """This holds however long its calls have failed: the cause may be a webhook of its namespace."""
    async with running_applier() as (world, it, clock):
        n = Ref(*SERVICE, "models", "n")
        world.refuse[M] = deque([Unreachable("failed calling webhook")] * 1000)
        it.set_wanted([service("m")])
        calls = 0
        while calls < 12:  # by then it is retried each 300 s
            await clock.advance(10)
            calls = len(world.calls)
        it.set_wanted([service("m"), service("n")])
        await clock.advance(OUTAGE_RETRY_MAX_S + 1)
        assert n in world.objects
        assert it.refusals()[M].reason == "Unreachable"


async def test_slow_deletion_is_requested_once() -> None:
    """Finalizers take time. An object that is wanted again is written once the old one is gone."""
    async with running_applier() as (world, it, clock):
        world.is_deletion_slow = True
        it.set_wanted([service("m")])
        await clock.advance(1)
        it.set_wanted([])
        await clock.advance(600)
        it.set_wanted([service("m")])
        await clock.advance(600)
        assert world.calls == [("apply", M), ("delete", M)]
        world.remove(M)
        await clock.advance(1)
        assert world.calls[2:] == [("apply", M)]


async def test_field_changed_by_cluster_is_not_rewritten_forever() -> None:
    """The difference is reported instead. An edit by another client is still repaired."""
    async with running_applier() as (world, it, clock):
        world.forced_container_fields[M] = {"image": "pinned"}
        it.set_wanted([service("m")])
        await clock.advance(CHECK_S - 10)
        assert world.calls == [("apply", M)]
        why = it.refusals()[M]
        assert (why.reason, why.message) == (
            "Differs",
            'spec.template.spec.containers[0].image is "pinned", not "one"',
        )
        world.resync()
        await clock.advance(3600)
        assert world.writes == [M]
        world.edit(M, IMAGE, "evil")
        await clock.advance(60)
        assert image(world) == "pinned"


async def test_object_of_another_kind_is_refused() -> None:
    """The applier watches one kind only."""
    async with running_applier() as (_, it, _):
        with pytest.raises(ValueError, match="v1 Pod: not the kind"):
            it.set_wanted([{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}])


async def test_defect_in_one_object_keeps_no_other_waiting() -> None:
    """Other objects are written at once, and this one at its next retry."""
    async with running_applier() as (world, it, clock):
        apply, broken = world.apply, [True]

        async def breaks(obj: Json) -> Json:
            if broken and Ref.of(obj) == M:
                broken.pop()
                raise KeyError("spec")
            return await apply(obj)

        world.apply = breaks  # type: ignore[method-assign]
        it.set_wanted([service("m"), service("n")])
        await clock.advance(1)
        assert list(world.objects) == [Ref(*SERVICE, "models", "n")]
        await clock.advance(DEFECT_RETRY_S)
        assert M in world.objects


async def test_undecidable_object_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other objects are written, and this one once a decision works again."""
    decide, broken = policy.decide, [True]

    def breaks(wanted: Json | None, *rest: Any) -> policy.ApplyStep:
        if broken and wanted is not None and wanted["metadata"]["name"] == "m":
            raise RecursionError
        return decide(wanted, *rest)

    monkeypatch.setattr(policy, "decide", breaks)
    async with running_applier() as (world, it, clock):
        it.set_wanted([service("m"), service("n")])
        await clock.advance(1)
        assert list(world.objects) == [Ref(*SERVICE, "models", "n")]
        await clock.advance(DEFECT_RETRY_S)
        broken.clear()
        await clock.advance(DEFECT_RETRY_S)
        assert M in world.objects


async def test_a_defect_leaves_no_watch_open() -> None:
    """The error is raised after the watches are closed."""
    world, clock = FakeCluster(), VirtualClock()
    task = asyncio.create_task(Applier(world, *SERVICE, clock, HERE).run())
    await clock.advance(0.1)
    ((_, changes),) = world.open_watches
    changes.put_nowait(Upsert({"apiVersion": "v1", "metadata": {}}))
    with pytest.raises(ExceptionGroup) as raised:
        await task
    assert raised.group_contains(KeyError)
    assert world.open_watches == []
