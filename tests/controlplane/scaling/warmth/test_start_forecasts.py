"""Each start is foretold while it runs, and what was said is held against what it took. No start waits for that.

Of a version at zero activators know how long a start would take, where that was ever seen, until it is served.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from controlplane.registry.feed_hub import FeedHub
from controlplane.scaling.policy.breakeven import Level
from controlplane.scaling.policy.eta import EstimateBasis
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.replicas import Replica, replica_row
from controlplane.scaling.warmth.start_forecasts import StartForecaster
from controlplane.tasks import Tasks
from kelvin.contracts.errors import Internal, Refused, Unavailable
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.serving.start_forecast import StartRow, TierPlacement, TierRate
from kelvin.contracts.timeline import Stage, StageSpan, Stamp
from kelvin.telemetry.policy.instruments import MetricsPage
from tests.controlplane.builders import key
from tests.controlplane.scaling.scaling_world import FAST, FakeVersions
from tests.controlplane.usage_records import request_record
from tests.controlplane.virtual_time import VirtualClock, settle

KEY = key()


def place(bytes_s: float = 0.5) -> TierPlacement:
    """All of a version on NVMe."""
    rates = {"nvme": TierRate(bytes_per_s=1e9, fixed_s=0.0, loads=1)}
    return TierPlacement(chunks_by_tier={"nvme": 1}, bytes_by_tier={"nvme": 4096}, rates=rates, bytes_s=bytes_s)


class ForecastScenario:
    """Forecasts over virtual time; `answer` is what the agent says."""

    def __init__(self, tasks: Tasks, answer: Callable[[], Awaitable[TierPlacement]]) -> None:
        self.feed, self.clock, self.page = FeedHub(), VirtualClock(), MetricsPage("controlplane")
        self.catalogue = FakeVersions()
        self.catalogue.add("m", FAST)
        self.forecasts = StartForecaster(
            self.catalogue.find, lambda _: answer(), self.feed, self.clock, tasks, self.page
        )

    async def begin(self, *, wake_level: Level | None = None) -> None:
        self.forecasts.on_start_accepted(KEY, self.clock.monotonic_us(), parked=True, wake_level=wake_level)
        await settle()

    def end(self, ready_s: float) -> None:
        ends = {Stage.PROMOTED: 0.001, Stage.LEASED: ready_s - 0.1, Stage.READY: ready_s}
        spans = tuple(StageSpan(stage, round(after_s * 1e6)) for stage, after_s in ends.items())
        tiers = {"nvme": 4096}
        self.forecasts.ready(Replica("r", ReplicaState.READY, 0, key=KEY, restore=spans, bytes_by_tier=tiers))

    def counts(self) -> tuple[int, ...]:
        (family,) = self.page.families()
        assert family.spreads is not None
        return tuple(count for spread in family.spreads.values() for count in spread.counts)


@asynccontextmanager
async def foretold(answer: Callable[[], Awaitable[TierPlacement]]) -> AsyncIterator[ForecastScenario]:
    async with Tasks() as tasks:
        yield ForecastScenario(tasks, answer)


async def _there() -> TierPlacement:
    return place()


async def _away() -> TierPlacement:
    raise Refused(Unavailable("cache"))


async def _never() -> TierPlacement:
    await asyncio.Event().wait()
    raise AssertionError


async def test_start_is_forecast_and_its_error_recorded() -> None:
    """The feed has the forecast before the start is over; what it took is held against it, and teaches the next."""
    async with foretold(_there) as scene:
        with scene.feed.subscribe() as reader:
            await reader.take()
            await scene.begin()
            (row,) = msgspec.json.decode(await reader.take(), type=Feed).forecasts
        said = scene.forecasts.history.estimate(KEY, 4096, 0.5, parked=True)
        assert (row.version, row.ready_in_ms) == (KEY.version, round(said.ready_s * 1000))
        assert (row.bytes_to_bring, row.tier) == (4096, "nvme")
        scene.end(ready_s=0.8)
        (miss,) = scene.forecasts.history.forecast_errors(KEY)
        assert miss.tier == "nvme"
        assert miss.predicted_s == pytest.approx(said.ready_s)
        assert miss.actual_s == pytest.approx(0.8)
        assert sum(scene.counts()) == 1
        better = scene.forecasts.estimate(KEY, place(), parked=True)
        assert better.known is EstimateBasis.VERSION
        assert (better.process_s, better.steps.bind_s) == pytest.approx((0.001, 0.1))


async def test_wrong_forecast_lands_in_the_lowest_bucket() -> None:
    """Negative control: an agent that promises a hundred times the time leaves the ratio in the lowest interval."""

    async def wrong() -> TierPlacement:
        return place(bytes_s=80.0)

    async with foretold(wrong) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        assert scene.counts()[0] == 1
        assert scene.forecasts.history.forecast_errors(KEY)[0].ratio < 0.02


@pytest.mark.parametrize(
    "answer", [pytest.param(_away, id="the agent is away"), pytest.param(_never, id="it answers too late")]
)
async def test_unforecast_start_records_no_error(answer: Callable[[], Awaitable[TierPlacement]]) -> None:
    """It teaches all the same: nothing is made up afterwards."""
    async with foretold(answer) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        assert scene.forecasts.history.forecast_errors(KEY) == ()
        assert scene.counts() == ()
        assert scene.forecasts.history.start(KEY, 4096).seconds == pytest.approx(0.8)


async def test_wake_is_recorded_by_what_it_did() -> None:
    """One that leased again tells of sleep without weights, though it was asked for before it had dropped them."""
    async with foretold(_there) as scene:
        history = scene.forecasts.history
        await scene.begin(wake_level=Level.ASLEEP)
        scene.end(ready_s=0.8)
        assert (history.refill(KEY, 4096).seen, history.wake(KEY, 4096).seen, history.start(KEY, 4096).seen) == (
            1,
            0,
            0,
        )
        assert history.fetches(KEY).keys() == {"nvme"}
        await scene.begin(wake_level=Level.ASLEEP)
        spans = (StageSpan(Stage.READY, 3_000),)
        scene.forecasts.ready(Replica("r", ReplicaState.READY, 0, key=KEY, restore=spans))
        assert history.wake(KEY, 4096).seconds == pytest.approx(0.003)
        assert scene.counts() == ()


@pytest.mark.parametrize(("level", "said_ms"), [(Level.ASLEEP, 50), (Level.ASLEEP2, 110)])
async def test_wake_is_forecast_by_its_level(level: Level, said_ms: int) -> None:
    """From what such wakes took, or the guess; no cache is asked."""
    async with foretold(_never) as scene:
        with scene.feed.subscribe() as reader:
            await reader.take()
            await scene.begin(wake_level=level)
            (row,) = msgspec.json.decode(await reader.take(), type=Feed).forecasts
        assert (row.ready_in_ms, row.bytes_to_bring, row.tier) == (said_ms, 0, None)


async def test_failed_and_adopted_starts_are_not_recorded() -> None:
    """A replica that another control plane had started is no start of this one's."""
    async with foretold(_there) as scene:
        await scene.begin()
        scene.forecasts.failed(KEY, Internal())
        scene.end(ready_s=0.8)
        assert scene.forecasts.history.start(KEY, 4096).seen == 0


@pytest.mark.parametrize(
    ("tenant", "model"),
    [
        pytest.param(KEY.tenant, KEY.model, id="the owner's"),
        pytest.param("guest", f"{KEY.tenant}/{KEY.model}", id="another tenant's, whom it lets call"),
    ],
)
async def test_first_batch_time_is_learned_from_cold_requests(tenant: str, model: str) -> None:
    """From the record of a cold request, which has the stages."""
    async with foretold(_there) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        stamps = (Stamp(Stage.READY, 900_000), Stamp(Stage.FIRST_TOKEN, 1_150_000))
        of = {"tenant": tenant, "model": model, "version": KEY.version}
        cold = msgspec.structs.replace(request_record(1), timeline=stamps, outcome="ok", **of)
        warm, failed = msgspec.structs.replace(cold, timeline=None), msgspec.structs.replace(cold, outcome="internal")
        scene.forecasts.record_answers((warm, failed))
        assert scene.forecasts.estimate(KEY, place(), parked=True).steps.answer_s == pytest.approx(0.1)
        scene.forecasts.record_answers((cold,))
        assert scene.forecasts.estimate(KEY, place(), parked=True).steps.answer_s == pytest.approx(0.25)


async def test_length_of_a_whole_answer_is_no_part_of_a_start() -> None:
    """Its first byte leaves after its last token: the end of prefill tells how long the first batch took."""
    async with foretold(_there) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        stamps = (Stamp(Stage.READY, 900_000), Stamp(Stage.PREFILLED, 1_150_000), Stamp(Stage.FIRST_TOKEN, 9_000_000))
        of = {"tenant": KEY.tenant, "model": KEY.model, "version": KEY.version}
        whole = msgspec.structs.replace(request_record(1), timeline=stamps, outcome="ok", stream=False, **of)
        scene.forecasts.record_answers((whole,))
        assert scene.forecasts.estimate(KEY, place(), parked=True).steps.answer_s == pytest.approx(0.25)


async def test_first_token_of_a_stream_ends_its_start() -> None:
    """It leaves as soon as it is computed, after what comes between prefill and the caller."""
    async with foretold(_there) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        stamps = (Stamp(Stage.READY, 900_000), Stamp(Stage.PREFILLED, 950_000), Stamp(Stage.FIRST_TOKEN, 1_150_000))
        of = {"tenant": KEY.tenant, "model": KEY.model, "version": KEY.version}
        streamed = msgspec.structs.replace(request_record(1), timeline=stamps, outcome="ok", stream=True, **of)
        scene.forecasts.record_answers((streamed,))
        assert scene.forecasts.estimate(KEY, place(), parked=True).steps.answer_s == pytest.approx(0.25)


GONE = Replica("r", ReplicaState.DRAINING, 0, key=KEY)


async def _unmeasured() -> TierPlacement:
    rates = {"nvme": TierRate(bytes_per_s=1e9, fixed_s=0.0, loads=0)}
    return msgspec.structs.replace(place(), rates=rates)


async def _fall(scene: ForecastScenario) -> tuple[StartRow, ...]:
    """Its replica is lost; what a new reader of the feed is told of starts."""
    scene.forecasts.lost(GONE)
    await settle()
    return scene.feed.snapshot().starts


async def test_start_time_is_published_at_zero() -> None:
    """To readers and to those that come later; of a deleted version nothing."""
    async with foretold(_there) as scene:
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


@pytest.mark.parametrize(
    "answer", [pytest.param(_unmeasured, id="a tier was never read"), pytest.param(_away, id="the cache is away")]
)
async def test_default_estimates_are_not_published(answer: Callable[[], Awaitable[TierPlacement]]) -> None:
    """A request is refused by what is known, never by a guess."""
    async with foretold(answer) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        assert await _fall(scene) == ()


async def test_never_started_version_publishes_no_estimate() -> None:
    """Its steps would be guesses."""
    async with foretold(_there) as scene:
        assert await _fall(scene) == ()


async def test_ready_replica_removes_its_forecast() -> None:
    """Also for readers that come after it; one that drains serves nobody."""
    async with foretold(_there) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        rows = await _fall(scene)
        served = Replica("s", ReplicaState.READY, 0, key=KEY)
        draining = msgspec.structs.replace(replica_row(served), draining=True)
        scene.feed.publish(Feed(replicas=(draining,)))
        assert scene.feed.snapshot().starts == rows
        scene.feed.publish(Feed(replicas=(replica_row(served),)))
        assert scene.feed.snapshot().starts == ()


@pytest.mark.parametrize("served", [pytest.param(True, id="it is ready"), pytest.param(False, id="it starts")])
async def test_late_cache_answer_is_not_published(served: bool) -> None:
    """The cache was asked when the version was at zero, which it is no more."""
    asked = asyncio.Event()

    async def slow() -> TierPlacement:
        await asked.wait()
        return place()

    async with foretold(slow) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        assert await _fall(scene) == ()
        await scene.begin()
        if served:
            scene.end(ready_s=0.8)
        asked.set()
        await settle()
        assert scene.feed.snapshot().starts == ()


async def test_version_deleted_meanwhile_leaves_no_row() -> None:
    """Nothing would ever remove it from the feed."""
    async with foretold(_there) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        scene.forecasts.lost(GONE)
        scene.catalogue.known.clear()
        await settle()
        assert scene.feed.snapshot().starts == ()
