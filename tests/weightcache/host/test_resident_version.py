"""Whoever waits for a flight is told each part once, in the order in which it became ready; nothing of an old place."""

import asyncio

from weightcache.client.lease_protocol import MAX_SPANS
from weightcache.client.spans_policy import Span
from weightcache.host.resident_version import LoadProgress, ResidentVersion, SealedFile, TierTally

CHUNKS = [("a", 4), ("b", 2), ("a", 4), ("c", 1)]


def place() -> ResidentVersion:
    return ResidentVersion((0,), {}, SealedFile((b"papers",)), 6, 0, frozenset(), TierTally({}, {}))


async def wait_until_idle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_load_progress_is_reported_to_every_reader() -> None:
    """Readers come when they like: before there is a place, in the middle, one behind the other."""

    filling, there, told = LoadProgress(), place(), list[Span]()

    async def listen() -> ResidentVersion:
        resident = await filling.wait_until_placed()
        while spans := await filling.ready_since(resident, len(told)):
            told.extend(spans)
        return resident

    early = asyncio.create_task(listen())
    await wait_until_idle()
    with filling.loading_into(there, CHUNKS, ["c"]):
        await wait_until_idle()
        assert told == [(10, 11)]
        filling.add(there, "a")
        assert await filling.ready_since(there, 0) == ((10, 11), (0, 4), (6, 10))
        await wait_until_idle()
        filling.add(there, "b")
    assert await early is there
    assert told == [(10, 11), (0, 4), (6, 10)], "the last word is that it is whole, and comes otherwise"
    assert await filling.ready_since(there, 0) == ()


async def test_moved_load_reports_from_the_start() -> None:
    """What becomes ready in the old one, and who still listens for it, has nothing to do with the new one."""

    filling, old, new = LoadProgress(), place(), place()
    with filling.loading_into(old, CHUNKS, []):
        listening = asyncio.create_task(filling.ready_since(old, 0))
        await wait_until_idle()
    with filling.loading_into(new, CHUNKS, []):
        filling.add(old, "a")
        assert await listening == ()
        assert await filling.wait_until_placed() is new
        filling.add(new, "b")
        assert await filling.ready_since(new, 0) == ((4, 6),)


async def test_a_message_is_bounded() -> None:
    """However much became ready at once."""

    filling, there = LoadProgress(), place()
    with filling.loading_into(there, [("a", 1)] * (MAX_SPANS + 1), ["a"]):
        assert len(await filling.ready_since(there, 0)) == MAX_SPANS
        assert await filling.ready_since(there, MAX_SPANS) == ((MAX_SPANS, MAX_SPANS + 1),)
