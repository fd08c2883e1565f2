"""What an HTTP/2 connection may cost, abuse by abuse: it ends with the right error, and the client beside goes on."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from h2.errors import ErrorCodes
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.activator.h2_client import CHAT, PREFACE, Client, Heard, connected, fields
from tests.activator.test_edge_h2 import endless, served

CALM, PROTOCOL, FRAME_SIZE = ErrorCodes.ENHANCE_YOUR_CALM, ErrorCodes.PROTOCOL_ERROR, ErrorCodes.FRAME_SIZE_ERROR
Say = Callable[[Client], bytes]


def _block(*more: tuple[str, str]) -> bytes:
    """A header list, that of a good request before these."""
    return Encoder().encode([*fields(), *more])


def _head(number: int = 1, block: bytes | None = None, *flags: str) -> bytes:
    frame = HeadersFrame(number, block if block is not None else _block(), flags=flags or ("END_HEADERS",))
    return frame.serialize()


def _rapid_resets(_: Client) -> bytes:
    """CVE-2023-44487."""
    return b"".join(
        HeadersFrame(number, _block(), flags=("END_HEADERS", "END_STREAM")).serialize()
        + RstStreamFrame(number, ErrorCodes.CANCEL).serialize()
        for number in range(1, 2001, 2)
    )


def _continuations(_: Client) -> bytes:
    """CVE-2024-27316, with nothing in them."""
    return _head(1, _block(), "END_STREAM") + ContinuationFrame(1).serialize() * 10


def _long_list(_: Client) -> bytes:
    """More of a header list than may be, in frames of which each may."""
    piece = b"\x00\x01x\x7f\xa1\x7f" + b"a" * 16_000
    return _head(1, _block(), "END_STREAM") + ContinuationFrame(1, piece).serialize() * 6


def _bomb(_: Client) -> bytes:
    """HPACK: one long value in the table, then a byte for each time it is meant."""
    long = b"\x40\x01x\x7f\xa1\x1e" + b"a" * 4000
    return _head(1, _block() + long + b"\xbe" * 10_000, "END_HEADERS", "END_STREAM")


def _padding(_: Client) -> bytes:
    return _head() + DataFrame(1, b"", pad_length=200, flags=("PADDED",)).serialize() * 9000


def _ends(_: Client) -> bytes:
    """A request without a body, and then the end of its body, of which there is one at the most."""
    return _head(1, None, "END_HEADERS", "END_STREAM") + DataFrame(1, b"", flags=("END_STREAM",)).serialize() * 3000


def _another_length(_: Client) -> bytes:
    body = DataFrame(1, b"four", flags=("END_STREAM",)).serialize()
    return _head(1, _block(("content-length", "3"))) + body


def _with(*more: tuple[str, str]) -> Say:
    return lambda _: _head(1, _block(*more), "END_HEADERS", "END_STREAM")


def _instead(name: str, value: str | None) -> Say:
    """A pseudo-header with another value, or without it."""
    kept = [(key, value if key == name else old) for key, old in fields() if key != name or value is not None]
    block = Encoder().encode([(key, text or "") for key, text in kept])
    return lambda _: _head(1, block, "END_HEADERS", "END_STREAM")


ABUSES: list[tuple[str, Say, ErrorCodes]] = [
    ("rapid resets", _rapid_resets, CALM),
    ("CONTINUATION without end", _continuations, CALM),
    ("a header list without end", _long_list, CALM),
    ("a bomb of header compression", _bomb, CALM),
    ("a flood of SETTINGS", lambda _: SettingsFrame(0).serialize() * 100, CALM),
    ("a flood of acknowledged SETTINGS", lambda _: SettingsFrame(0, flags=("ACK",)).serialize() * 3000, CALM),
    ("a flood of PING", lambda _: PingFrame(0, b"12345678").serialize() * 1000, CALM),
    ("a flood of PRIORITY", lambda _: PriorityFrame(1, 0, 1).serialize() * 3000, CALM),
    ("a flood of WINDOW_UPDATE", lambda _: WindowUpdateFrame(0, 1).serialize() * 3000, CALM),
    ("a flood of frames that nobody knows", lambda _: (b"\0\0\0\xee\0" + b"\0\0\0\0") * 3000, CALM),
    ("empty DATA", lambda _: _head() + DataFrame(1).serialize() * 3000, CALM),
    ("DATA that is padding", _padding, CALM),
    ("the end of a stream that has ended", _ends, CALM),
    ("HEADERS for a stream that was reset", lambda _: _head() + RstStreamFrame(1).serialize() + _head() * 3000, CALM),
    ("a frame of 17 kB", lambda _: b"\x00\x44\x00\x00\x00\x00\x00\x00\x01", FRAME_SIZE),
    ("DATA before a head", lambda _: DataFrame(1, b"x").serialize(), PROTOCOL),
    ("PUSH_PROMISE", lambda _: b"\0\0\4\5\4\0\0\0\1" + b"\0\0\0\2", PROTOCOL),
    ("a stream that is ours to begin", lambda _: _head(2), PROTOCOL),
    ("a name in upper case", _with(("X-Upper", "a")), PROTOCOL),
    ("connection", _with(("connection", "close")), PROTOCOL),
    ("transfer-encoding", _with(("transfer-encoding", "chunked")), PROTOCOL),
    ("te but trailers", _with(("te", "gzip")), PROTOCOL),
    ("two hosts that differ", _with(("host", "elsewhere")), PROTOCOL),
    ("a pseudo-header behind a header", _with((":path", "/v1/models")), PROTOCOL),
    ("a pseudo-header of none", _with((":smuggled", "a")), PROTOCOL),
    ("the end of a line in a value", _with(("x", "a\r\nhost: b")), PROTOCOL),
    ("no path", _instead(":path", None), PROTOCOL),
    ("no method", _instead(":method", None), PROTOCOL),
    ("a length that is another", _another_length, PROTOCOL),
    ("trailers without an end", lambda _: _head() + _head(1, Encoder().encode([("x", "a")])), PROTOCOL),
]  # fmt: skip


def test_an_abuse_ends_its_connection_alone(tmp_path: Path) -> None:
    """Each with its error code; a stream beside, begun before all of them, is never interrupted."""

    async def scenario() -> None:
        async with served(tmp_path) as here:
            replica = await here.replica("a", endless)
            async with connected(here) as beside:
                stream = beside.ask(CHAT | {"stream": True})
                for name, say, code in ABUSES:
                    before = len(beside.heard[stream].body)
                    async with connected(here) as abuser:
                        abuser.send(say(abuser))
                        assert await abuser.end() == code, name
                    await beside.until(lambda before=before: len(beside.heard[stream].body) > before)  # type: ignore[misc]
            await replica.until(lambda r: len(r.deleted) == 1)
            page = await here.page()
            for code, times in ((CALM, 14), (FRAME_SIZE, 1)):
                told = f'connections_ended_total{{process="activator",error="{code.name.lower()}"}} {times}\n'
                assert told in page
            assert len(replica.calls) == 1, "nothing of it reached a replica"

    asyncio.run(scenario())


MADE: list[tuple[str, Callable[[int], Frame]]] = [
    ("DATA", lambda number: DataFrame(number, b"", flags=("END_STREAM",))),
    ("HEADERS", lambda number: HeadersFrame(number, b"\x82", flags=("END_HEADERS", "END_STREAM"))),
    ("more room than there can be", lambda number: WindowUpdateFrame(number, (1 << 31) - 1)),
]


async def _made_to_reset(abuser: Client, made: Callable[[int], Frame]) -> None:
    """Fewer requests at once than streams may be, behind each what ends it before it is served; until all have."""
    numbers, raw = [abuser.h2.get_next_available_stream_id() + 2 * each for each in range(40)], b""
    for number in numbers:
        abuser.h2.send_headers(number, fields(), end_stream=True)
        raw += abuser.h2.data_to_send() + made(number).serialize()
        abuser.heard[number] = Heard()
    abuser.send(raw)
    await abuser.until(lambda: bool(abuser.goaways) or all(abuser.heard[each].reset is not None for each in numbers))
    if not abuser.goaways:
        assert (await abuser.answer(abuser.ask())).status == 200


def test_resets_that_we_are_made_to_do(tmp_path: Path) -> None:
    """CVE-2025-8671: a frame that may not come behind a request counts as the reset that it leads to."""

    async def scenario() -> None:
        async with served(tmp_path, trusted_addresses="127.0.0.1") as here:
            for name, made in MADE:
                async with connected(here) as abuser:
                    for _ in range(10):
                        if not abuser.goaways:
                            await _made_to_reset(abuser, made)
                    assert abuser.goaways == [CALM], name
                    assert len(abuser.heard) > 200, "as many as may be at once"

    asyncio.run(scenario())


def test_what_is_allowed_is_served(tmp_path: Path) -> None:
    """The control: as much as may be of each of these, and the connection serves."""

    async def scenario() -> None:
        async with served(tmp_path) as here:
            await here.replica("a")
            async with connected(here) as mine:
                mine.send(SettingsFrame(0).serialize() * 10 + PingFrame(0, b"12345678").serialize() * 50)
                mine.send(PriorityFrame(1, 0, 1).serialize() * 500 + WindowUpdateFrame(0, 1).serialize() * 500)
                for _ in range(30):
                    left = mine.ask()
                    mine.h2.reset_stream(left, ErrorCodes.CANCEL)
                number = mine.ask(CHAT)
                assert (await mine.answer(number)).status == 200
                trailed = mine.ask(b'{"model": "m", "prompt": "x"}', fields("POST", "/v1/completions"), ends=False)
                mine.h2.send_data(trailed, b"")
                mine.h2.send_headers(trailed, [("x-late", "a")], end_stream=True)
                mine.send()
                assert (await mine.answer(trailed)).status == 200

    asyncio.run(scenario())


REFUSED = [
    pytest.param([("x", "a" * 40_000)], 431, id="a header of 40 kB"),
    pytest.param([(f"x{n}", "a") for n in range(101)], 431, id="a hundred headers too many"),
    pytest.param([("content-length", "0"), ("content-length", "0")], 400, id="two lengths"),
    pytest.param([("x(y)", "a")], 400, id="a name that is no token"),
    pytest.param([("x", "a\x01b")], 400, id="a control character"),
]


def test_a_head_that_is_refused_ends_no_connection(tmp_path: Path) -> None:
    """As its own stream, in as many ways as HTTP/1.1 has; the next stream is served."""

    async def scenario() -> None:
        async with served(tmp_path, http2_streams=2) as here, connected(here) as mine:  # none may keep its place
            for case in REFUSED:
                more, status = case.values
                assert isinstance(more, list)
                heard = await mine.answer(mine.ask(None, fields("GET", "/v1/models", "x", *more)))
                assert heard.status == status, case.id
                assert heard.headers["x-request-id"].startswith("req_"), case.id
            for path in ("*", "v1/models", "/v1/a b", "/v1/\x7f"):
                assert (await mine.answer(mine.ask(None, fields("GET", path)))).status == 400, path
            assert (await mine.answer(mine.ask())).status == 200
            page = await here.page()
            assert 'kelvin_refusals_total{process="activator",outcome="http",status="431"} 2' in page

    asyncio.run(scenario())


def test_no_preface_is_no_http2(tmp_path: Path) -> None:
    """Whoever agreed on HTTP/2 and speaks HTTP/1.1 is told so."""

    async def scenario() -> None:
        async with served(tmp_path) as here, connected(here, greets=False) as wrong:
            wrong.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await wrong.end() == PROTOCOL

    asyncio.run(scenario())


def test_more_streams_than_may_be_are_refused_alone(tmp_path: Path) -> None:
    """Also those that were reset, as long as their requests are being ended: that is what a rapid reset plays on."""

    async def scenario() -> None:
        async with served(tmp_path, http2_streams=4) as here:
            replica = await here.replica("a", endless)
            async with connected(here) as mine:
                assert mine.h2.remote_settings.max_concurrent_streams == 4
                kept = [mine.ask(CHAT | {"stream": True}) for _ in range(4)]
                await replica.until(lambda r: len(r.calls) == 4)
                mine.h2.remote_settings.max_concurrent_streams = 99  # as one that has not heard of it
                mine.h2.remote_settings.acknowledge()
                refused = [mine.ask() for _ in range(3)]
                for number in refused:
                    assert (await mine.answer(number)).reset == ErrorCodes.REFUSED_STREAM
                mine.h2.reset_stream(kept[0], ErrorCodes.CANCEL)
                mine.send()
                await replica.until(lambda r: len(r.deleted) == 1)
                async with asyncio.timeout(30):
                    while (await mine.answer(mine.ask())).status != 200:
                        pass

    asyncio.run(scenario())


def test_an_address_that_asks_too_often_is_told_and_sent_away(tmp_path: Path) -> None:
    """429 on the stream, GOAWAY on the connection; a trusted address goes on."""

    async def scenario() -> None:
        async with served(tmp_path, trusted_addresses="127.0.0.1", address_rate=2) as here:
            async with connected(here, source="127.0.0.2") as theirs:
                statuses = []
                while 429 not in statuses:
                    heard = await theirs.answer(theirs.ask())
                    statuses.append(heard.status)
                assert set(statuses) == {200, 429}
                assert json.loads(heard.body)["error"]["request_id"] == heard.headers["x-request-id"]
                assert await theirs.end() == ErrorCodes.NO_ERROR
            async with connected(here) as ours:
                assert [(await ours.answer(ours.ask())).status for _ in range(20)] == [200] * 20

    asyncio.run(scenario())


@pytest.mark.parametrize("said", [
    pytest.param(b"", id="nothing"),
    pytest.param(PREFACE[:10], id="half a preface"),
    pytest.param(PREFACE, id="a preface alone"),
    pytest.param(PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\x10\1", id="half a frame"),
    pytest.param(PREFACE + b"\0\0\0\4\0\0\0\0\0" + HeadersFrame(1, b"\x82", flags=("END_STREAM",)).serialize(),
                 id="half a header list"),
])  # fmt: skip
def test_who_says_too_little_is_ended(tmp_path: Path, said: bytes) -> None:
    """In the time of a head."""

    async def scenario() -> None:
        async with served(tmp_path, head_s=0.3) as here, connected(here, greets=False) as slow:
            slow.send(said)
            half = len(said) not in (0, len(PREFACE))
            assert await slow.end() == (CALM if half else ErrorCodes.NO_ERROR)

    asyncio.run(scenario())
