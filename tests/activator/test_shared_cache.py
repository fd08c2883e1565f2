"""Where cached answers lie: in this process, or in one real Redis that several activators share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from activator.cache import Answers
from activator.cached_answers import CachedAnswers, Found, OwnCached
from activator.once_key import Content, ensure_once_key
from activator.policy.once import ENTRY_BYTES, Asked, OnceLimits, asked
from activator.shared_cache import SharedCached
from activator.shared_store import RedisStore, open_store
from tests.activator.redis_server import RedisServer
from tests.activator.test_cache import ALLOW, GREEDY
from tests.activator.test_once import same
from tests.activator.world import Got, World, world

LIMITS = OnceLimits(ttl_s=300.0, answer_bytes=10, tenant_answers=3, tenant_bytes=4 * ENTRY_BYTES)


def ask(what: str, tenant: str = "acme") -> Asked:
    return asked(b"s" * 32, tenant, b"cache", [what.encode()])


@asynccontextmanager
async def member(
    server: RedisServer, limits: OnceLimits = LIMITS, answer_s: float = 30.0
) -> AsyncIterator[tuple[SharedCached, RedisStore]]:
    async with asyncio.timeout(120), open_store(server.url, "one", answer_s) as store:
        made = SharedCached(store, limits)
        try:
            yield made, store
        finally:
            await made.close()


Making = Callable[[AsyncExitStack, OnceLimits], Awaitable[CachedAnswers]]


async def _own(ladder: AsyncExitStack, limits: OnceLimits) -> CachedAnswers:
    return OwnCached(limits)


async def _shared(ladder: AsyncExitStack, limits: OnceLimits) -> CachedAnswers:
    made, _ = await ladder.enter_async_context(member(ladder.enter_context(RedisServer()), limits=limits))
    return made


BOTH = pytest.mark.parametrize("making", [pytest.param(_own, id="in process"), pytest.param(_shared, id="in a Redis")])


async def until(kept: CachedAnswers, what: Asked, sealed: bytes | None) -> None:
    """Wait until that is what is found."""
    async with asyncio.timeout(30):
        while (None if (found := await kept.find(what)) is None else found.sealed) != sealed:
            await asyncio.sleep(0.005)


async def until_up(store: RedisStore) -> None:
    async with asyncio.timeout(60):
        while not store.is_up:
            await store.beat()


async def put(kept: CachedAnswers, name: str, sealed: bytes, tenant: str = "acme") -> None:
    kept.put(ask(name, tenant), sealed)
    await until(kept, ask(name, tenant), sealed)


@BOTH
def test_every_way_to_keep_them_does_the_same(making: Making) -> None:
    """Found with its bytes and its age, by who asked that; replaced; a tenant's latest, by number and bytes; what is
    too large is not kept, and takes nothing's place."""

    async def main() -> None:
        async with AsyncExitStack() as ladder:
            kept = await making(ladder, LIMITS)
            assert await kept.find(ask("1")) is None
            await put(kept, "1", b"\x00sealed")
            found = await kept.find(ask("1"))
            assert isinstance(found, Found)
            assert 0 <= found.age_s < LIMITS.ttl_s
            assert await kept.find(ask("1", "other")) is None
            await put(kept, "1", b"another", "other")
            await put(kept, "1", b"anew")
            for number in range(2, 5):
                await put(kept, str(number), b"%d" % number)
            found_all = [await kept.find(ask(str(number))) for number in range(1, 5)]
            assert [each is not None for each in found_all] == [False, True, True, True]
            kept.put(ask("large"), b"x" * LIMITS.tenant_bytes)
            await put(kept, "half", b"x" * ENTRY_BYTES)
            assert await kept.find(ask("large")) is None
            names = [await kept.find(ask(name)) for name in ("2", "3", "4", "half")]
            assert [each is not None for each in names] == [False, False, True, True]
            await until(kept, ask("1", "other"), b"another")

    asyncio.run(main())


@BOTH
def test_it_ends_by_itself(making: Making) -> None:
    """After its time nothing of it is found, tidied or not."""

    async def main() -> None:
        async with AsyncExitStack() as ladder:
            kept = await making(ladder, OnceLimits(ttl_s=2.0))
            await put(kept, "1", b"sealed")
            await until(kept, ask("1"), None)
            kept.tidy()
            assert kept.nbytes == 0

    asyncio.run(main())


@BOTH
def test_it_is_opened_by_its_tenant_alone(making: Making) -> None:
    """What lies there says nothing of itself; of another installation's secret, or too large, it is a miss."""

    async def main() -> None:
        async with AsyncExitStack() as ladder:
            kept = await making(ladder, LIMITS)
            ours, theirs = (Answers(secret * 32, 10, kept) for secret in (b"s", b"t"))
            answer = Content("req_1", 200, [], b"hello")
            ours.put(ask("x"), answer)
            async with asyncio.timeout(30):
                while (found := await ours.find(ask("x"))) is None:
                    await asyncio.sleep(0.005)
            assert found[0] == answer
            lies = await kept.find(ask("x"))
            assert lies is not None
            assert b"hello" not in lies.sealed
            assert await theirs.find(ask("x")) is None
            ours.put(ask("y"), Content("req_1", 200, [], b"x" * 11))
            ours.put(ask("z"), answer)
            async with asyncio.timeout(30):
                while await ours.find(ask("z")) is None:
                    await asyncio.sleep(0.005)
            assert await ours.find(ask("y")) is None

    asyncio.run(main())


def test_an_answer_has_an_age() -> None:
    """Of the one that is kept by now, to the moment at which it ends."""

    async def main() -> None:
        now_s = 0.0
        kept = OwnCached(OnceLimits(ttl_s=5), lambda: now_s)
        kept.put(ask("x"), b"sealed")
        assert await kept.find(ask("x")) == Found(b"sealed", 0.0)
        now_s = 3.0
        assert await kept.find(ask("x")) == Found(b"sealed", 3.0)
        now_s = 5.0
        assert await kept.find(ask("x")) is None

    asyncio.run(main())


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_without_redis_nothing_is_found(how: str) -> None:
    """Nor kept; once that is known, it is not asked. What was kept in one that only fell silent is found again."""

    async def main() -> None:
        with RedisServer() as server:
            async with member(server, answer_s=2.0) as (kept, store):
                await put(kept, "1", b"sealed")
                getattr(server, how)()
                assert await kept.find(ask("1")) is None
                assert not store.is_up
                asked_before = store.commands
                assert await kept.find(ask("1")) is None
                kept.put(ask("2"), b"sealed")
                await kept.close()
                assert store.commands == asked_before
                if how == "kill":
                    server.start()
                else:
                    server.resume()
                await until_up(store)
                await until(kept, ask("1"), None if how == "kill" else b"sealed")
                await put(kept, "2", b"sealed")

    asyncio.run(main())


def test_two_activators_have_one_cache(tmp_path: Path) -> None:
    """What one answered the other one gives again, byte for byte; without Redis each runs it, and says so."""
    secret = ensure_once_key(tmp_path / "once.key")
    for name in ("a", "b"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / "once.key").write_text(secret.hex())

    async def until_hit(here: World, body: object) -> Got:
        async with asyncio.timeout(60):
            while (got := await here.post(body=body, **ALLOW)).headers["x-kelvin-cache"] != "hit":
                assert got.status == 200
        return got

    async def scenario(server: RedisServer, here: World, there: World) -> None:
        for each in (here, there):
            await each.replica("a")
        bodies = [GREEDY | {"stream": is_stream} for is_stream in (False, True)]
        for body in bodies:
            first = await here.post(body=body, **ALLOW)
            assert first.headers["x-kelvin-cache"] == "miss"
            again = await until_hit(there, body)
            if again.headers["x-kelvin-repeat-of"] == first.headers["x-request-id"]:  # else it came before it was kept
                assert same(first, again)
        async with asyncio.timeout(60):
            while not same(await until_hit(here, bodies[0]), await until_hit(there, bodies[0])):
                pass  # what ran beside it may have been kept since
        server.kill()
        alone = [await each.post(body=bodies[0], **ALLOW) for each in (here, there) for _ in range(2)]
        assert [(got.status, got.headers["x-kelvin-cache"]) for got in alone] == [(200, "miss")] * 4

    async def main() -> None:
        with RedisServer() as server:
            async with (
                world(tmp_path / "a", redis=server.url) as here,
                world(tmp_path / "b", redis=server.url) as there,
            ):
                await scenario(server, here, there)

    asyncio.run(main())
