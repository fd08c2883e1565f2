"""An interrupted S3 read resumes at its offset in the same object. Cancelled reads and listings end at once."""

import asyncio
import random
from collections.abc import Callable

import pytest

from kelvin.blobstore import s3_reads
from kelvin.blobstore.blob_store import BlobUnavailable
from kelvin.blobstore.s3_store import S3Store
from tests.faults.http_faults import DelayedAnswer, Exchange, Fault, TruncatedBody
from tests.kelvin.blobstore.s3_world import World

pytestmark = pytest.mark.deep

KIB = 1 << 10
LARGE = random.Random(1).randbytes(1200 * KIB)


def ranges(world: World) -> list[tuple[int, str | None]]:
    """Return the first byte of each GET and the ETag that it required."""
    gets = [seen.request.headers for seen in world.proxy.seen if seen.request.method == "GET"]
    return [(int(head["range"].removeprefix("bytes=").split("-")[0]), head.get("if-match")) for head in gets]


def read(store: S3Store, count: int = len(LARGE)) -> bytes:
    into = bytearray(count)
    asyncio.run(store.read_into("t/a", 0, memoryview(into)))
    return bytes(into)


def test_a_cut_goes_on(world: World) -> None:
    """Each retry starts after the received bytes and requires the same object. The caller sees no error."""
    world.plant("t/a", LARGE)
    world.proxy.inject(TruncatedBody(700 * KIB), method="GET")
    world.proxy.inject(TruncatedBody(300 * KIB), method="GET")
    assert read(world.store()) == LARGE
    (first, none), (second, tag), (third, same) = ranges(world)
    assert (first, second, third) == (0, 700 * KIB, 1000 * KIB)
    assert none is None
    assert tag is not None
    assert tag == same


def test_a_cut_that_brought_nothing_is_an_error(world: World) -> None:
    """A read whose retry would make no progress is an error after one request."""
    world.plant("t/a", LARGE)
    with world.proxy.faulty(TruncatedBody(200 * KIB), method="GET"), pytest.raises(BlobUnavailable):
        read(world.store())
    assert world.proxy.count("GET") == 1


def _while(change: Callable[[], None], after: int) -> Fault:
    """Return a fault that calls `change` and then truncates the response."""

    def fault(exchange: Exchange) -> None:
        answer = exchange.ask()
        change()
        exchange.send(answer, cut_after=after)

    return fault


def test_replaced_object_is_not_resumed(world: World) -> None:
    """An object that was replaced during a read makes that read unavailable. The next read returns the new object."""
    world.plant("t/a", LARGE)
    other = LARGE[::-1]
    world.proxy.inject(_while(lambda: world.plant("t/a", other), 700 * KIB), method="GET")
    store = world.store()
    with pytest.raises(BlobUnavailable):
        read(store)
    assert read(store) == other


async def give_up(world: World, store: S3Store, into: bytearray, limit_s: float) -> bool:
    """Cancel a read while its response headers are late, and return whether it ended in time."""
    world.proxy.inject(DelayedAnswer(), method="GET")
    reading = asyncio.ensure_future(store.read_into("t/a", 0, memoryview(into)))
    await asyncio.to_thread(world.proxy.wait_until_seen, 1, "GET")
    reading.cancel()
    await asyncio.wait({reading}, timeout=limit_s)
    ended = reading.done()
    world.proxy.lift()
    await asyncio.wait({reading})
    return ended


def test_read_cancelled_before_the_head_ends(world: World) -> None:
    """The read ends although its thread can't be interrupted. The late response is discarded."""
    world.plant("t/a", LARGE)
    store, into = world.store(), bytearray(len(LARGE))
    assert asyncio.run(give_up(world, store, into, 30))
    assert read(store) == LARGE
    asyncio.run(store.close())  # waits for the abandoned thread
    assert not any(into)


def test_control_without_strays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: if no thread may be abandoned, the read waits as long as the endpoint is silent."""
    monkeypatch.setattr(s3_reads, "MAX_ABANDONED", 0)
    world.plant("t/a", LARGE)
    assert not asyncio.run(give_up(world, world.store(), bytearray(len(LARGE)), 0.2))


async def test_cancelled_listing_ends(world: World) -> None:
    """A cancelled listing ends at once, even if the endpoint is silent."""
    store = world.store()
    world.proxy.inject(DelayedAnswer(), method="GET")
    listing = asyncio.ensure_future(anext(store.list("t/"), None))
    await asyncio.to_thread(world.proxy.wait_until_seen, 1, "GET")
    listing.cancel()
    await asyncio.wait({listing}, timeout=10)
    ended = listing.done()
    world.proxy.lift()
    await asyncio.wait({listing})
    assert ended
