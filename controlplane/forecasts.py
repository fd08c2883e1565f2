"""Says of each start when it will be over, and keeps how right that was. What is said is `policy/eta`'s.

The agent is asked where the bytes are while the start is under way: no start waits for its forecast.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from contracts.control import Feed
from contracts.errors import Failure, Refused
from contracts.forecast import Forecast, StartRow, Whereabouts
from contracts.names import owner_of
from contracts.timeline import Stage
from contracts.usage import RequestRecord
from controlplane.clock import Clock
from controlplane.facts import Model, Version, VersionKey
from controlplane.feed import FeedHub
from controlplane.policy.breakeven import Level
from controlplane.policy.eta import Estimate, History, Known, PastForecast
from controlplane.replicas import Replica
from controlplane.tasks import Tasks
from telemetry.policy.instruments import Page
from telemetry.policy.labels import OK, slowest_tier

log = logging.getLogger(__name__)

Find = Callable[[VersionKey], tuple[Model, Version] | None]
Where = Callable[[VersionKey], Awaitable[Whereabouts]]

RATIOS: Final = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


@dataclass(slots=True)
class _Open:
    """A start under way. `estimate` comes while it runs, or never."""

    asked_us: int
    parked: bool
    wakes: Level | None  # from which sleep; None: it starts
    estimate: Estimate | None = None


class Forecasts:
    """Listens to the actuator. Everything is one event loop's."""

    def __init__(self, find: Find, where: Where, feed: FeedHub, clock: Clock, tasks: Tasks, page: Page) -> None:
        self.history: History[VersionKey] = History()
        self._find = find
        self._where = where
        self._feed = feed
        self._clock = clock
        self._tasks = tasks
        self._open: dict[VersionKey, _Open] = {}
        self._falling: dict[VersionKey, int] = {}  # versions that may be at zero, of which the cache is asked
        self._falls = 0
        self._ratios = page.histogram(
            "kelvin_eta_ratio", "What starts took, over what was said of them meanwhile.", ("tier",), RATIOS
        )

    def __repr__(self) -> str:
        return f"<Forecasts open={len(self._open)} {self.history!r}>"

    def starting(self, key: VersionKey, asked_us: int, *, parked: bool, wakes: Level | None) -> None:
        """A start was accepted: of a process, which is `parked` already or not, or of one that sleeps so deep."""
        self._falling.pop(key, None)
        start = self._open[key] = _Open(asked_us, parked, wakes)
        self._tasks.start(self._forecast(key, start), f"forecast of {key}")

    def estimate(self, key: VersionKey, whereabouts: Whereabouts, *, parked: bool) -> Estimate:
        """Of a start that would begin now."""
        return self.history.estimate(key, _total(whereabouts), whereabouts.bytes_s, parked=parked)

    def waking_s(self, key: VersionKey, total_bytes: int, level: Level) -> float:
        """Mean seconds from asking for a replica that sleeps so deep until it is ready."""
        history = self.history
        restore = history.refill(key, total_bytes) if level is Level.ASLEEP2 else history.wake(key, total_bytes)
        return restore.seconds

    async def whereabouts(self, key: VersionKey) -> Whereabouts | None:
        """As the agent says; None where it does not answer."""
        try:
            return await self._where(key)
        except Refused as refused:
            log.info("where a version's bytes are is not known", extra={"version": str(key), "why": str(refused)})
            return None

    def ready(self, replica: Replica) -> None:
        """See `Listener`. Starts that another control plane began are not this one's to learn from."""
        assert replica.key is not None
        self._falling.pop(replica.key, None)
        start, found = self._open.pop(replica.key, None), self._find(replica.key)
        if start is None or found is None or not replica.restore:
            return
        took_s = max(span.after_us for span in replica.restore) / 1e6
        total, tier = found[1].registration.total_bytes, slowest_tier(dict(replica.bytes_by_tier))
        if start.wakes is not None:
            # By what it did: it may have dropped its weights in the moment in which it was asked for.
            if any(span.stage is Stage.LEASED for span in replica.restore):
                self.history.refilled(replica.key, total, replica.restore, tier)
            else:
                self.history.woke(replica.key, total, took_s)
            return
        said = start.estimate
        bytes_s = None if said is None else said.bytes_s
        self.history.started(replica.key, total, replica.restore, parked=start.parked, bytes_s=bytes_s, tier=tier)
        if said is not None:
            miss = PastForecast(predicted_s=said.ready_s, actual_s=took_s, tier=tier)
            self.history.missed(replica.key, miss)
            self._ratios.observe((tier,), miss.ratio)

    def failed(self, key: VersionKey, failure: Failure) -> None:
        """See `Listener`: nothing is learned of it."""
        self._open.pop(key, None)

    def lost(self, replica: Replica) -> None:
        """See `Listener`. It may have been the last one: activators are told how long another start would take, so that
        who has not the time is not kept waiting. Nothing is told of what was only guessed.
        """
        key = replica.key
        if key is None or not self._knows(key):
            return
        self._falls += 1
        self._falling[key] = self._falls
        self._tasks.start(self._stand(key, self._falls), f"start of {key} some day")

    def answered(self, records: tuple[RequestRecord, ...]) -> None:
        """Requests that waited for a start tell how long its first batch took.

        Of a whole answer the first byte leaves when all of it is computed, so the end of prefill counts. A prediction
        has no such stage: its first batch is its answer. The first token of a stream leaves at once, so it counts.
        """
        for record in records:
            if record.timeline is None or record.version is None or record.outcome != OK:
                continue
            at_us = {stamp.stage: stamp.at_us for stamp in record.timeline}
            is_whole = not record.stream and Stage.PREFILLED in at_us
            first = Stage.PREFILLED if is_whole else Stage.FIRST_TOKEN
            if Stage.READY in at_us and first in at_us:
                key = VersionKey(*owner_of(record.tenant, record.model), record.version)
                self.history.answered(key, (at_us[first] - at_us[Stage.READY]) / 1e6)

    async def _forecast(self, key: VersionKey, start: _Open) -> None:
        bytes_to_bring, tier = 0, None
        if start.wakes is not None:
            found = self._find(key)
            left_s = 0.0 if found is None else self.waking_s(key, found[1].registration.total_bytes, start.wakes)
        else:
            whereabouts = await self.whereabouts(key)
            if whereabouts is None or self._open.get(key) is not start:
                return  # too late to have been foretold
            start.estimate = self.estimate(key, whereabouts, parked=start.parked)
            bytes_to_bring = _total(whereabouts) - whereabouts.bytes_by_tier.get("host", 0)
            tier = slowest_tier(whereabouts.bytes_by_tier)
            left_s = start.estimate.ready_s - (self._clock.monotonic_us() - start.asked_us) / 1e6
        row = Forecast(
            tenant=key.tenant,
            model=key.model,
            version=key.version,
            ready_in_ms=max(0, round(left_s * 1000)),
            bytes_to_bring=bytes_to_bring,
            tier=tier,
        )
        self._feed.publish(Feed(forecasts=(row,)))

    def _knows(self, key: VersionKey) -> bool:
        found = self._find(key)
        return found is not None and self.history.start(key, found[1].registration.total_bytes).seen > 0

    async def _stand(self, key: VersionKey, fall: int) -> None:
        whereabouts = await self.whereabouts(key)
        if self._falling.get(key) != fall:
            return  # it is served or starts meanwhile, or was lost again
        del self._falling[key]
        if whereabouts is None or not _is_measured(whereabouts) or self._find(key) is None:
            return
        said = self.estimate(key, whereabouts, parked=True)
        if said.known is Known.GUESS:
            return
        row = StartRow(
            tenant=key.tenant, model=key.model, version=key.version, start_ms=max(0, round(said.ready_s * 1000))
        )
        self._feed.publish(Feed(starts=(row,)))


def _is_measured(whereabouts: Whereabouts) -> bool:
    """Whether each tier that the bytes would come from is as quick as it was seen to be."""
    tiers = [tier for tier, nbytes in whereabouts.bytes_by_tier.items() if nbytes and tier in whereabouts.rates]
    return all(whereabouts.rates[tier].loads for tier in tiers)


def _total(whereabouts: Whereabouts) -> int:
    return sum(whereabouts.bytes_by_tier.values())
