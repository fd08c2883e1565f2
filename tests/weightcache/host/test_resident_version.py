"""Every waiter of a load gets each part once, in order of readiness, and none of an abandoned place."""

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
    """A reader may come before there is a place or in the middle of the load, and gets all parts."""

    progress, resident_place, received = LoadProgress(), place(), list[Span]()

    async def listen() -> ResidentVersion:
        resident = await progress.wait_until_placed()
        while spans := await progress.ready_since(resident, len(received)):
            received.extend(spans)
        return resident

    early = asyncio.create_task(listen())
    await wait_until_idle()
    with progress.track_load(resident_place, CHUNKS, ["c"]):
        await wait_until_idle()
        assert received == [(10, 11)]
        progress.mark_ready(resident_place, "a")
        assert await progress.ready_since(resident_place, 0) == ((10, 11), (0, 4), (6, 10))
        await wait_until_idle()
        progress.mark_ready(resident_place, "b")
    assert await early is resident_place
    assert received == [(10, 11), (0, 4), (6, 10)], "the last part is not reported: the load's end is"
    assert await progress.ready_since(resident_place, 0) == ()


async def test_moved_load_reports_from_the_start() -> None:
    """After a move, the old place reports nothing more, and the new one reports only its own parts."""

    progress, old, new = LoadProgress(), place(), place()
    with progress.track_load(old, CHUNKS, []):
        listening = asyncio.create_task(progress.ready_since(old, 0))
        await wait_until_idle()
    with progress.track_load(new, CHUNKS, []):
        progress.mark_ready(old, "a")
        assert await listening == ()
        assert await progress.wait_until_placed() is new
        progress.mark_ready(new, "b")
        assert await progress.ready_since(new, 0) == ((4, 6),)


async def test_a_message_is_bounded() -> None:
    """One message reports at most `MAX_SPANS` parts."""

    progress, resident_place = LoadProgress(), place()
    with progress.track_load(resident_place, [("a", 1)] * (MAX_SPANS + 1), ["a"]):
        assert len(await progress.ready_since(resident_place, 0)) == MAX_SPANS
        assert await progress.ready_since(resident_place, MAX_SPANS) == ((MAX_SPANS, MAX_SPANS + 1),)
