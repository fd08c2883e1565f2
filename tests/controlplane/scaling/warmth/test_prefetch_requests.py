"""Prefetcher tells the weight cache which versions will be needed: each once at a time. A cache that is away fails
nothing.
"""

import asyncio
from pathlib import Path

import pytest

from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.warmth import prefetch_requests
from controlplane.scaling.warmth.prefetch_requests import Prefetcher, PrefetchRequest
from controlplane.tasks import Tasks
from kelvin.contracts.errors import Refused, Unavailable
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, key, opened_registry, registration
from tests.controlplane.scaling.autoscaler_fixture import FAST, replace_scale, running_autoscaler, wake_version


class FakeCache:
    """A weight cache that answers once `open` is set, and refuses if it is away."""

    def __init__(self, *, away: bool = False) -> None:
        self.wishes: list[PrefetchRequest] = []
        self.open = asyncio.Event()
        self.away = away

    async def ask(self, wish: PrefetchRequest) -> None:
        self.wishes.append(wish)
        await self.open.wait()
        if self.away:
            raise Refused(Unavailable("cache"))


@pytest.mark.parametrize("away", [False, True])
async def test_prefetch_is_sent_once_at_a_time(monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    """A repeat while one is in flight is dropped, and so are those above MAX_IN_FLIGHT. Afterwards it is sent again."""
    monkeypatch.setattr(prefetch_requests, "MAX_IN_FLIGHT", 2)

    cache = FakeCache(away=away)
    async with Tasks() as tasks:
        prefetcher = Prefetcher(cache.ask, tasks)
        for _ in range(3):
            prefetcher.on_alias_moved(key())
            prefetcher.on_start_waiting(key())
        prefetcher.on_alias_moved(key(letter="b"))
        await asyncio.sleep(0)
        assert [wish.urgent for wish in cache.wishes] == [False, True]
        cache.open.set()
        await tasks.wait_idle()
        prefetcher.on_alias_moved(key(letter="b"))
        await tasks.wait_idle()
    assert [wish.version for wish in cache.wishes] == [digest("a"), digest("a"), digest("b")]


async def test_alias_target_is_prefetched(tmp_path: Path) -> None:
    """The first push makes `prod` and is prefetched, and so is each deploy. A later push without an alias is not."""
    named: list[VersionKey] = []

    async with opened_registry(tmp_path) as registry:
        registry.on_alias_moved = named.append
        await registry.register(registration(letter="a"), NOW_S)
        await registry.register(registration(letter="a"), NOW_S)
        await registry.register(registration(letter="b"), NOW_S)
        assert named == [key(letter="a")]
        await registry.deploy(BY, TENANT, "m", "b" * 12, NOW_S)
        assert named == [key(letter="a"), key(letter="b")]


async def test_version_waiting_for_slot_is_prefetched() -> None:
    """It is prefetched once, while an idle version is ended for it."""
    placing: list[VersionKey] = []
    async with running_autoscaler(slots=1) as w:
        w.scaler.on_start_waiting = placing.append
        idle, requested = (w.catalogue.add(name, replace_scale(FAST, grace_s=600.0)) for name in ("idle", "requested"))
        await wake_version(w, idle)
        await w.pass_seconds(5)
        assert placing == []
        w.report(requested)
        w.report(requested)
        assert placing == [requested]
