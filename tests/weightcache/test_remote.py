"""Where chunks lie in the store is learned from indexes, else from footers; damage there harms only who needs it."""

import asyncio
import mmap
from collections.abc import Awaitable, Callable

import pytest

from blobstore.memory import MemoryStore
from blobstore.store import BlobStore, BlobUnavailable
from contracts.errors import Refused
from contracts.manifest import PAGE
from tests.weightcache.kit import TENANT, describe, make_pack, publish
from weightcache.policy.healing import Outcome
from weightcache.remote import StoreTier

VERSION = describe([bytes([n]) * PAGE for n in (1, 2, 3)], PAGE)
OTHER = describe([bytes([n]) * PAGE for n in (4, 5)], PAGE)


def page() -> memoryview:
    return memoryview(mmap.mmap(-1, PAGE))


async def fetched(tier: StoreTier, digest: str, tenant: str = TENANT) -> tuple[Outcome, bytes]:
    into = page()
    return await tier.fetch(tenant, digest, into), bytes(into)


async def replaced(store: BlobStore, key: str, data: bytes) -> None:
    await store.delete(key)
    await store.put_if_absent(key, data)


def run(scenario: Callable[[MemoryStore, StoreTier], Awaitable[None]]) -> None:
    store = MemoryStore()
    asyncio.run(_start(scenario, store))


async def _start(scenario: Callable[[MemoryStore, StoreTier], Awaitable[None]], store: MemoryStore) -> None:
    await scenario(store, StoreTier(store))


def test_index() -> None:
    """Each chunk comes from its place in its pack; another tenant's, and an unknown one, are absent."""

    async def scenario(store: MemoryStore, tier: StoreTier) -> None:
        await publish(store, VERSION)
        for digest, body in zip(VERSION.digests, VERSION.chunks, strict=True):
            assert await fetched(tier, digest) == (Outcome.WHOLE, body)
        assert (await fetched(tier, OTHER.digests[0]))[0] is Outcome.ABSENT
        assert (await fetched(tier, VERSION.digests[0], "other"))[0] is Outcome.ABSENT

    run(scenario)


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(None, id="no index"),
        pytest.param(b"[]x", id="an index that does not decode"),
        pytest.param(b"", id="an empty index"),
    ],
)
def test_footer(index: bytes | None) -> None:
    """Without a good index object the pack's footer tells the same."""

    async def scenario(store: MemoryStore, tier: StoreTier) -> None:
        pack = await publish(store, VERSION)
        await store.delete(f"{TENANT}/index/{pack}")
        if index is not None:
            await store.put_if_absent(f"{TENANT}/index/{pack}", index)
        assert await fetched(tier, VERSION.digests[1]) == (Outcome.WHOLE, VERSION.chunks[1])
        assert tier.unreadable_packs == 0

    run(scenario)


@pytest.mark.parametrize("rest", [pytest.param(b"", id="empty"), pytest.param(b"x" * PAGE, id="without a footer")])
def test_unreadable_pack(rest: bytes) -> None:
    """A pack without index and footer is counted and left out; chunks of other packs are served."""

    async def scenario(store: MemoryStore, tier: StoreTier) -> None:
        pack = await publish(store, VERSION)
        await store.delete(f"{TENANT}/index/{pack}")
        await replaced(store, f"{TENANT}/packs/{pack}", rest)
        await publish(store, OTHER)
        assert await fetched(tier, OTHER.digests[0]) == (Outcome.WHOLE, OTHER.chunks[0])
        assert (await fetched(tier, VERSION.digests[0]))[0] is Outcome.ABSENT
        assert tier.unreadable_packs > 0

    run(scenario)


def test_moved_chunk() -> None:
    """A chunk whose pack was collected is found in the pack that holds it now; one that is nowhere is absent."""

    async def scenario(store: MemoryStore, tier: StoreTier) -> None:
        pack = await publish(store, VERSION)
        await fetched(tier, VERSION.digests[0])
        await store.delete(f"{TENANT}/packs/{pack}")
        digest, body, table = make_pack(VERSION.chunks[:2])
        await store.put_if_absent(f"{TENANT}/packs/{digest}", body)
        await store.put_if_absent(f"{TENANT}/index/{digest}", table)
        assert await fetched(tier, VERSION.digests[1]) == (Outcome.WHOLE, VERSION.chunks[1])
        assert (await fetched(tier, VERSION.digests[2]))[0] is Outcome.ABSENT

    run(scenario)


def test_torn() -> None:
    """A chunk that its table gives another length, or whose pack ends before it does, is told."""

    async def scenario(store: MemoryStore, tier: StoreTier) -> None:
        pack = await publish(store, VERSION)
        assert await tier.fetch(TENANT, VERSION.digests[0], memoryview(bytearray(2 * PAGE))) is Outcome.LENGTH
        whole = await store.read(f"{TENANT}/packs/{pack}")
        await replaced(store, f"{TENANT}/packs/{pack}", whole[: 2 * PAGE + 100])
        assert (await fetched(tier, VERSION.digests[1]))[0] is Outcome.WHOLE
        assert (await fetched(tier, VERSION.digests[2]))[0] is Outcome.SHORT

    run(scenario)


class Failing(MemoryStore):
    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        raise BlobUnavailable("down")

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        raise BlobUnavailable("down")


def test_store_down() -> None:
    """A store that does not answer says nothing about its chunks: the failure is retryable, not a missing chunk."""

    async def scenario() -> None:
        store = Failing()
        await publish(store, VERSION)
        with pytest.raises(Refused) as refused:
            await fetched(StoreTier(store), VERSION.digests[0])
        assert refused.value.failure.retryable

    asyncio.run(scenario())


def test_learned_once() -> None:
    """Many who ask at once read each index once."""

    class Counting(MemoryStore):
        reads = 0

        async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
            self.reads += "/index/" in key
            await asyncio.sleep(0)
            return await super().read(key, offset, length)

    async def scenario() -> None:
        store = Counting()
        await publish(store, VERSION)
        tier = StoreTier(store)
        await asyncio.gather(*(fetched(tier, VERSION.digests[n % 3]) for n in range(50)))
        assert store.reads == 1

    asyncio.run(scenario())
