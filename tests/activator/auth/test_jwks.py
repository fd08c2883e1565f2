"""An issuer's key set over HTTPS: rotation, outages, and tokens that name unknown keys."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from activator.auth import jwks
from activator.auth.issuers import KeySetSource
from activator.auth.jwks import KeySet
from kelvin.contracts.errors import Refused
from tests.activator.auth.token_issuer import KeyServer, Signer, key_server
from tests.eventually import eventually

ONE, TWO = Signer("one"), Signer("two")
NAME, OTHER = ("one", "ES256"), ("two", "ES256")


@asynccontextmanager
async def fetching(
    scratch: Path, *, max_age_s: float = 3600.0, is_believed: bool = True
) -> AsyncIterator[tuple[KeyServer, KeySet]]:
    """Start a key server that publishes ONE, and a KeySet that fetches again only for an unknown key."""
    async with key_server(scratch, ONE) as server, aiohttp.ClientSession() as session:
        tls = server.tls if is_believed else ssl.create_default_context()
        keys = KeySet(session, KeySetSource(server.url, tls, 3600.0, max_age_s), frozenset({"ES256"}))
        task = asyncio.create_task(keys.run())
        try:
            async with asyncio.timeout(30):
                yield server, keys
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_new_key_is_found_and_an_old_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown key is fetched. A key that stays is the same object, a reissued one is new, a removed one is gone."""
    monkeypatch.setattr(jwks, "PAUSE_S", 0.01)

    async with fetching(tmp_path) as (server, keys):
        first = await keys.find(NAME)
        assert first is not None
        server.signers.append(TWO)
        await eventually(lambda: not keys._is_pausing)
        assert await keys.find(OTHER) is not None
        assert keys.find_loaded(NAME) is first
        server.signers[:] = [TWO, Signer("one")]
        await eventually(lambda: not keys._is_pausing)
        await keys.find(("three", "ES256"))
        assert keys.find_loaded(NAME) not in (None, first)
        server.signers[:] = [TWO]
        await eventually(lambda: not keys._is_pausing)
        assert await keys.find(("three", "ES256")) is None
        assert keys.find_loaded(NAME) is None


@pytest.mark.parametrize("pause_s", [pytest.param(3600.0, id="a pause"), pytest.param(0.0, id="control: no pause")])
async def test_unknown_keys_cost_one_fetch_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """Two hundred tokens name unknown keys, concurrently and one by one."""
    monkeypatch.setattr(jwks, "PAUSE_S", pause_s)

    async with fetching(tmp_path) as (server, keys):
        assert await keys.find(NAME) is not None
        found = await asyncio.gather(*(keys.find((f"no-{number}", "ES256")) for number in range(100)))
        for number in range(100):
            found.append(await keys.find((f"../{number}", "ES256")))
        assert found == [None] * 200
        assert (server.asked == 1) == (pause_s > 0), server.asked


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param(503, None, id="not available"),
        pytest.param(302, None, id="a redirect"),
        pytest.param(200, b"<html>", id="not JSON"),
        pytest.param(200, b'{"keys": 1}', id="not a key set"),
        pytest.param(200, b'{"keys":' + b"[" * 100_000, id="nested too deeply"),
        pytest.param(200, b'{"keys":"\xff"}', id="not UTF-8"),
        pytest.param(200, b" " * (jwks.MAX_BYTES + 1), id="too much"),
    ],
)
async def test_last_keys_stay_valid_during_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes | None
) -> None:
    """While the issuer's answer is unusable, its last keys stay valid. Once it answers, its new keys are found."""
    monkeypatch.setattr(jwks, "PAUSE_S", 0.01)

    async with fetching(tmp_path) as (server, keys):
        first = await keys.find(NAME)
        server.status, server.body = status, body
        asked = server.asked
        await eventually(lambda: not keys._is_pausing)
        assert await keys.find(OTHER) is None
        assert server.asked > asked
        assert keys.find_loaded(NAME) is first is not None
        server.status, server.body = 200, None
        server.signers.append(TWO)
        await eventually(lambda: not keys._is_pausing)
        assert await keys.find(OTHER) is not None


async def test_cached_keys_expire_at_their_max_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After their maximum age the keys verify nothing. Tokens get a retryable refusal until the issuer answers."""
    monkeypatch.setattr(jwks, "PAUSE_S", 0.01)

    async def known(keys: KeySet) -> None:
        while True:
            try:
                assert await keys.find(NAME) is not None
                return
            except Refused:  # a slow fetch, or the issuer is down
                await asyncio.sleep(0.01)

    async with fetching(tmp_path, max_age_s=0.3) as (server, keys):
        await known(keys)
        server.status = 503
        await eventually(lambda: keys.find_loaded(NAME) is None)
        with pytest.raises(Refused) as caught:
            await keys.find(NAME)
        assert caught.value.failure.retryable
        server.status = 200
        await known(keys)


async def test_unreachable_issuer_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens get a retryable 503. A server without a trusted certificate is not asked for keys."""
    monkeypatch.setattr(jwks, "PAUSE_S", 0.01)

    async with fetching(tmp_path, is_believed=False) as (server, keys):
        with pytest.raises(Refused) as caught:
            await keys.find(NAME)
        assert (caught.value.failure.status, caught.value.failure.retryable) == (503, True)
        assert server.asked == 0


async def test_malformed_key_does_not_hide_the_others(tmp_path: Path) -> None:
    async with fetching(tmp_path) as (server, keys):
        bad = {"kid": "bad", "kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}
        server.body = json.dumps({"keys": [bad, ONE.jwk]}).encode()
        assert await keys.find(("bad", "ES256")) is None
        assert await keys.find(NAME) is not None


async def test_tokens_that_wait_for_an_issuer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their senders are not authenticated yet. One more is refused at once, until a waiting one leaves."""
    monkeypatch.setattr(jwks, "MAX_WAITING", 2)
    async with aiohttp.ClientSession() as session:
        keys = KeySet(session, KeySetSource("https://unused", ssl.create_default_context(), 3600.0, 1.0), frozenset())
        waiting = [asyncio.create_task(keys.find(NAME)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="the issuer of the token is not available"):
            async with asyncio.timeout(1):
                await keys.find(NAME)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        waiting.append(asyncio.create_task(keys.find(NAME)))
        await asyncio.sleep(0)
        assert not waiting[2].done()
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
