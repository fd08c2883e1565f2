"""The conformance suite of `BlobStore`. Each implementation and wrapper subclasses it and defines `open`."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kelvin.blobstore.blob_store import BadKey, BlobNotFound, BlobShort, BlobStore

BODY = bytes(range(256)) * 40


async def pieces(body: bytes = BODY, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def breaking(after: int) -> AsyncIterator[bytes]:
    for _ in range(after):
        yield b"part"
    raise ConnectionResetError


async def keys_of(store: BlobStore, prefix: str = "") -> list[str]:
    return [key async for key in store.list(prefix)]


class BlobStoreSuite(ABC):
    """The protocol of `BlobStore`: each test's docstring states one of its rules."""

    @abstractmethod
    def open(self, path: Path) -> BlobStore:
        """Return an empty store. It may use the empty directory `path`."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> BlobStore:
        return self.open(tmp_path / "store")

    async def test_round_trip(self, store: BlobStore) -> None:
        """A put object can be read whole, by range and into memory. `stat` returns its size."""

        assert await store.put_if_absent("t/a", BODY)
        assert await store.read("t/a") == BODY
        assert await store.read("t/a", 300) == BODY[300:]
        assert await store.read("t/a", 300, 17) == BODY[300:317]
        assert await store.read("t/a", len(BODY), 0) == b""
        into = bytearray(64)
        await store.read_into("t/a", 4096, memoryview(into)[8:40])
        assert bytes(into) == bytes(8) + BODY[4096:4128] + bytes(24)
        assert (await store.stat("t/a")).size == len(BODY)

    async def test_stat_tells_the_time_of_the_put(self, store: BlobStore) -> None:
        """`stat` returns the time of the put. A second put changes nothing, so it doesn't change the time either."""

        before = time.time()
        assert await store.put_if_absent("t/a", BODY)
        found = (await store.stat("t/a")).modified_s
        assert before - 2 <= found <= time.time() + 2  # a store's clock may count in whole seconds
        assert not await store.put_if_absent("t/a", BODY)
        assert (await store.stat("t/a")).modified_s == found

    async def test_empty_object(self, store: BlobStore) -> None:
        assert await store.put_if_absent("t/empty", b"")
        assert await store.read("t/empty") == b""
        assert await store.put_if_absent("t/empty-stream", pieces(b""))
        assert (await store.stat("t/empty-stream")).size == 0

    async def test_put_of_pieces(self, store: BlobStore) -> None:
        """The pieces of an iterator become one object."""

        assert await store.put_if_absent("t/a", pieces())
        assert await store.read("t/a") == BODY

    async def test_first_put_wins(self, store: BlobStore) -> None:
        """A second put of a key, as bytes or as an iterator, returns False and changes nothing."""

        assert await store.put_if_absent("t/a", b"first")
        assert not await store.put_if_absent("t/a", b"second")
        assert not await store.put_if_absent("t/a", pieces(b"third"))
        assert await store.read("t/a") == b"first"

    async def test_one_winner(self, store: BlobStore) -> None:
        """Exactly one of many concurrent puts wins, and the object has its bytes."""

        bodies = [bytes([n]) * 5000 for n in range(16)]
        puts = [store.put_if_absent("t/a", body if n % 2 else pieces(body)) for n, body in enumerate(bodies)]
        won = await asyncio.gather(*puts)
        assert won.count(True) == 1
        assert await store.read("t/a") == bodies[won.index(True)]

    async def test_broken_put_leaves_nothing(self, store: BlobStore) -> None:
        """A put whose iterator raises leaves nothing, and the key can be put afterwards."""

        with pytest.raises(ConnectionResetError):
            await store.put_if_absent("t/a", breaking(after=3))
        assert await keys_of(store) == []
        with pytest.raises(BlobNotFound):
            await store.stat("t/a")
        assert await store.put_if_absent("t/a", b"whole")

    async def test_cancelled_put_leaves_nothing(self, store: BlobStore) -> None:
        """A put that is cancelled between two pieces leaves nothing."""

        waiting = asyncio.Event()

        async def stalling() -> AsyncIterator[bytes]:
            yield b"part"
            waiting.set()
            await asyncio.Event().wait()

        put = asyncio.create_task(store.put_if_absent("t/a", stalling()))
        await asyncio.wait_for(waiting.wait(), 10)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert await keys_of(store) == []

    async def test_missing(self, store: BlobStore) -> None:
        """A key that was never put is not found, even if it is a prefix of other keys."""

        await store.put_if_absent("t/dir/a", b"x")
        for key in ("t/b", "t/dir", "nobody/a"):
            with pytest.raises(BlobNotFound):
                await store.read(key)
            with pytest.raises(BlobNotFound):
                await store.read_into(key, 0, memoryview(bytearray(1)))
            with pytest.raises(BlobNotFound):
                await store.stat(key)

    @pytest.mark.parametrize(
        ("offset", "length"),
        [
            pytest.param(0, len(BODY) + 1, id="one byte more than there is"),
            pytest.param(len(BODY), 1, id="begins at the end"),
            pytest.param(len(BODY) + 1, 0, id="begins after the end"),
            pytest.param(len(BODY) + 1, None, id="the rest after the end"),
            pytest.param(-1, 4, id="before the beginning"),
        ],
    )
    async def test_short(self, store: BlobStore, offset: int, length: int | None) -> None:
        """A range that the object doesn't cover is an error. The store never returns fewer bytes."""

        await store.put_if_absent("t/a", BODY)
        with pytest.raises(BlobShort):
            await store.read("t/a", offset, length)
        if length:
            with pytest.raises(BlobShort):
                await store.read_into("t/a", offset, memoryview(bytearray(length)))

    async def test_list(self, store: BlobStore) -> None:
        """Keys are listed in code point order. A prefix need not end at a segment."""

        keys = ["a.b/1", "a/b/1", "a/b/2", "a/b0", "a/b-1/x", "a/c", "a0", "b/1"]
        for key in reversed(keys):
            await store.put_if_absent(key, b"x")
        assert await keys_of(store) == sorted(keys)
        for prefix in ("a", "a/", "a/b", "a/b/", "a/b/1", "a/b/1/", "c", "a/d/e"):
            assert await keys_of(store, prefix) == sorted(key for key in keys if key.startswith(prefix)), prefix

    async def test_delete(self, store: BlobStore) -> None:
        """A deleted object is gone, others stay, and the key can be put again. Deleting a missing key does nothing."""

        await store.put_if_absent("t/a", b"1")
        await store.put_if_absent("t/b", b"2")
        await store.delete("t/a")
        await store.delete("t/a")
        await store.delete("t")
        await store.delete("nobody/at/all")
        assert await keys_of(store) == ["t/b"]
        assert await store.put_if_absent("t/a", b"3")
        assert await store.read("t/a") == b"3"

    @pytest.mark.parametrize(
        "key",
        [
            pytest.param("", id="empty"),
            pytest.param("/a", id="a leading slash"),
            pytest.param("a/", id="a trailing slash"),
            pytest.param("a//b", id="an empty segment"),
            pytest.param("a/../b", id="the parent directory"),
            pytest.param("./a", id="this directory"),
            pytest.param(".staging/a", id="a hidden directory"),
            pytest.param("a b", id="a space"),
            pytest.param("a\\b", id="a backslash"),
            pytest.param("a\0b", id="a zero byte"),
            pytest.param("a\n", id="a newline at the end"),
            pytest.param("ä", id="a letter beyond ASCII"),
            pytest.param("a" * 201, id="a segment that is too long"),
            pytest.param("/".join("a" * 500), id="a key that is too long"),
        ],
    )
    async def test_bad_keys(self, store: BlobStore, key: str) -> None:
        """Every call refuses an invalid key, and no object is created."""

        with pytest.raises(BadKey):
            await store.put_if_absent(key, b"x")
        with pytest.raises(BadKey):
            await store.put_if_absent(key, pieces())
        with pytest.raises(BadKey):
            await store.read(key)
        with pytest.raises(BadKey):
            await store.read_into(key, 0, memoryview(bytearray(1)))
        with pytest.raises(BadKey):
            await store.stat(key)
        with pytest.raises(BadKey):
            await store.delete(key)
        if key and not key.endswith("a/"):
            with pytest.raises(BadKey):
                await keys_of(store, key)
        assert await keys_of(store) == []
