"""Forecast when each start will be over, and measure how accurate that was. `policy/eta.py` computes the forecasts.

The cache agent tells where the bytes are while the start is running: no start waits for its forecast.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from controlplane.clock import Clock
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.scaling.policy.breakeven import Level
from controlplane.scaling.policy.eta import EstimateBasis, PastForecast, RestoreEstimate, RestoreHistory
from controlplane.scaling.replicas import Replica
from controlplane.tasks import Tasks
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.errors import Failure, Refused
from kelvin.contracts.names import split_qualified_name
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.serving.start_forecast import Forecast, StartRow, TierPlacement
from kelvin.contracts.timeline import Stage
from kelvin.telemetry.policy.instruments import MetricsPage
from kelvin.telemetry.policy.labels import OK, slowest_tier

log = logging.getLogger(__name__)

FindVersion = Callable[[VersionKey], tuple[Model, Version] | None]
LocateBytes = Callable[[VersionKey], Awaitable[TierPlacement]]

RATIOS: Final = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


@dataclass(slots=True)
class _PendingForecast:
    """A start that is running. `estimate` is set while it runs, or never."""

    requested_us: int
    parked: bool
    wake_level: Level | None  # the level from which it wakes; None: it starts
    estimate: RestoreEstimate | None = None


class StartForecaster:
    """The actuator's listener for forecasts. Not thread-safe: use from one event loop."""

    def __init__(
        self,
        find_version: FindVersion,
        locate_bytes: LocateBytes,
        feed: FeedHub,
        clock: Clock,
        tasks: Tasks,
        page: MetricsPage,
    ) -> None:
        self.history: RestoreHistory[VersionKey] = RestoreHistory()
        self._find_version = find_version
        self._locate_bytes = locate_bytes
        self._feed = feed
        self._clock = clock
        self._tasks = tasks
        self._pending_forecasts: dict[VersionKey, _PendingForecast] = {}
        # Versions that may be at zero now, while the cache agent is asked about them.
        self._pending_idle_forecasts: dict[VersionKey, int] = {}
        self._idle_forecast_number = 0
        self._ratios = page.histogram(
            "kelvin_eta_ratio", "Actual over predicted duration of starts.", ("tier",), RATIOS
        )

    def __repr__(self) -> str:
        return f"<StartForecaster open={len(self._pending_forecasts)} {self.history!r}>"

    def on_start_accepted(self, key: VersionKey, requested_us: int, *, parked: bool, wake_level: Level | None) -> None:
        """Forecast an accepted start in the background. `parked`: its process exists; `wake_level`: it sleeps there."""
        self._pending_idle_forecasts.pop(key, None)
        start = self._pending_forecasts[key] = _PendingForecast(requested_us, parked, wake_level)
        self._tasks.start(self._forecast(key, start), f"forecast of {key}")

    def estimate(self, key: VersionKey, placement: TierPlacement, *, parked: bool) -> RestoreEstimate:
        """Estimate a start that would begin now."""
        return self.history.estimate(key, _total_bytes(placement), placement.bytes_s, parked=parked)

    def estimate_wake_s(self, key: VersionKey, total_bytes: int, level: Level) -> float:
        """Return the mean seconds of a wake from that level until the replica is ready."""
        history = self.history
        restore = (
            history.refill_time(key, total_bytes) if level is Level.DEEP_SLEEP else history.wake_time(key, total_bytes)
        )
        return restore.seconds

    async def find_placement(self, key: VersionKey) -> TierPlacement | None:
        """Return where the version's bytes are; None if the cache agent does not answer."""
        try:
            return await self._locate_bytes(key)
        except Refused as refused:
            log.info("the location of a version's bytes is unknown", extra={"version": str(key), "why": str(refused)})
            return None

    def on_replica_ready(self, replica: Replica) -> None:
        """Learn from a finished start or wake. Starts that another control plane began are ignored."""
        assert replica.key is not None
        self._pending_idle_forecasts.pop(replica.key, None)
        start, found = self._pending_forecasts.pop(replica.key, None), self._find_version(replica.key)
        if start is None or found is None or not replica.restore:
            return
        took_s = max(span.after_us for span in replica.restore) / 1e6
        total, tier = found[1].registration.total_bytes, slowest_tier(dict(replica.bytes_by_tier))
        if start.wake_level is not None:
            # Go by the steps that it took: it may have released its weights just when it was requested.
            if any(span.stage is Stage.LEASED for span in replica.restore):
                self.history.record_deep_wake(replica.key, total, replica.restore, tier)
            else:
                self.history.record_wake(replica.key, total, took_s)
            return
        forecast = start.estimate
        bytes_s = None if forecast is None else forecast.bytes_s
        self.history.record_start(replica.key, total, replica.restore, parked=start.parked, bytes_s=bytes_s, tier=tier)
        if forecast is not None:
            error = PastForecast(predicted_s=forecast.ready_s, actual_s=took_s, tier=tier)
            self.history.record_forecast_error(replica.key, error)
            self._ratios.observe((tier,), error.ratio)

    def on_start_failed(self, key: VersionKey, failure: Failure) -> None:
        """Drop the pending forecast: a failed start teaches nothing."""
        self._pending_forecasts.pop(key, None)

    def on_replica_lost(self, replica: Replica) -> None:
        """Tell activators how long another start would take, because this may have been the version's last replica. So
        a request whose deadline is too short does not wait. A mere guess is not published.
        """
        key = replica.key
        if key is None or not self._has_history(key):
            return
        self._idle_forecast_number += 1
        self._pending_idle_forecasts[key] = self._idle_forecast_number
        self._tasks.start(self._publish_idle_forecast(key, self._idle_forecast_number), f"start of {key} some day")

    def record_answers(self, records: tuple[RequestRecord, ...]) -> None:
        """Learn from requests that waited for a start how long the first batch took.

        The first byte of a whole response leaves when all of it is computed, so the end of prefill counts. A prediction
        has no such stage: its first batch is its response. The first token of a stream leaves at once, so it counts.
        """
        for record in records:
            if record.timeline is None or record.version is None or record.outcome != OK:
                continue
            at_us = {stamp.stage: stamp.at_us for stamp in record.timeline}
            is_whole = not record.stream and Stage.PREFILLED in at_us
            first = Stage.PREFILLED if is_whole else Stage.FIRST_TOKEN
            if Stage.READY in at_us and first in at_us:
                key = VersionKey(*split_qualified_name(record.tenant, record.model), record.version)
                self.history.record_answers(key, (at_us[first] - at_us[Stage.READY]) / 1e6)

    async def _forecast(self, key: VersionKey, start: _PendingForecast) -> None:
        bytes_to_bring, tier = 0, None
        if start.wake_level is not None:
            found = self._find_version(key)
            left_s = (
                0.0 if found is None else self.estimate_wake_s(key, found[1].registration.total_bytes, start.wake_level)
            )
        else:
            placement = await self.find_placement(key)
            if placement is None or self._pending_forecasts.get(key) is not start:
                return  # the start is over: too late for a forecast
            start.estimate = self.estimate(key, placement, parked=start.parked)
            bytes_to_bring = _total_bytes(placement) - placement.bytes_by_tier.get("host", 0)
            tier = slowest_tier(placement.bytes_by_tier)
            left_s = start.estimate.ready_s - (self._clock.monotonic_us() - start.requested_us) / 1e6
        row = Forecast(
            tenant=key.tenant,
            model=key.model,
            version=key.version,
            ready_in_ms=max(0, round(left_s * 1000)),
            bytes_to_bring=bytes_to_bring,
            tier=tier,
        )
        self._feed.publish(Feed(forecasts=(row,)))

    def _has_history(self, key: VersionKey) -> bool:
        found = self._find_version(key)
        return found is not None and self.history.start_time(key, found[1].registration.total_bytes).samples > 0

    async def _publish_idle_forecast(self, key: VersionKey, idle_forecast_number: int) -> None:
        placement = await self.find_placement(key)
        if self._pending_idle_forecasts.get(key) != idle_forecast_number:
            return  # meanwhile it serves or starts, or was lost again
        del self._pending_idle_forecasts[key]
        if placement is None or not _is_measured(placement) or self._find_version(key) is None:
            return
        forecast = self.estimate(key, placement, parked=True)
        if forecast.basis is EstimateBasis.GUESS:
            return
        row = StartRow(
            tenant=key.tenant, model=key.model, version=key.version, start_ms=max(0, round(forecast.ready_s * 1000))
        )
        self._feed.publish(Feed(starts=(row,)))


def _is_measured(placement: TierPlacement) -> bool:
    """Return whether every tier that has bytes of the version has a measured rate, not an assumed one."""
    tiers = [tier for tier, nbytes in placement.bytes_by_tier.items() if nbytes and tier in placement.rates]
    return all(placement.rates[tier].loads for tier in tiers)


def _total_bytes(placement: TierPlacement) -> int:
    return sum(placement.bytes_by_tier.values())
