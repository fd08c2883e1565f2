"""Who was told that a change is made asks, and is right: no change returns before the activators were told of it."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from contracts.ladder import Ladder
from controlplane import registry as subject
from controlplane.feed import FeedHub, Subscription
from controlplane.registry import Registry
from tests.controlplane.builders import BY, NOW_S, TENANT, opened_registry, registration

LIMIT_S = 30.0

Change = Callable[[Registry], Coroutine[Any, Any, object]]


def free(_: object) -> bool:
    return False


CHANGES: dict[str, Change] = {
    "push": lambda registry: registry.register(registration(letter="c"), NOW_S),
    "deploy": lambda registry: registry.deploy(BY, TENANT, "m", "b" * 12, NOW_S),
    "split": lambda registry: registry.split(BY, TENANT, "m", {"a" * 12: 1, "b" * 12: 1}, NOW_S),
    "ladder": lambda registry: registry.set_ladder(BY, TENANT, "m", Ladder(steps=()), NOW_S),
    "scale": lambda registry: registry.rescale(BY, TENANT, "m", {"backlog_s": 5.0}, NOW_S),
    "delete": lambda registry: registry.delete(BY, TENANT, "m", "b" * 12, NOW_S, free),
    "delete model": lambda registry: registry.delete_model(BY, TENANT, "m", NOW_S, free, force=True),
}


async def hear(reader: Subscription) -> None:
    """All that is queued."""
    while reader._lines:
        await reader.take()
        reader.sent()


async def changed(path: Path, change: Change, reads: bool) -> bool:
    """Whether it was over while a reader lagged. It `reads` then."""
    hub = FeedHub()
    async with opened_registry(path, hub) as registry:
        await registry.register(registration(letter="a"), NOW_S)
        await registry.register(registration(letter="b"), NOW_S)
        with hub.subscribe() as reader:
            await hear(reader)
            before = hub.snapshot().revision
            changing = asyncio.ensure_future(change(registry))
            while hub.snapshot().revision == before:
                await asyncio.sleep(0.001)
            for _ in range(5):
                await asyncio.sleep(0)
            early = changing.done()
            if reads:
                await hear(reader)
            await asyncio.wait_for(changing, LIMIT_S)
            return early


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_waits_for_its_readers(tmp_path: Path, name: str) -> None:
    """And no longer."""
    assert not asyncio.run(changed(tmp_path, CHANGES[name], reads=True))


def test_one_that_hears_nothing_holds_nobody_up_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second, here less, it is a change all the same."""
    monkeypatch.setattr(subject, "TELL_S", 0.05)
    assert not asyncio.run(changed(tmp_path, CHANGES["deploy"], reads=False))
