"""Limits per minute and maxima of a tenant over HTTP: which requests are refused, and the rate-limit headers."""

import asyncio
import json
from pathlib import Path

import pytest

from kelvin.contracts.errors import InvalidRequest, LimitExceeded
from kelvin.contracts.serving.stream_frames import ENCODED_TOKENS_HEADER
from tests.activator.control import STRANGER
from tests.activator.replica import Held, hello, refuses
from tests.activator.world import CHAT, http, world

SMALL = CHAT | {"max_tokens": 10}
HEADERS = ("limit", "remaining", "reset")


async def test_requests_per_minute_are_limited(tmp_path: Path) -> None:
    """Each response has the tenant's rate-limit headers. A request beyond the limit gets 429 with a retry time before
    its body is read, and no record. Tenants without a limit get no headers.
    """

    async with world(tmp_path) as here:
        await here.replica("a")
        assert not [name for name in (await here.post()).headers if "ratelimit" in name]
        await here.limit(rpm=2)
        got = await here.post()
        assert (got.status, got.headers["x-ratelimit-limit-requests"]) == (200, "2")
        assert got.headers["x-ratelimit-remaining-requests"] == "1"
        assert "x-ratelimit-limit-tokens" not in got.headers
        got = await here.post(body=CHAT | {"model": "nothing"})
        assert (got.status, got.headers["x-ratelimit-remaining-requests"]) == (404, "0")
        reader, writer = await here.raw()
        head = http(b"x" * 1000)
        writer.write(head[:-1000])  # a head without its body
        answer = await asyncio.wait_for(reader.read(), 30)
        assert answer.startswith(b"HTTP/1.1 429"), answer
        assert b"\r\nretry-after: " in answer
        assert b"\r\nx-ratelimit-remaining-requests: 0\r\n" in answer
        assert b'"code":"rate_limit_exceeded"' in answer
        assert b'"type":"rate_limit_error"' in answer
        writer.close()
        records = await here.control.wait_for_records(2)
        assert [record.outcome for record in records] == ["ok", "ok"]
        theirs = await here.post(body=CHAT | {"model": "nothing"}, key=STRANGER)
        assert theirs.status == 404
        assert "x-ratelimit-limit-requests" not in theirs.headers
        await here.limit()
        assert (await here.post()).status == 200


async def test_tokens_per_minute_are_limited(tmp_path: Path) -> None:
    """A running request holds its estimate. At its end the used tokens are charged and the rest is available."""
    held = Held()  # 3 prompt and 2 completion tokens

    async with world(tmp_path) as here:
        replica = await here.replica("a", held)
        await here.limit(tpm=1000)
        first = asyncio.create_task(here.post(body=CHAT | {"max_tokens": 900}))
        await replica.until(lambda r: len(r.calls) == 1)
        got = await here.post(body=CHAT | {"max_tokens": 200})
        assert (got.status, got.code) == (429, "rate_limit_exceeded")
        assert b"1000 tokens a minute" in got.body
        assert got.headers["x-ratelimit-limit-tokens"] == "1000"
        assert int(got.headers["retry-after"]) >= 1
        assert int(got.headers["x-ratelimit-remaining-tokens"]) < 100
        held.release()
        assert (await first).status == 200
        got = await here.post(body=CHAT | {"max_tokens": 900})
        assert (got.status, len(replica.calls)) == (200, 2)
        records = await here.control.wait_for_records(3)
        assert sorted(record.outcome for record in records) == ["ok", "ok", "rate_limit_exceeded"]


async def test_what_never_ran_costs_no_tokens(tmp_path: Path) -> None:
    """A client that leaves the queue, or a refusal by the replica, returns all held tokens."""
    async with world(tmp_path) as here:
        await here.limit(tpm=1000)
        leaving = asyncio.create_task(here.post(body=CHAT | {"max_tokens": 950}))
        await here.control.wait_for_stat(1.0)
        assert (await here.post(body=CHAT | {"max_tokens": 950})).status == 429
        leaving.cancel()
        await here.control.wait_for_records(2)
        replica = await here.replica("a", refuses(InvalidRequest("n", "2", "only 1 is supported")))
        assert (await here.post(body=CHAT | {"max_tokens": 950})).status == 400
        replica.script = hello
        got = await here.post(body=CHAT | {"max_tokens": 950})
        assert got.status == 200
        assert int(got.headers["x-ratelimit-remaining-tokens"]) < 50


@pytest.mark.parametrize(
    ("encoded", "low", "high"),
    [
        pytest.param(400, 500, 650, id="encoded, then found too long"),
        pytest.param(0, 900, 1000, id="refused unencoded"),
    ],
)
async def test_prompt_tokens_of_a_refused_request_are_charged(
    tmp_path: Path, encoded: int, low: int, high: int
) -> None:
    """As many tokens are charged as the replica reports. The answer that never began costs nothing."""
    async with world(tmp_path) as here:
        await here.limit(tpm=1000)
        replica = await here.replica("a", refuses(LimitExceeded("messages", 200, 100, "tokens"), encoded))
        long = CHAT | {"messages": [{"role": "user", "content": "x" * 2000}], "max_tokens": 10}
        refused = await here.post(body=long)
        assert refused.code == "context_length_exceeded"
        assert ENCODED_TOKENS_HEADER not in refused.headers
        replica.script = hello
        got = await here.post(body=SMALL)
        assert low < int(got.headers["x-ratelimit-remaining-tokens"]) < high


async def test_a_request_over_the_minute_is_refused_for_good(tmp_path: Path) -> None:
    """Waiting would not help, so the answer is 400 with the reason. It uses no tokens."""

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        await here.limit(tpm=100)
        got = await here.post()  # its answer may be as long as the version allows
        assert (got.status, got.code) == (400, "request_exceeds_rate")
        assert b"prompt and max_tokens together" in got.body
        assert "retry-after" not in got.headers
        assert (await here.post(body=SMALL)).status == 200
        assert len(replica.calls) == 1


async def test_maxima_of_context_and_output(tmp_path: Path) -> None:
    """A request that can't be within the maxima is refused. The replica gets them, and fewer tokens are reserved."""

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        await here.post(body=SMALL)
        assert not [name for name in replica.calls[0].headers if name.lower().endswith("-tokens")]
        await here.limit(context_tokens=50, output_tokens=20, tpm=60)
        for wanted, largest in ((21, 20), (50, 20)):
            got = await here.post(body=CHAT | {"max_tokens": wanted})
            assert (got.status, got.code) == (400, "context_length_exceeded")
            assert f"{wanted} tokens; your tenant allows at most {largest}" in got.body.decode()
        assert len(replica.calls) == 1
        assert (await here.post()).status == 200
        sent_headers = {name.lower(): value for name, value in replica.calls[1].headers.items()}
        assert (sent_headers["x-kelvin-context-tokens"], sent_headers["x-kelvin-output-tokens"]) == ("50", "20")
        assert json.loads(replica.calls[1].body) == CHAT
