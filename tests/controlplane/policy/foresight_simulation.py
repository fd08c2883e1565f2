"""Days of many models over one host tier in a second: the product's expectations, places and values over virtual time.

Without foresight a version stays in memory until others need its place; with it, what is expected comes back first.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from contracts.errors import Refused
from controlplane.facts import VersionKey
from controlplane.foresight import Foresight
from controlplane.policy.breakeven import Gaps
from tests.controlplane.builders import digest
from weightcache.policy.extents import HUGE_PAGE
from weightcache.policy.host import HostIndex
from weightcache.policy.rates import Rates
from weightcache.policy.reload import slab_reload

SLAB: Final = HUGE_PAGE
KEPT_S: Final = 90.0  # a replica is kept for so long after the last call
HOUR: Final = 3600.0
DAY: Final = 24 * HOUR


@dataclass(frozen=True)
class Model:
    """Its name, its size in slabs, and when it is used: from, to."""

    name: str
    slabs: int
    uses: tuple[tuple[float, float], ...]


@dataclass
class Outcome:
    """Starts, those that found all bytes in memory; slabs that were brought ahead, those of them that were used."""

    starts: int = 0
    hot: int = 0
    refused: int = 0
    brought: int = 0
    used: int = 0

    @property
    def hot_share(self) -> float:
        return self.hot / max(1, self.starts)

    @property
    def wasted_share(self) -> float:
        return (self.brought - self.used) / max(1, self.brought)


class _Registration:
    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes


class _Version:
    def __init__(self, total_bytes: int) -> None:
        self.registration = _Registration(total_bytes)


class _World:
    """Clock, versions and cache in one."""

    def __init__(self, models: Sequence[Model], slabs: int) -> None:
        self.now = 0.0
        self.index = HostIndex(SLAB, slabs, reload_s=slab_reload(Rates(), lambda _: True))
        self.sizes = {VersionKey("a", model.name, digest("a")): model.slabs for model in models}
        self.held: dict[VersionKey, int] = {}
        self.waiting: dict[VersionKey, int] = {}
        self.outcome = Outcome()

    def monotonic_us(self) -> int:
        return int(self.now * 1e6)

    def find(self, key: VersionKey) -> Any:
        return None, _Version(self.sizes[key] * SLAB)

    def bring(self, key: VersionKey, worth: float) -> None:
        """As the agent would: into what is worth less, or not at all."""
        loaded = self._reserved(key, worth)
        if loaded:
            self.outcome.brought += loaded
            self.waiting[key] = loaded

    def start(self, key: VersionKey, holder: int) -> None:
        found = self._reserved(key, None)
        if found is None:
            self.outcome.refused += 1
            return
        self.outcome.starts += 1
        self.outcome.hot += not found
        brought = self.waiting.pop(key, 0)
        self.outcome.used += max(0, brought - found)
        self.held[key] = holder
        self.index.hold(holder, [place.slab for place in self._places(key)], self.now)

    def end(self, key: VersionKey) -> None:
        if (holder := self.held.pop(key, None)) is not None:
            self.index.drop_holder(holder)

    def _chunks(self, key: VersionKey) -> list[tuple[str, int]]:
        return [(f"{key.model}.{number}", SLAB) for number in range(self.sizes[key])]

    def _places(self, key: VersionKey) -> Iterable[Any]:
        places = (self.index.try_place(key.tenant, name) for name, _ in self._chunks(key))
        return (place for place in places if place is not None)

    def _reserved(self, key: VersionKey, worth: float | None) -> int | None:
        """Chunks that had to be loaded; None where there was no room."""
        try:
            reservation = self.index.reserve(key.tenant, self._chunks(key), self.now, worth)
        except Refused:
            return None
        for name in reservation.load:
            self.index.mark_ready(key.tenant, name)
        self.index.unpin(reservation.slabs)
        return len(reservation.load)


def simulate(models: Sequence[Model], slabs: int, *, foresee: bool, until_s: float, beat_s: float = 60.0) -> Outcome:
    """Uses begin and end between beats, at which reports come and expectations are looked at."""
    world, gaps = _World(models, slabs), Gaps[VersionKey]()
    foresight = Foresight(
        world, gaps, lambda key: key in world.held, lambda key, total: beat_s, world.bring, world,  # type: ignore[arg-type]
        least_s=600.0 if foresee else 0.0, bytes_per_s=1e12,
    )  # fmt: skip
    keys = {model.name: key for model, key in zip(models, world.sizes, strict=True)}
    events = sorted(
        event
        for model in models
        for begin, end in model.uses
        for event in ((begin, 1, model.name, end), (end + KEPT_S, 0, model.name, end))
    )
    busy_until: dict[VersionKey, float] = {}
    at = 0
    while world.now < until_s:
        beat = world.now + beat_s
        while at < len(events) and events[at][0] <= beat:
            when, begins, name, end = events[at]
            key, at, world.now = keys[name], at + 1, when
            if begins:
                gaps.busy(key, when)
                if key not in world.held:
                    world.start(key, at)
                busy_until[key] = end
            elif busy_until.get(key) == end:
                world.end(key)
                gaps.busy(key, end)
        world.now = beat
        if foresee:
            for key in world.held:
                if busy_until[key] > beat:
                    gaps.busy(key, beat)
            foresight.look()
    return world.outcome


def synthetic(seed: int, days: int) -> list[Model]:
    """Models with a time of the day, models with a rhythm, models without either, and a large batch now and then."""
    source = random.Random(seed)
    models = []
    for number in range(16):
        hour, jitter = source.uniform(0, 24) * HOUR, 600.0
        uses = [(day * DAY + hour + source.uniform(-jitter, jitter), 1200.0) for day in range(days)]
        models.append(_model(f"daily{number}", source.randint(2, 6), uses))
    for number in range(8):
        every, at = source.uniform(2, 6) * HOUR, source.uniform(0, 3) * HOUR
        uses = []
        while at < days * DAY:
            uses.append((at, 300.0))
            at += every * source.uniform(0.95, 1.05)
        models.append(_model(f"periodic{number}", source.randint(2, 6), uses))
    for number in range(12):
        at, uses = 0.0, []
        while (at := at + 600.0 + source.expovariate(1 / (8 * HOUR))) < days * DAY:
            uses.append((at, 300.0))
            at += 300.0
        models.append(_model(f"random{number}", source.randint(2, 6), uses))
    batches = [(at * 1.5 * HOUR, 600.0) for at in range(int(days * 16))]
    return models + [_model(f"batch{number}", 12, batches[number::6]) for number in range(6)]


def replayed(directory: Path, source: random.Random) -> list[Model]:
    """Clients of ServeGen's traces (time, rate in windows of 600 s) as models that are used where the rate is not 0;
    those that pause ten times and more.
    """
    models = []
    for path in sorted(directory.glob("chunk-*-trace.csv")):
        uses: list[tuple[float, float]] = []
        for line in path.read_text().splitlines():
            at, rate = line.split(",")[:2]
            if not float(rate):
                continue
            begin = float(at) + source.uniform(0, 300)
            if uses and float(at) - (uses[-1][0] + uses[-1][1]) < 600.0:
                uses[-1] = (uses[-1][0], float(at) + 600.0 - uses[-1][0])
            else:
                uses.append((begin, float(at) + 600.0 - begin))
        if len(uses) >= 10:
            models.append(_model(path.stem, source.randint(2, 8), uses))
    return models


def _model(name: str, slabs: int, uses: Iterable[tuple[float, float]]) -> Model:
    return Model(name, slabs, tuple((begin, begin + length) for begin, length in uses if begin >= 0))
