"""Each start is forecast while it runs, and the forecast is compared with the real time. No start waits for a forecast.

For a version at zero the feed has the start time, if it was ever measured, until a replica serves.
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
from tests.controlplane.scaling.autoscaler_fixture import FAST, FakeVersions
from tests.controlplane.usage_records import request_record
from tests.controlplane.virtual_time import VirtualClock, settle

KEY = key()


def place(bytes_s: float = 0.5) -> TierPlacement:
    """Return the placement of a version whose bytes are all on NVMe."""
    rates = {"nvme": TierRate(bytes_per_s=1e9, fixed_s=0.0, loads=1)}
    return TierPlacement(chunks_by_tier={"nvme": 1}, bytes_by_tier={"nvme": 4096}, rates=rates, bytes_s=bytes_s)


class ForecastScenario:
    """StartForecaster on virtual time. `answer` stands in for the cache agent."""

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
        self.forecasts.on_replica_ready(
            Replica("r", ReplicaState.READY, 0, key=KEY, restore=spans, bytes_by_tier=tiers)
        )

    def counts(self) -> tuple[int, ...]:
        (family,) = self.page.families()
        assert family.spreads is not None
        return tuple(count for spread in family.spreads.values() for count in spread.counts)


@asynccontextmanager
async def forecast_scenario(answer: Callable[[], Awaitable[TierPlacement]]) -> AsyncIterator[ForecastScenario]:
    async with Tasks() as tasks:
        yield ForecastScenario(tasks, answer)


async def _answer_at_once() -> TierPlacement:
    return place()


async def _refuse() -> TierPlacement:
    raise Refused(Unavailable("cache"))


async def _never_answer() -> TierPlacement:
    await asyncio.Event().wait()
    raise AssertionError


async def test_start_is_forecast_and_its_error_recorded() -> None:
    """The forecast is in the feed before the start ends. The real time is recorded and improves the next forecast."""
    async with forecast_scenario(_answer_at_once) as scene:
        with scene.feed.subscribe() as reader:
            await reader.next_line()
            await scene.begin()
            (row,) = msgspec.json.decode(await reader.next_line(), type=Feed).forecasts
        estimate = scene.forecasts.history.estimate(KEY, 4096, 0.5, parked=True)
        assert (row.version, row.ready_in_ms) == (KEY.version, round(estimate.ready_s * 1000))
        assert (row.bytes_to_bring, row.tier) == (4096, "nvme")
        scene.end(ready_s=0.8)
        (miss,) = scene.forecasts.history.forecast_errors(KEY)
        assert miss.tier == "nvme"
        assert miss.predicted_s == pytest.approx(estimate.ready_s)
        assert miss.actual_s == pytest.approx(0.8)
        assert sum(scene.counts()) == 1
        better = scene.forecasts.estimate(KEY, place(), parked=True)
        assert better.basis is EstimateBasis.VERSION
        assert (better.process_s, better.steps.bind_s) == pytest.approx((0.001, 0.1))


async def test_wrong_forecast_lands_in_the_lowest_bucket() -> None:
    """Negative control: a forecast of a hundred times the real time falls into the lowest bucket of ratios."""

    async def wrong() -> TierPlacement:
        return place(bytes_s=80.0)

    async with forecast_scenario(wrong) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        assert scene.counts()[0] == 1
        assert scene.forecasts.history.forecast_errors(KEY)[0].ratio < 0.02


@pytest.mark.parametrize(
    "answer",
    [pytest.param(_refuse, id="the agent is away"), pytest.param(_never_answer, id="the agent answers too late")],
)
async def test_unforecast_start_records_no_error(answer: Callable[[], Awaitable[TierPlacement]]) -> None:
    """The start is learned from all the same, and no forecast is made up afterwards."""
    async with forecast_scenario(answer) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        assert scene.forecasts.history.forecast_errors(KEY) == ()
        assert scene.counts() == ()
        assert scene.forecasts.history.start_time(KEY, 4096).seconds == pytest.approx(0.8)


async def test_wake_is_recorded_by_what_it_did() -> None:
    """A wake that leased again counts as a deep wake, although it began as a light one."""
    async with forecast_scenario(_answer_at_once) as scene:
        history = scene.forecasts.history
        await scene.begin(wake_level=Level.ASLEEP)
        scene.end(ready_s=0.8)
        assert (
            history.refill_time(KEY, 4096).samples,
            history.wake_time(KEY, 4096).samples,
            history.start_time(KEY, 4096).samples,
        ) == (
            1,
            0,
            0,
        )
        assert history.fetch_times(KEY).keys() == {"nvme"}
        await scene.begin(wake_level=Level.ASLEEP)
        spans = (StageSpan(Stage.READY, 3_000),)
        scene.forecasts.on_replica_ready(Replica("r", ReplicaState.READY, 0, key=KEY, restore=spans))
        assert history.wake_time(KEY, 4096).seconds == pytest.approx(0.003)
        assert scene.counts() == ()


@pytest.mark.parametrize(("level", "said_ms"), [(Level.ASLEEP, 50), (Level.DEEP_SLEEP, 110)])
async def test_wake_is_forecast_by_its_level(level: Level, said_ms: int) -> None:
    """The forecast is from past wakes or the default. The cache agent is not called."""
    async with forecast_scenario(_never_answer) as scene:
        with scene.feed.subscribe() as reader:
            await reader.next_line()
            await scene.begin(wake_level=level)
            (row,) = msgspec.json.decode(await reader.next_line(), type=Feed).forecasts
        assert (row.ready_in_ms, row.bytes_to_bring, row.tier) == (said_ms, 0, None)


async def test_failed_and_adopted_starts_are_not_recorded() -> None:
    """A replica that another control plane started is not a start of this one."""
    async with forecast_scenario(_answer_at_once) as scene:
        await scene.begin()
        scene.forecasts.on_start_failed(KEY, Internal())
        scene.end(ready_s=0.8)
        assert scene.forecasts.history.start_time(KEY, 4096).samples == 0


@pytest.mark.parametrize(
    ("tenant", "model"),
    [
        pytest.param(KEY.tenant, KEY.model, id="the owner"),
        pytest.param("guest", f"{KEY.tenant}/{KEY.model}", id="another tenant with permission to call"),
    ],
)
async def test_first_batch_time_is_learned_from_cold_requests(tenant: str, model: str) -> None:
    """It is learned from the usage record of a cold request, which has the stages. Warm and failed requests teach
    nothing.
    """
    async with forecast_scenario(_answer_at_once) as scene:
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
    """Without streaming the first byte leaves after the last token, so the end of prefill is used."""
    async with forecast_scenario(_answer_at_once) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        stamps = (Stamp(Stage.READY, 900_000), Stamp(Stage.PREFILLED, 1_150_000), Stamp(Stage.FIRST_TOKEN, 9_000_000))
        of = {"tenant": KEY.tenant, "model": KEY.model, "version": KEY.version}
        whole = msgspec.structs.replace(request_record(1), timeline=stamps, outcome="ok", stream=False, **of)
        scene.forecasts.record_answers((whole,))
        assert scene.forecasts.estimate(KEY, place(), parked=True).steps.answer_s == pytest.approx(0.25)


async def test_first_token_of_a_stream_ends_its_start() -> None:
    """With streaming the first token leaves as soon as it is computed, so its time is used."""
    async with forecast_scenario(_answer_at_once) as scene:
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


async def _scale_to_zero(scene: ForecastScenario) -> tuple[StartRow, ...]:
    """Lose the replica and return the start rows that a new reader of the feed gets."""
    scene.forecasts.on_replica_lost(GONE)
    await settle()
    return scene.feed.snapshot().starts


async def test_start_time_is_published_at_zero() -> None:
    """Present and later readers get it. It is removed with its version."""
    async with forecast_scenario(_answer_at_once) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        with scene.feed.subscribe() as reader:
            await reader.next_line()
            (row,) = await _scale_to_zero(scene)
            assert msgspec.json.decode(await reader.next_line(), type=Feed).starts == (row,)
        estimate = scene.forecasts.estimate(KEY, place(), parked=True)
        assert row == StartRow(
            tenant=KEY.tenant, model=KEY.model, version=KEY.version, start_ms=round(estimate.ready_s * 1000)
        )
        scene.feed.publish(Feed(removed_versions=((KEY.tenant, KEY.model, KEY.version),)))
        assert scene.feed.snapshot().starts == ()


@pytest.mark.parametrize(
    "answer", [pytest.param(_unmeasured, id="a tier was never read"), pytest.param(_refuse, id="the cache is away")]
)
async def test_default_estimates_are_not_published(answer: Callable[[], Awaitable[TierPlacement]]) -> None:
    """Requests are refused by measured times, never by a default."""
    async with forecast_scenario(answer) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        assert await _scale_to_zero(scene) == ()


async def test_never_started_version_publishes_no_estimate() -> None:
    """Its steps would be defaults."""
    async with forecast_scenario(_answer_at_once) as scene:
        assert await _scale_to_zero(scene) == ()


async def test_ready_replica_removes_its_forecast() -> None:
    """Later readers do not get it either. A draining replica does not remove it."""
    async with forecast_scenario(_answer_at_once) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        rows = await _scale_to_zero(scene)
        served = Replica("s", ReplicaState.READY, 0, key=KEY)
        draining = msgspec.structs.replace(replica_row(served), draining=True)
        scene.feed.publish(Feed(replicas=(draining,)))
        assert scene.feed.snapshot().starts == rows
        scene.feed.publish(Feed(replicas=(replica_row(served),)))
        assert scene.feed.snapshot().starts == ()


@pytest.mark.parametrize(
    "served", [pytest.param(True, id="the version is ready"), pytest.param(False, id="the version starts again")]
)
async def test_late_cache_answer_is_not_published(served: bool) -> None:
    """The version was at zero when the cache was asked, but is no more."""
    may_answer = asyncio.Event()

    async def slow() -> TierPlacement:
        await may_answer.wait()
        return place()

    async with forecast_scenario(slow) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        assert await _scale_to_zero(scene) == ()
        await scene.begin()
        if served:
            scene.end(ready_s=0.8)
        may_answer.set()
        await settle()
        assert scene.feed.snapshot().starts == ()


async def test_version_deleted_meanwhile_leaves_no_row() -> None:
    """A row of a deleted version would stay in the feed for ever."""
    async with forecast_scenario(_answer_at_once) as scene:
        await scene.begin()
        scene.end(ready_s=0.8)
        scene.forecasts.on_replica_lost(GONE)
        scene.catalogue.known.clear()
        await settle()
        assert scene.feed.snapshot().starts == ()
