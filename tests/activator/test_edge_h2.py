"""HTTP/2 at the door, by clients of others through real TLS: the same answers as in HTTP/1.1, side by side."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from h2.errors import ErrorCodes

from tests.activator.control import KEY
from tests.activator.h2_client import connected
from tests.activator.replica import Call, chunk, hello
from tests.activator.world import CHAT, World, world

STREAM = CHAT | {"stream": True}
PATH = "/v1/chat/completions"


@asynccontextmanager
async def served(tmp_path: Path, **settings: float | str) -> AsyncIterator[World]:
    """A world whose door offers HTTP/2."""
    given: dict[str, Any] = {"http2": "on", **settings}
    async with world(tmp_path, **given) as here:
        yield here


def trusted(here: World) -> ssl.SSLContext:
    """A client's side of TLS, its own: what a client says there of protocols must not be another's."""
    return ssl.create_default_context(cafile=str(here.data / "ca.pem"))


def client(here: World) -> httpx.AsyncClient:
    """One that prefers HTTP/2."""
    return httpx.AsyncClient(
        http2=True, verify=trusted(here), base_url=here.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60
    )


async def endless(call: Call) -> None:
    """Tokens until nobody wants them."""
    tokens = 0
    while True:
        tokens += 1
        await call.data(chunk("x"), tokens)
        await asyncio.sleep(0.005)


def _run(tmp_path: Path, scenario: Callable[[World], Awaitable[None]], **settings: float | str) -> None:
    async def whole() -> None:
        async with served(tmp_path, **settings) as here:
            await scenario(here)

    asyncio.run(whole())


def test_a_completion_whole_and_streamed(tmp_path: Path) -> None:
    """The same bytes as in HTTP/1.1, without the headers that tell of a connection."""

    async def scenario(here: World) -> None:
        await here.replica("a")
        async with client(here) as http2:
            whole = await http2.post(PATH, json=CHAT)
            assert (whole.http_version, whole.status_code) == ("HTTP/2", 200)
            first = await here.post()
            assert whole.content == first.body
            assert whole.headers["x-request-id"].startswith("req_")
            assert not {"connection", "transfer-encoding"} & set(whole.headers)
            async with http2.stream("POST", PATH, json=STREAM) as answer:
                assert answer.status_code == 200
                lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            assert [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in lines[:-1]] == ["hel", "lo"]
            assert (await http2.get("/v1/models")).json() == (await here.get("/v1/models")).json
            assert (await http2.head("/v1/models")).status_code == 405
            assert (await http2.get("/nothing")).status_code == 404

    _run(tmp_path, scenario)


def test_many_streams_share_a_connection(tmp_path: Path) -> None:
    """64 at once on one connection, all of them with their replica at the same time."""

    async def together(call: Call) -> None:
        await call.replica.until(lambda r: r.most == 64)
        await hello(call)

    async def scenario(here: World) -> None:
        replica = await here.replica("a", together, max_streams=64)
        async with client(here) as http2:
            await http2.get("/v1/models")  # so that there is a connection, which the others share
            answers = await asyncio.gather(*(http2.post(PATH, json=STREAM) for _ in range(64)))
            assert {answer.status_code for answer in answers} == {200}
            assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
            ports = {answer.extensions["network_stream"].get_extra_info("client_addr") for answer in answers}
            assert len(ports) == 1
        assert replica.most == 64

    _run(tmp_path, scenario)


def test_a_stream_that_is_left_ends_at_its_replica(tmp_path: Path) -> None:
    """RST_STREAM is a disconnect: what it held is free, it is billed for what it took, and its neighbour goes on."""

    async def by_name(call: Call) -> None:
        await (hello if call.wanted["messages"][0]["content"] == "short" else endless)(call)

    async def scenario(here: World) -> None:
        replica = await here.replica("a", by_name, max_streams=2)
        async with connected(here) as http2:
            beside, left = http2.ask(STREAM), http2.ask(STREAM)
            await http2.until(lambda: all(b"data: " in http2.heard[number].body for number in (beside, left)))
            http2.h2.reset_stream(left, ErrorCodes.CANCEL)
            http2.send()
            await replica.until(lambda r: len(r.deleted) == 1)
            short = http2.ask(CHAT | {"messages": [{"role": "user", "content": "short"}]})
            assert (await http2.answer(short)).status == 200, "its slot is free"
            before = len(http2.heard[beside].body)
            await http2.until(lambda: len(http2.heard[beside].body) > before + 1000)
        await replica.until(lambda r: len(r.deleted) == 2)  # and all of them with their connection
        page = await here.page()
        assert 'outcome="cancelled"' in page

    _run(tmp_path, scenario)


def test_the_official_client_over_http2(tmp_path: Path) -> None:
    """Unmodified but for the protocol: whole, streamed, and an error as its own exception."""

    async def scenario(here: World) -> None:
        await here.replica("a")
        http2 = openai.DefaultAsyncHttpxClient(verify=trusted(here), http2=True)
        async with openai.AsyncOpenAI(base_url=here.url + "/v1", api_key=KEY, http_client=http2, max_retries=0) as mine:
            answer = await mine.chat.completions.with_raw_response.create(
                model="m", messages=[{"role": "user", "content": "x"}]
            )
            assert answer.http_response.http_version == "HTTP/2"
            assert answer.parse().choices[0].message.content == "hello"
            stream = await mine.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            assert [event.choices[0].delta.content async for event in stream] == ["hel", "lo"]
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await mine.chat.completions.create(model="nothing", messages=[{"role": "user", "content": "x"}])

    _run(tmp_path, scenario)


def test_it_is_offered_by_a_setting(tmp_path: Path) -> None:
    """Without it a client that prefers HTTP/2 is served in HTTP/1.1; with it, one that does not prefer it is."""

    async def scenario() -> None:
        (tmp_path / "off").mkdir()
        async with world(tmp_path / "off") as here, client(here) as both:
            assert (await both.get("/v1/models")).http_version == "HTTP/1.1"
        (tmp_path / "on").mkdir()
        async with served(tmp_path / "on") as here, client(here) as both:
            assert (await both.get("/v1/models")).http_version == "HTTP/2"
            assert (await here.get("/v1/models")).status == 200

    asyncio.run(scenario())
