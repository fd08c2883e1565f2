"""The unmodified official OpenAI client: whole answers, streams through a cold start, errors as its own exceptions."""

import asyncio
from pathlib import Path

import openai
import pytest

from kelvin.contracts.errors import Internal, LimitExceeded
from tests.activator.control import KEY, STRANGER
from tests.activator.replica import ReceivedRequest, chunk, hello, refuses
from tests.activator.world import ActivatorWorld, world


def _client(here: ActivatorWorld, key: str = KEY, path: str = "/v1") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=here.url + path,
        api_key=key,
        http_client=openai.DefaultAsyncHttpxClient(verify=here.tls),
        max_retries=0,
    )


async def test_the_official_client_is_served(tmp_path: Path) -> None:
    """Chat, text and the model list work, whole and streamed, at both base URLs."""

    async with world(tmp_path) as here:
        await here.replica("a")
        for path in ("/v1", "/default/m/v1"):
            async with _client(here, path=path) as client:
                chat = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
                assert chat.choices[0].message.content == "hello"
                assert chat._request_id is not None
                assert chat._request_id.startswith("req_")
                text = await client.completions.create(model="m@prod", prompt="x")
                assert text.choices[0].text == "hello"
                stream = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x"}], stream=True
                )
                pieces = [event.choices[0].delta.content async for event in stream]
                assert pieces == ["hel", "lo"]
                assert [model.id async for model in client.models.list()] == ["m"]
        async with _client(here) as client:
            assert (await client.models.retrieve("m")).owned_by == "default"


async def test_the_official_client_streams_through_a_cold_start(tmp_path: Path) -> None:
    """Heartbeats are SSE comments. The client ignores them and sees the answer only."""

    async with world(tmp_path) as here, _client(here) as client:

        async def ask() -> list[str | None]:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            return [event.choices[0].delta.content async for event in stream]

        asked = asyncio.create_task(ask())
        await here.control.wait_for_stat(1.0)
        await asyncio.sleep(1.3)
        await here.replica("a", waits_until_read=False)
        assert await asked == ["hel", "lo"]


async def test_errors_are_the_official_clients_own(tmp_path: Path) -> None:
    """Each refusal raises the exception class of the client that its users already catch."""

    async def breaks(call: ReceivedRequest) -> None:
        await call.data(chunk("x"), 1)
        await call.fail(Internal())

    async def ask(client: openai.AsyncOpenAI, model: str = "m", **more: str) -> None:
        await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "x"}], extra_headers=dict(more)
        )

    async with world(tmp_path) as here:
        replica = await here.replica("a", refuses(LimitExceeded("messages", 9, 4, "tokens")))
        async with _client(here) as client:
            for model in ("nothing", "theirs", "m@nothing", "m@" + "c" * 12):
                with pytest.raises(openai.NotFoundError, match="does not exist"):
                    await ask(client, model)
            with pytest.raises(openai.BadRequestError, match="DNS label"):
                await ask(client, "m@" + "A" * 12)
            with pytest.raises(openai.BadRequestError, match="allows at most"):
                await ask(client)
            replica.script = breaks
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            with pytest.raises(openai.APIError, match="internal error"):
                [event async for event in stream]
            replica.script = hello
            await ask(client)  # control: the client and the replica work
            await here.publish(removed=("a",))
            with pytest.raises(openai.InternalServerError, match="no answer within the deadline"):
                await ask(client, **{"x-kelvin-deadline-ms": "100"})
        async with _client(here, key="kv-wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await ask(client)
        async with _client(here, key=STRANGER) as client:
            with pytest.raises(openai.NotFoundError):
                await ask(client)
        async with _client(here, path="/stranger/theirs/v1") as client:
            with pytest.raises(openai.NotFoundError):
                await ask(client, "theirs")
