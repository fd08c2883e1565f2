"""A one-time token is good once: at one activator, and at any of several over one real Redis. One suite for both."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from activator.one_time import OneTime, OwnOneTime, SharedOneTime
from activator.shared_store import RedisStore, open_store
from contracts.errors import Refused
from tests.activator.identity import Signer, claims, key_server
from tests.activator.redis_server import RedisServer
from tests.activator.world import world

Scenario = Callable[[OneTime], Awaitable[None]]
Runner = Callable[[Scenario], None]


@pytest.fixture(params=["one activator", "over Redis"])
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Runs a scenario with either."""
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer()) if request.param == "over Redis" else None

        async def started(scenario: Scenario) -> None:
            if server is None:
                await scenario(OwnOneTime(time.time))
                return
            async with asyncio.timeout(60), open_store(server.url, "one", 20.0) as store:
                await scenario(SharedOneTime(store))

        yield lambda scenario: asyncio.run(started(scenario))


def test_good_once(run: Runner) -> None:
    """Each name of each issuer; also of many at once."""

    async def scenario(spent: OneTime) -> None:
        issued_s, until_s = time.time() + 100, time.time() + 1000
        assert await spent.try_spend(("i", "a"), issued_s, until_s)
        assert not await spent.try_spend(("i", "a"), issued_s, until_s)
        assert await spent.try_spend(("other", "a"), issued_s, until_s)
        got = await asyncio.gather(*(spent.try_spend(("i", "b"), issued_s, until_s) for _ in range(10)))
        assert sorted(got) == [False] * 9 + [True]

    run(scenario)


def test_what_was_issued_before_is_not_known(run: Runner) -> None:
    """It may have been spent where nobody remembers it."""

    async def scenario(spent: OneTime) -> None:
        assert not await spent.try_spend(("i", "a"), time.time() - 100, time.time() + 1000)
        assert await spent.try_spend(("i", "a"), time.time() + 100, time.time() + 1000)

    run(scenario)


@pytest.mark.parametrize("shared", [pytest.param(True, id="one Redis"), pytest.param(False, id="two: the control")])
def test_at_any_of_two(shared: bool) -> None:
    """What one took the other refuses."""

    async def scenario() -> None:
        with RedisServer() as server, RedisServer() as other:
            url = server.url if shared else other.url
            async with (
                asyncio.timeout(60),
                open_store(server.url, "one", 20.0) as one,
                open_store(url, "two", 20.0) as two,
            ):
                issued_s, until_s = time.time() + 100, time.time() + 1000
                assert await SharedOneTime(one).try_spend(("i", "a"), issued_s, until_s)
                assert await SharedOneTime(two).try_spend(("i", "a"), issued_s, until_s) != shared
                names = [each for each in server.ask("KEYS", "kelvin:{jti:*").split() if each.startswith(b"kelvin")]
                assert len(names) == 2
                for name in names:
                    assert int(server.ask("PTTL", name.decode())[1:]) > 0, "each ends by itself"

    asyncio.run(scenario())


def is_up(store: RedisStore) -> bool:
    return store.is_up  # mypy would take the attribute for unchanged


def test_without_redis() -> None:
    """Nobody is let in, and nobody called wrong; one that has lost its data lets in what was issued since."""

    async def scenario() -> None:
        with RedisServer() as server:
            async with asyncio.timeout(60), open_store(server.url, "one", 20.0) as store:
                spent, until_s = SharedOneTime(store), time.time() + 1000
                while not await spent.try_spend(("i", "a"), issued_s := time.time(), until_s):
                    pass  # the first one says from when on it is known
                server.kill()
                for _ in range(2):
                    with pytest.raises(Refused) as caught:
                        await spent.try_spend(("i", "b"), time.time() + 100, until_s)
                    assert caught.value.failure.retryable
                server.start()
                while not is_up(store):
                    await store.beat()
                assert not await spent.try_spend(("i", "a"), issued_s, until_s)
                assert await spent.try_spend(("i", "b"), time.time() + 100, until_s)

    asyncio.run(scenario())


def test_an_activator_asks_what_others_know(tmp_path: Path) -> None:
    """Named by its setting: a token that it took is spent for all; without Redis it is 503, and keys go on."""

    async def scenario() -> None:
        signer = Signer("one")
        more = 'scopes = ["infer"]\none_time = true\nleeway_s = 0\n'
        with RedisServer() as server:
            async with key_server(tmp_path / "idp", signer) as idp:
                file = idp.file(tmp_path / "issuers.toml", more)
                async with world(tmp_path, oidc=file, redis=server.url) as here:
                    status, number, token = 401, 0, ""
                    async with asyncio.timeout(30):
                        while status != 200:  # the first one says from when on it is known
                            number += 1
                            token = signer.token(claims(time.time(), jti=f"{number}"))
                            status = (await here.get("/v1/models", token)).status
                    assert number > 1
                    assert (await here.get("/v1/models", token)).status == 401
                    names = [each for each in server.ask("KEYS", "kelvin:{jti:*").split() if each.startswith(b"kelvin")]
                    assert len(names) == 2, "the beginning, and the one that was taken"
                    server.kill()
                    got = await here.get("/v1/models", signer.token(claims(time.time(), jti="other")))
                    assert (got.status, got.code) == (503, "unavailable")
                    assert (await here.get("/v1/models")).status == 200

    asyncio.run(scenario())
