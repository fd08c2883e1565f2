"""ObjectCache keeps the newest state of each object: old events are ignored, and nothing is known before the first
list.
"""

import pytest

from controlplane.knative.apply.applier import Applier
from controlplane.knative.apply.cluster import Change, Deleted, Json, Synced, Upsert
from controlplane.knative.apply.object_cache import ObjectCache, UidTracker
from tests.controlplane.knative.fake_cluster import SERVICE, FakeCluster, M, running_applier, running_loop, service
from tests.controlplane.virtual_time import VirtualClock


async def test_own_writes_are_known_before_the_watch() -> None:
    """The responses count before a slow watch delivers the changes."""
    async with running_applier() as (world, it, clock):
        world.watches_deliver.clear()
        it.set_wanted([service("m")])
        await clock.advance(600)
        assert world.calls == [("apply", M)]
        it.set_wanted([])
        await clock.advance(600)
        assert world.calls == [("apply", M), ("delete", M)]
        world.watches_deliver.set()
        await clock.advance(1)
        assert it.find_observed(M) is None
        assert len(world.calls) == 2


async def test_nothing_is_written_before_the_first_list() -> None:
    """A new control plane must not write ten thousand objects that exist."""
    world, clock = FakeCluster(), VirtualClock()
    world.watches_deliver.clear()
    it = Applier(world, *SERVICE, clock, "kelvin", luck=lambda: 0.0)
    async with running_loop(it):
        await clock.advance(1)
        it.set_wanted([service("m")])
        await clock.advance(600)
        assert world.calls == []
        world.watches_deliver.set()
        await clock.advance(1)
        assert world.calls == [("apply", M)]


@pytest.mark.parametrize("missed", [False, True])
async def test_object_deleted_before_its_answer_is_rewritten(missed: bool) -> None:
    """The watch, or a new list, reports the deletion before the response to the write arrives. That response is of a
    dead object.
    """
    async with running_applier() as (world, it, clock):
        world.answered.clear()
        it.set_wanted([service("m")])
        await clock.advance(1)
        world.remove(M)
        if missed:
            world.resync()
        await clock.advance(1)
        assert world.calls == [("apply", M)]
        world.answered.set()
        await clock.advance(600)
        assert world.calls == [("apply", M), ("apply", M)]
        assert it.find_observed(M) == world.objects[M]


def _at(version: int, uid: str = "u") -> Json:
    obj = service("m")
    obj["metadata"] |= {"resourceVersion": str(version), "uid": uid}
    return obj


def test_old_watch_events_are_ignored() -> None:
    """A response may overtake the watch. A name may be used again before the deletion of the first object arrives."""
    view = ObjectCache()
    assert view.apply_change(Synced((_at(5),))) == {M}
    with view.track_call(M) as store:
        assert store(_at(9))
    assert view.apply_change(Upsert(_at(7))) == set()
    assert view.apply_change(Deleted(M, "another")) == set()
    assert view.objects[M]["metadata"]["resourceVersion"] == "9"
    assert view.apply_change(Deleted(M, "u")) == {M}
    assert view.apply_change(Deleted(M, "u")) == set()


@pytest.mark.parametrize(
    ("change", "answer", "want"),
    [
        pytest.param(Deleted(M, "u", "9"), 8, False, id="deleted after the response"),
        pytest.param(Deleted(M, "u", "9"), 10, True, id="created again by the write"),
        pytest.param(Synced((), "9"), 8, False, id="a later list lacks it"),
        pytest.param(Synced((), "9"), 10, True, id="an earlier list lacks it"),
        pytest.param(Synced((_at(7),), "9"), 8, True, id="a list has it"),
    ],
)
def test_late_answer_revives_no_object(change: Change, answer: int, want: bool) -> None:
    """A response that is older than the deletion is ignored. A newer one counts."""
    view = ObjectCache()
    view.apply_change(Synced((_at(5),), "6"))
    with view.track_call(M) as store:
        view.apply_change(change)
        assert store(_at(answer)) is want
        assert (M in view.objects) is want
    with view.track_call(M) as store:
        assert store(_at(11))


def test_uid_tracker_follows_name_and_uid() -> None:
    """An object that a list lacks is gone. An event with another uid does not remove the new object of that name."""
    known = UidTracker()
    assert list(known.apply_change(Synced((_at(5),)))) == [(M, _at(5))]
    assert list(known.apply_change(Upsert(_at(7, "v")))) == [(M, _at(7, "v"))]
    assert list(known.apply_change(Deleted(M, "u"))) == []
    assert list(known.apply_change(Synced(()))) == [(M, None)]
    assert list(known.apply_change(Upsert(_at(9)))) == [(M, _at(9))]
    assert list(known.apply_change(Deleted(M, "u"))) == [(M, None)]
