"""Faults of network and endpoint are retried or raised as the right error. A read never returns too few bytes."""

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest
from blake3 import blake3

from kelvin.blobstore.blob_store import BlobCorrupt, BlobNotFound, BlobShort, BlobStore, BlobUnavailable
from kelvin.blobstore.s3_reads import CancelToken
from kelvin.blobstore.verifying_store import VerifyingStore
from tests.eventually import wait
from tests.faults.fault_proxy import FaultProxy
from tests.faults.http_faults import (
    CONFLICT,
    SLOW_DOWN,
    AlteredBody,
    ClosedConnection,
    DelayedAnswer,
    Exchange,
    Fault,
    LostAnswer,
    S3Error,
    StaleAnswer,
    StalledBody,
    TruncatedBody,
    flipped,
    truncated,
)
from tests.kelvin.blobstore.s3_world import BODY, PART, World
from tests.kelvin.blobstore.suite import keys_of, pieces

pytestmark = pytest.mark.deep

KEYS = [f"t/{n}" for n in range(5)]


async def read(store: BlobStore) -> None:
    assert await store.read("t/0") == BODY


async def read_into(store: BlobStore) -> None:
    into = bytearray(3000)
    await store.read_into("t/0", 500, memoryview(into))
    assert bytes(into) == BODY[500:3500]


async def stat(store: BlobStore) -> None:
    assert (await store.stat("t/0")).size == len(BODY)


async def listing(store: BlobStore) -> None:
    assert await keys_of(store, "t/") == KEYS


async def put(store: BlobStore) -> None:
    await store.put_if_absent("t/new", BODY)
    assert await store.read("t/new") == BODY


async def put_pieces(store: BlobStore) -> None:
    await store.put_if_absent("t/new", pieces())
    assert await store.read("t/new") == BODY


async def delete(store: BlobStore) -> None:
    await store.delete("t/0")


CALLS = {
    "read": read,
    "read_into": read_into,
    "stat": stat,
    "list": listing,
    "put": put,
    "put of pieces": put_pieces,
    "delete": delete,
}
LINE = {
    "slow down": SLOW_DOWN,
    "an error of the server": S3Error(500, "InternalError"),
    "a closed connection": ClosedConnection(),
    "a lost answer": LostAnswer(),
}
BODIES = {"a body that is cut": TruncatedBody(100), "a body that is too short": truncated(100)}
TABLE = [pytest.param(CALLS[call], fault, id=f"{call}: {name}") for call in CALLS for name, fault in LINE.items()] + [
    pytest.param(CALLS[call], fault, id=f"{call}: {name}")
    for call in ("read", "read_into", "list")
    for name, fault in BODIES.items()
]


@pytest.mark.parametrize(("call", "fault"), TABLE)
def test_a_fault_is_raised_and_a_retry_succeeds(
    world: World, call: Callable[[BlobStore], Coroutine[None, None, None]], fault: Fault
) -> None:
    """The bare store raises `BlobUnavailable` while a fault lasts. With retries, one fault goes unnoticed."""
    for key in KEYS:
        world.plant(key)
    alone = world.store(read_bytes=700)
    with world.proxy.faulty(fault), pytest.raises(BlobUnavailable):
        asyncio.run(call(alone))
    world.proxy.inject(fault)
    asyncio.run(call(world.retrying(alone)))
    assert world.proxy.seen[-1].fault is None


def test_tries_are_counted_once(world: World) -> None:
    """There are four attempts in all: boto3 adds no retries of its own."""
    world.plant("t/a")
    store = world.retrying(world.store())
    with world.proxy.faulty(SLOW_DOWN), pytest.raises(BlobUnavailable):
        asyncio.run(store.stat("t/a"))
    assert world.proxy.count("HEAD") == 4


def test_permanent_failure_is_not_retried(world: World) -> None:
    """A missing key and a missing range cost one request each."""
    world.plant("t/a")
    store = world.retrying(world.store())
    with pytest.raises(BlobNotFound):
        asyncio.run(store.read("t/b", 0, 5))
    with pytest.raises(BlobShort):
        asyncio.run(store.read("t/a", len(BODY) - 1, 2))
    with pytest.raises(BlobShort):
        asyncio.run(store.read("t/a", len(BODY) + 1, 2))
    assert world.proxy.count("GET") == 3


def test_a_small_object_is_one_round_trip(world: World) -> None:
    """A small object takes one GET, because manifests are read at a cold start. An empty rest takes another request."""
    world.plant("t/a")
    store = world.store()
    assert asyncio.run(store.read("t/a")) == BODY
    assert asyncio.run(store.read("t/a", 100)) == BODY[100:]
    assert (world.proxy.count("GET"), world.proxy.count("HEAD")) == (2, 0)
    assert asyncio.run(store.read("t/a", len(BODY))) == b""


def test_a_put_whose_answer_was_lost(world: World) -> None:
    """The retry finds the object complete and returns False, because it can't know that it created the object."""
    world.proxy.inject(LostAnswer(), method="PUT")
    assert asyncio.run(world.retrying(world.store()).put_if_absent("t/a", BODY)) is False
    assert world.fetch("t/a") == BODY


def test_a_conflict_is_retried(world: World) -> None:
    """A 409 means neither won nor lost, so the put is retried."""
    world.proxy.inject(CONFLICT, method="PUT", times=2)
    assert asyncio.run(world.retrying(world.store()).put_if_absent("t/a", BODY)) is True
    assert world.proxy.count("PUT") == 3


def _without(header: str) -> Fault:
    """Return a fault that removes a header from the request, as for a server that doesn't support it."""

    def fault(exchange: Exchange) -> None:
        rest = {name: value for name, value in exchange.request.headers.items() if name != header}
        exchange.send(exchange.ask(replace(exchange.request, headers=rest)))

    return fault


def _saying(header: str, value: str) -> Fault:
    """Return a fault that replaces a header of the response."""

    def fault(exchange: Exchange) -> None:
        answer = exchange.ask()
        rest = tuple((name, said) for name, said in answer.headers if name.lower() != header)
        exchange.send(replace(answer, headers=(*rest, (header, value))))

    return fault


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(_without("range"), id="the whole object instead of a range"),
        pytest.param(_saying("content-range", f"bytes 1-100/{len(BODY)}"), id="another range"),
        pytest.param(_saying("content-range", "bytes of some kind"), id="a range that can't be read"),
        pytest.param(AlteredBody(lambda body: body + b"x"), id="more bytes than were asked for"),
        pytest.param(AlteredBody(lambda body: b""), id="no bytes"),
    ],
)
def test_wrong_range_is_unavailable(world: World, fault: Fault) -> None:
    """A response with the wrong range is unavailable, and its bytes are not used."""
    world.plant("t/a")
    store = world.store()
    world.proxy.inject(fault, method="GET")
    with pytest.raises(BlobUnavailable):
        asyncio.run(store.read("t/a", 0, 100))
    assert asyncio.run(store.read("t/a", 0, 100)) == BODY[:100]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda body: body[: len(body) // 2], id="half of it"),
        pytest.param(lambda body: b"no XML at all", id="another text"),
        pytest.param(lambda body: body.replace(b"<Key>p/", b"<Key>q/"), id="keys of another prefix"),
        pytest.param(lambda body: body.replace(b"t/1<", b"t/3<"), id="keys out of order"),
        pytest.param(lambda body: body.replace(b"NextContinuationToken", b"Next"), id="no way to the next page"),
    ],
)
def test_a_listing_that_makes_no_sense(world: World, change: Callable[[bytes], bytes]) -> None:
    """An invalid page is retried. It never makes the listing shorter."""
    for key in KEYS:
        world.plant(key)
    store = world.store()
    with world.proxy.faulty(AlteredBody(change), method="GET"), pytest.raises(BlobUnavailable):
        asyncio.run(keys_of(store))
    world.proxy.inject(AlteredBody(change), method="GET")
    assert asyncio.run(keys_of(world.retrying(store))) == KEYS


def test_ranges_are_of_one_object(world: World) -> None:
    """All ranges after the first require the same ETag. A replaced object is read again from its start, not mixed."""
    world.plant("t/a")
    store = world.store(read_bytes=PART)
    assert asyncio.run(store.read("t/a")) == BODY
    asked = [seen.request.headers.get("if-match") for seen in world.proxy.seen]
    assert len(asked) == 10
    assert asked[0] is None
    assert None not in asked[1:]
    other = BODY[::-1]
    world.plant("t/a", other)
    with pytest.raises(BlobUnavailable):
        asyncio.run(store.read_into("t/a", 0, memoryview(bytearray(2000))))
    assert asyncio.run(store.read("t/a")) == other


def test_an_endpoint_without_if_match(world: World) -> None:
    """ETags are compared even if the endpoint ignores `If-Match`."""
    world.plant("t/a")
    store = world.store(read_bytes=PART)
    asyncio.run(store.stat("t/a"))
    world.plant("t/a", BODY[::-1])
    with world.proxy.faulty(_without("if-match")), pytest.raises(BlobUnavailable):
        asyncio.run(store.read_into("t/a", 0, memoryview(bytearray(2000))))


def test_stale_reads(world: World) -> None:
    """A new object may still be missing for a moment. It is found once the endpoint is consistent."""
    store = world.store()
    with pytest.raises(BlobNotFound):
        asyncio.run(store.stat("t/a"))
    asyncio.run(store.put_if_absent("t/a", BODY))
    world.proxy.inject(StaleAnswer(), method="HEAD")
    with pytest.raises(BlobNotFound):
        asyncio.run(store.stat("t/a"))
    assert asyncio.run(store.stat("t/a")).size == len(BODY)


def test_wrong_bytes_are_for_the_layer_above(world: World) -> None:
    """The S3 store returns wrong bytes (negative control). `VerifyingStore` refuses them by their digest."""
    key = f"t/manifests/{blake3(BODY).hexdigest()}"
    world.plant(key)
    store = world.store()
    with world.proxy.faulty(flipped(77), method="GET"):
        assert asyncio.run(store.read(key)) != BODY
        with pytest.raises(BlobCorrupt):
            asyncio.run(VerifyingStore(store).read(key))
    assert asyncio.run(VerifyingStore(store).read(key)) == BODY


@pytest.mark.parametrize("fault", [DelayedAnswer(), StalledBody(300)], ids=["no answer", "no more of it"])
def test_silent_endpoint_is_unavailable(world: World, fault: Fault) -> None:
    """A silent endpoint is unavailable after `read_s`."""
    world.plant("t/a")
    store = world.store(read_s=0.3)
    with world.proxy.faulty(fault), pytest.raises(BlobUnavailable):
        asyncio.run(store.read_into("t/a", 0, memoryview(bytearray(1000))))


async def test_a_cancelled_read_ends_at_once(world: World) -> None:
    """The connections are closed, although the read timeout is a minute. The memory isn't written to any more."""
    world.plant("t/a")
    store = world.store(read_bytes=2500)
    into = bytearray(10_000)

    await store.stat("t/a")  # learn the ETag, so that all ranges start at once
    world.proxy.inject(StalledBody(300), method="GET", times=None)
    read = asyncio.ensure_future(store.read_into("t/a", 0, memoryview(into)))
    await asyncio.to_thread(world.proxy.wait_until_seen, 4, "GET")
    read.cancel()
    await asyncio.wait({read}, timeout=30)
    assert read.cancelled()
    found = bytes(into)
    world.proxy.lift()
    assert await store.read("t/a") == BODY
    assert bytes(into) == found


async def test_control_without_the_halt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the cancel token, the read waits as long as the client does."""
    monkeypatch.setattr(CancelToken, "set", lambda halt: None)
    world.plant("t/a")
    store = world.store()

    world.proxy.inject(StalledBody(300), method="GET", times=None)
    read = asyncio.ensure_future(store.read_into("t/a", 0, memoryview(bytearray(1000))))
    await asyncio.to_thread(world.proxy.wait_until_seen, 1, "GET")
    read.cancel()
    await asyncio.wait({read}, timeout=0.2)
    assert not read.done()
    world.proxy.lift()
    with pytest.raises(asyncio.CancelledError):
        await read


async def test_a_read_that_fails_ends_its_other_ranges(world: World) -> None:
    """If one range is refused while the others stall, the error is raised at once."""
    world.plant("t/a")
    store = world.store(read_bytes=2500)
    await store.stat("t/a")
    world.proxy.inject(StalledBody(300), method="GET", times=3)
    world.proxy.inject(SLOW_DOWN, method="GET")

    with pytest.raises(BlobUnavailable, match="unavailable"):
        await asyncio.wait_for(store.read_into("t/a", 0, memoryview(bytearray(10_000))), 30)


async def test_no_connection_is_left(world: World) -> None:
    """After faults and retries, at most as many connections as threads are open. After `close`, none is."""
    world.plant("t/a")
    with FaultProxy(*world.proxy.upstream) as proxy:
        store = world.store(endpoint=proxy.url, connections=3, read_bytes=500)

        for fault in (TruncatedBody(3), truncated(5), SLOW_DOWN, ClosedConnection()):
            proxy.inject(fault, method="GET")
            with contextlib.suppress(BlobUnavailable):
                await store.read("t/a")
        for _ in range(3):
            assert await store.read("t/a") == BODY
        wait(lambda: 0 < proxy.connections <= 3, "at most three connections stay")
        await store.close()
        gc.collect()  # urllib3 closes a pool with its last reference
        wait(lambda: proxy.connections == 0, "no connection stays")


async def test_a_connection_is_used_again(world: World) -> None:
    """Sequential calls share one connection."""
    world.plant("t/a")
    with FaultProxy(*world.proxy.upstream) as proxy:
        store = world.store(endpoint=proxy.url, connections=3)

        for _ in range(5):
            assert await store.read("t/a") == BODY
            assert await store.read("t/a", 5, 10) == BODY[5:15]
        assert proxy.connections == 1
