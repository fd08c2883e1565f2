"""Of a version at zero activators know how long a start would take, where that was ever seen, until it is served."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from contracts.control import Feed
from contracts.errors import Refused, Unavailable
from contracts.forecast import StartRow, TierRate, Whereabouts
from controlplane.policy.replica_life import ReplicaState
from controlplane.replicas import Replica, replica_row
from tests.controlplane.test_forecasts import KEY, Scene, place, play
from tests.controlplane.virtual_time import settle

GONE = Replica("r", ReplicaState.DRAINING, 0, key=KEY)


async def _there() -> Whereabouts:
    return place()


async def _unmeasured() -> Whereabouts:
    rates = {"nvme": TierRate(bytes_per_s=1e9, fixed_s=0.0, loads=0)}
    return msgspec.structs.replace(place(), rates=rates)


async def _away() -> Whereabouts:
    raise Refused(Unavailable("cache"))


async def _fall(scene: Scene) -> tuple[StartRow, ...]:
    """Its replica is lost; what a new reader of the feed is told of starts."""
    scene.forecasts.lost(GONE)
    await settle()
    return scene.feed.snapshot().starts


def test_a_start_that_was_seen_is_told_of_at_zero() -> None:
    """To readers and to those that come later; of a deleted version nothing."""

    async def scenario(scene: Scene) -> None:
        await scene.begin()
        scene.end(ready_s=0.8)
        with scene.feed.subscribe() as reader:
            await reader.take()
            (row,) = await _fall(scene)
            assert msgspec.json.decode(await reader.take(), type=Feed).starts == (row,)
        said = scene.forecasts.estimate(KEY, place(), parked=True)
        assert row == StartRow(
            tenant=KEY.tenant, model=KEY.model, version=KEY.version, start_ms=round(said.ready_s * 1000)
        )
        scene.feed.publish(Feed(removed_versions=((KEY.tenant, KEY.model, KEY.version),)))
        assert scene.feed.snapshot().starts == ()

    play(scenario, _there)


@pytest.mark.parametrize(
    "answer", [pytest.param(_unmeasured, id="a tier was never read"), pytest.param(_away, id="the cache is away")]
)
def test_what_is_guessed_is_not_told(answer: Callable[[], Awaitable[Whereabouts]]) -> None:
    """A request is refused by what is known, never by a guess."""

    async def scenario(scene: Scene) -> None:
        await scene.begin()
        scene.end(ready_s=0.8)
        assert await _fall(scene) == ()

    play(scenario, answer)


def test_of_a_version_that_never_started_nothing_is_told() -> None:
    """Its steps would be guesses."""

    async def scenario(scene: Scene) -> None:
        assert await _fall(scene) == ()

    play(scenario, _there)


def test_what_was_said_ends_with_a_replica() -> None:
    """Also for readers that come after it; one that drains serves nobody."""

    async def scenario(scene: Scene) -> None:
        await scene.begin()
        scene.end(ready_s=0.8)
        rows = await _fall(scene)
        served = Replica("s", ReplicaState.READY, 0, key=KEY)
        draining = msgspec.structs.replace(replica_row(served), draining=True)
        scene.feed.publish(Feed(replicas=(draining,)))
        assert scene.feed.snapshot().starts == rows
        scene.feed.publish(Feed(replicas=(replica_row(served),)))
        assert scene.feed.snapshot().starts == ()

    play(scenario, _there)


@pytest.mark.parametrize("served", [pytest.param(True, id="it is ready"), pytest.param(False, id="it starts")])
def test_an_answer_that_comes_too_late_is_not_told(served: bool) -> None:
    """The cache was asked when the version was at zero, which it is no more."""
    asked = asyncio.Event()

    async def slow() -> Whereabouts:
        await asked.wait()
        return place()

    async def scenario(scene: Scene) -> None:
        await scene.begin()
        scene.end(ready_s=0.8)
        assert await _fall(scene) == ()
        await scene.begin()
        if served:
            scene.end(ready_s=0.8)
        asked.set()
        await settle()
        assert scene.feed.snapshot().starts == ()

    play(scenario, slow)


def test_version_deleted_meanwhile_leaves_no_row() -> None:
    """Nothing would ever remove it from the feed."""

    async def scenario(scene: Scene) -> None:
        await scene.begin()
        scene.end(ready_s=0.8)
        scene.forecasts.lost(GONE)
        scene.catalogue.known.clear()
        await settle()
        assert scene.feed.snapshot().starts == ()

    play(scenario, _there)
