"""Whoever waits for a flight is told each part once, in the order in which it became ready; nothing of an old place."""

import asyncio

from weightcache.policy.spans import Span
from weightcache.resident import Filling, Resident, SealedFile, Tally
from weightcache.wire import MAX_SPANS

CHUNKS = [("a", 4), ("b", 2), ("a", 4), ("c", 1)]


def place() -> Resident:
    return Resident((0,), {}, SealedFile((b"papers",)), 6, 0, frozenset(), Tally({}, {}))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_it_is_told_as_it_goes() -> None:
    """Readers come when they like: before there is a place, in the middle, one behind the other."""

    filling, there, told = Filling(), place(), list[Span]()

    async def listen() -> Resident:
        resident = await filling.placed()
        while spans := await filling.after(resident, len(told)):
            told.extend(spans)
        return resident

    early = asyncio.create_task(listen())
    await settle()
    with filling.towards(there, CHUNKS, ["c"]):
        await settle()
        assert told == [(10, 11)]
        filling.add(there, "a")
        assert await filling.after(there, 0) == ((10, 11), (0, 4), (6, 10))
        await settle()
        filling.add(there, "b")
    assert await early is there
    assert told == [(10, 11), (0, 4), (6, 10)], "the last word is that it is whole, and comes otherwise"
    assert await filling.after(there, 0) == ()


async def test_another_place() -> None:
    """What becomes ready in the old one, and who still listens for it, has nothing to do with the new one."""

    filling, old, new = Filling(), place(), place()
    with filling.towards(old, CHUNKS, []):
        listening = asyncio.create_task(filling.after(old, 0))
        await settle()
    with filling.towards(new, CHUNKS, []):
        filling.add(old, "a")
        assert await listening == ()
        assert await filling.placed() is new
        filling.add(new, "b")
        assert await filling.after(new, 0) == ((4, 6),)


async def test_a_message_is_bounded() -> None:
    """However much became ready at once."""

    filling, there = Filling(), place()
    with filling.towards(there, [("a", 1)] * (MAX_SPANS + 1), ["a"]):
        assert len(await filling.after(there, 0)) == MAX_SPANS
        assert await filling.after(there, MAX_SPANS) == ((MAX_SPANS, MAX_SPANS + 1),)
