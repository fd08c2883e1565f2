"""Applier from any state, with crashes and refusals: objects become as wanted, and then nothing is written."""

import asyncio
from collections import deque
from contextlib import suppress
from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.knative.apply.applier import Applier
from controlplane.knative.apply.cluster import Busy, Invalid, Json, Ref, Unreachable, WriteConflict
from controlplane.knative.policy.apply_steps import CHECK_S, owner_of, with_digest
from controlplane.knative.policy.object_labels import APPLIED
from tests.controlplane.knative.fake_cluster import HERE, SERVICE, THERE, FakeCluster, differing_paths, service
from tests.controlplane.virtual_time import VirtualClock

NAMES = ("a", "b", "c", "d")
BUILT = st.builds(
    service,
    st.sampled_from(NAMES),
    image=st.sampled_from(["one", "two"]),
    scale=st.sampled_from(["1", "3", None]),
    labels=st.booleans(),
)
WANTED = st.builds(
    service, st.sampled_from(NAMES), image=st.sampled_from(["one", "two"]), scale=st.sampled_from(["1", None])
)
# Applied by another client; by our control plane and maybe changed after it; by another installation.
OBJECT = BUILT | st.builds(with_digest, BUILT, st.just(HERE)) | st.builds(with_digest, WANTED, st.just(THERE))
TROUBLE = st.sampled_from([None, Unreachable("x"), Busy("x", 3.0), WriteConflict("x"), Invalid("x")])
CRASH = st.tuples(st.integers(1, 6), st.booleans())
FOREVER_S = 4000.0


def by_name(objects: list[Json]) -> dict[Ref, Json]:
    return {Ref.of(each): each for each in objects}


async def check_convergence(
    there: list[Json], wanted: list[Json], crashes: list[tuple[int, bool]], troubles: dict[str, list[object]]
) -> None:
    world, clock = FakeCluster(), VirtualClock()
    for each in by_name(there).values():
        world.put(deepcopy(each))
    theirs = {ref: deepcopy(each) for ref, each in world.objects.items() if owner_of(each) == THERE}
    foreign = theirs.keys() | {
        ref
        for ref, each in world.objects.items()
        if not each["metadata"]["labels"] or APPLIED not in each["metadata"].get("annotations", {})
    }
    world.refuse = {Ref(*SERVICE, "models", name): deque(them) for name, them in troubles.items()}  # type: ignore[arg-type]
    want = by_name(wanted)
    for crash in [*crashes, None]:
        applier = Applier(world, *SERVICE, clock, HERE)
        applier.set_wanted(want.values())
        world.unanswered_call = None if crash is None else (len(world.calls) + crash[0], crash[1])
        world.hung.clear()
        task = asyncio.create_task(applier.run())
        for _ in range(20):
            await clock.advance(FOREVER_S / 20)
            if world.hung.is_set():
                break
        if crash is None:
            assert applier.refusals().keys() == want.keys() & theirs.keys(), applier
            calls, written = len(world.calls), len(world.writes)
            world.resync()
            await clock.advance(FOREVER_S)
            assert len(world.writes) == written, "writes continue"
            checks = len(want.keys() - theirs.keys()) * int(FOREVER_S // CHECK_S)
            assert checks <= len(world.calls) - calls <= checks + len(want), "calls continue"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert set(world.objects) == set(want) | foreign
    assert all(world.objects[ref] == each for ref, each in theirs.items())
    for ref, each in want.items():
        if ref in theirs:
            continue
        assert differing_paths(each, world.objects[ref]) == []
        annotations = world.objects[ref]["spec"]["template"]["metadata"]["annotations"]
        assert annotations == each["spec"]["template"]["metadata"]["annotations"] or ref in by_name(there)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(OBJECT, max_size=5),
    st.lists(WANTED, max_size=5),
    st.lists(CRASH, max_size=3),
    st.dictionaries(st.sampled_from(NAMES), st.lists(TROUBLE, max_size=4), max_size=4),
)
def test_applier_converges_and_stops_writing(
    there: list[Json], wanted: list[Json], crashes: list[tuple[int, bool]], troubles: dict[str, list[object]]
) -> None:
    """Existing objects, refusals and crashes are random. Objects of another installation stay."""
    asyncio.run(check_convergence(there, wanted, crashes, troubles))
