"""What waits on an HTTP/2 connection, either way: it is bounded, it holds up nobody else, and it ends in its time."""

import asyncio
import json
import signal
from pathlib import Path

from h2.errors import ErrorCodes

from tests.activator.control import ADMIN, KEY
from tests.activator.h2_client import CHAT, Client, connected, fields
from tests.activator.replica import Call, chunk, whole
from tests.activator.test_edge_h2 import endless, served

CALM, CANCEL = ErrorCodes.ENHANCE_YOUR_CALM, ErrorCodes.CANCEL
STREAM = CHAT | {"stream": True}
POST = fields("POST", "/v1/chat/completions", KEY, ("content-type", "application/json"))
PIECE = 4000


async def _stout(call: Call) -> None:
    """4 kB at a time, as often as they are taken."""
    tokens = 0
    while True:
        tokens += 1
        await call.data(chunk("x" * PIECE), tokens)
        await asyncio.sleep(0)


def _room(mine: Client, number: int, nbytes: int) -> None:
    mine.h2.increment_flow_control_window(nbytes, number)
    mine.send()


def test_a_stream_that_is_not_read_holds_up_no_other(tmp_path: Path) -> None:
    """Its producer stops once its window is full, and goes on where it was when there is room again; meanwhile the
    stream beside it on the same connection gets what it asks for."""

    async def scenario() -> None:
        async with served(tmp_path, stall_s=60) as here:
            replica = await here.replica("a", _stout, max_streams=2)
            async with connected(here, gives_room=False, initial_window_size=20_000) as mine:
                mine.h2.increment_flow_control_window(1 << 24)  # of the connection: it is not what is short
                slow = mine.ask(STREAM)
                await mine.until(lambda: len(mine.heard[slow].body) >= 20_000)
                assert len(mine.heard[slow].body) == 20_000
                quick = mine.ask(STREAM)
                for _ in range(20):
                    before = len(mine.heard[quick].body)
                    await mine.until(lambda before=before: len(mine.heard[quick].body) > before)  # type: ignore[misc]
                    _room(mine, quick, len(mine.heard[quick].body) - before)
                assert len(mine.heard[slow].body) == 20_000
                _room(mine, slow, 50_000)
                await mine.until(lambda: len(mine.heard[slow].body) == 70_000)
                text = mine.heard[slow].body.decode()
                assert text.startswith("data: "), "nothing is lost in between"
                assert {len(line) for line in text.split("\n\n")[:-1]} == {len(chunk("x" * PIECE)) - 2}
            await replica.until(lambda r: len(r.deleted) == 2)

    asyncio.run(scenario())


def test_an_answer_larger_than_every_window_arrives_whole(tmp_path: Path) -> None:
    """A megabyte that does not stream, through windows of 64 KiB, beside another one."""

    async def long(call: Call) -> None:
        await call.data(whole("x" * (1 << 20)), 2)
        await call.end(2)

    async def scenario() -> None:
        async with served(tmp_path) as here:
            await here.replica("a", long)
            async with connected(here) as mine:
                for heard in [await mine.answer(number) for number in [mine.ask(CHAT) for _ in range(4)]]:
                    assert json.loads(heard.body)["choices"][0]["message"]["content"] == "x" * (1 << 20)
                    assert heard.headers["content-length"] == str(len(heard.body))

    asyncio.run(scenario())


def test_a_window_of_nothing_has_its_time(tmp_path: Path) -> None:
    """A stream that may be sent nothing is cut, whether its answer streams or is complete; its neighbour is not."""

    async def scenario() -> None:
        async with served(tmp_path, stall_s=0.5) as here:
            replica = await here.replica("a", endless)
            async with connected(here, initial_window_size=0) as mine:
                stuck = [mine.ask(STREAM), mine.ask()]
                good = mine.ask(STREAM)
                _room(mine, good, 1 << 20)
                for number in stuck:
                    assert (await mine.answer(number)).reset == CANCEL
                await mine.until(lambda: len(mine.heard[good].body) > 1000)
                assert mine.heard[good].reset is None
            await replica.until(lambda r: len(r.deleted) == 2)

    asyncio.run(scenario())


def test_a_connection_without_room_has_its_time(tmp_path: Path) -> None:
    """Streams have room and the connection has none: it ends, and what it held is free."""

    async def scenario() -> None:
        async with served(tmp_path, stall_s=0.5) as here:
            replica = await here.replica("a", _stout)
            async with connected(here, gives_room=False, initial_window_size=1 << 24) as mine:
                number = mine.ask(STREAM)
                await mine.until(lambda: len(mine.heard[number].body) == 65_535)
                ended = asyncio.create_task(mine.end())
                await replica.until(lambda r: len(r.deleted) == 1)
                code = await ended
                assert code in (CALM, None)
                assert (await here.get("/v1/models")).status == 200

    asyncio.run(scenario())


def test_a_client_that_reads_nothing_is_cut(tmp_path: Path) -> None:
    """Not even from its socket, with room for everything: the request ends at its replica all the same."""

    async def scenario() -> None:
        async with served(tmp_path, stall_s=0.5) as here:
            replica = await here.replica("a", _stout)
            async with connected(here, initial_window_size=1 << 30) as mine:
                mine.h2.increment_flow_control_window(1 << 30)
                mine.ask(STREAM)
                await replica.until(lambda r: len(r.deleted) == 1)

    asyncio.run(scenario())


def test_a_body_is_taken_as_it_comes(tmp_path: Path) -> None:
    """Of 900 kB and no length that was told, through windows of 64 KiB; one that nobody wants need not be sent."""

    async def scenario() -> None:
        async with served(tmp_path) as here, connected(here) as mine:
            text = bytes(range(256)) * 3500
            for _ in range(2):  # more in all than the window of the connection
                number = mine.ask(None, fields("PUT", "/admin/v1/x", ADMIN), ends=False)
                sent = 0
                while sent < len(text):
                    size = min(mine.h2.local_flow_control_window(number), 16_000, len(text) - sent)
                    if not size:
                        await mine.read()
                        continue
                    mine.h2.send_data(number, text[sent : sent + size], end_stream=sent + size == len(text))
                    sent += size
                    mine.send()
                assert (await mine.answer(number)).body == b"echo:" + text
            wrong = mine.ask(None, fields("POST", "/v1/chat/completions", "wrong"), ends=False)
            heard = await mine.answer(wrong)
            assert heard.status == 401
            assert heard.ended, "before its body came"
            await mine.until(lambda: heard.reset is not None)
            assert heard.reset == ErrorCodes.NO_ERROR
            assert (await mine.answer(mine.ask())).status == 200

    asyncio.run(scenario())


def test_a_body_that_hardly_comes_is_ended_alone(tmp_path: Path) -> None:
    """504 on its stream, also within a frame that is not whole; a stream beside is served meanwhile and after."""

    async def scenario() -> None:
        async with served(tmp_path, head_s=0.3) as here:
            await here.replica("a")
            async with connected(here) as mine:
                slow = mine.ask(None, POST, ends=False)
                mine.h2.send_data(slow, b"{")
                mine.send()
                assert (await mine.answer(mine.ask(CHAT))).status == 200
                assert (await mine.answer(slow)).status == 504
                assert (await mine.answer(mine.ask(CHAT))).status == 200
            async with connected(here) as mine:
                slow = mine.ask(None, POST, ends=False)
                mine.send(b"\0\0\x10\0\0" + slow.to_bytes(4, "big") + b"{")
                heard = await mine.answer(slow)
                assert heard.status == 504
                assert json.loads(heard.body)["error"]["request_id"] == heard.headers["x-request-id"]
                assert await mine.end() == CALM, "nothing can come behind half a frame"

    asyncio.run(scenario())


def test_a_door_that_ends_finishes_what_it_has(tmp_path: Path) -> None:
    """A later stream is refused, what is under way ends well, and then it says GOAWAY: httpx would drop the answer."""

    async def patient(call: Call) -> None:
        await call.data(chunk("a"), 1)
        await call.replica.until(lambda r: r.deaf)
        await call.data(chunk("b") + b"data: [DONE]\n\n", 2)
        await call.end(2)

    async def scenario() -> None:
        async with served(tmp_path) as here:
            replica = await here.replica("a", patient)
            async with connected(here) as mine:
                number = mine.ask(STREAM)
                await mine.until(lambda: b"data: " in mine.heard[number].body)
                here.process.send_signal(signal.SIGTERM)
                while (later := await mine.answer(mine.ask())).status == 200:
                    pass  # it was asked before the door had heard of its end
                assert later.reset == ErrorCodes.REFUSED_STREAM
                replica.deaf = True
                await replica.changed()
                assert (await mine.answer(number)).body.endswith(b"data: [DONE]\n\n")
                assert await mine.end() == ErrorCodes.NO_ERROR
            async with asyncio.timeout(30):
                assert await here.process.wait() == 0

    asyncio.run(scenario())


def test_a_door_that_is_relieved_serves_what_is_on_its_way(tmp_path: Path) -> None:
    """GOAWAY without a last stream; one that comes behind it is served, and the connection ends when it stays idle."""

    async def scenario() -> None:
        async with served(tmp_path, lame_duck_s=1) as here, connected(here) as mine:
            await mine.answer(mine.ask())
            here.process.send_signal(signal.SIGUSR1)
            raw = bytearray()
            while b"\x07\x00\x00\x00\x00\x00\x7f\xff\xff\xff" not in raw:  # past a client that ends with it
                raw += await mine.reader.read(1 << 16)
            mine.ask()
            async with asyncio.timeout(30):
                while data := await mine.reader.read(1 << 16):
                    raw += data
                assert b'"object":"list"' in raw
                assert await here.process.wait() == 0

    asyncio.run(scenario())
