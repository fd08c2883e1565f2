"""The open-loop client sends each request when it is due, independent of earlier answers, and reports each one."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from coldstart_bench.harness.activator_testbed import OpenLoopClient, running_open_loop
from coldstart_bench.harness.installation import free_port
from coldstart_bench.harness.load_protocol import (
    OpenLoopPlan,
    ReaderKind,
    RequestTemplate,
    connection_waits_s,
    send_delays_s,
)
from coldstart_bench.harness.program_runner import ProgramFailed
from coldstart_bench.harness.temporary_certificates import make_certificate
from tests.loop_thread import Answer, running_http_server

WHOLE = {"choices": [{"text": "w1"}]}


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """A server's TLS context."""
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls") / "server")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(certificate, key)
    return made


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenLoopClient]:
    """The program itself, as a process."""
    with running_open_loop(tmp_path_factory.mktemp("loop")) as loop:
        yield loop


def plan(port: int, count: int, *, most: int = 64, open_before: int = 0, patience_s: float = 20.0) -> OpenLoopPlan:
    """Return a plan of `count` requests that are all due at once."""
    arrivals = tuple((0, 0) for _ in range(count))
    return OpenLoopPlan(port, (RequestTemplate("k", "/v1/completions", "{}"),), arrivals, open_before, most, patience_s)


def gate(count: int) -> Answer:
    """Return a handler that answers only once `count` requests have arrived."""
    inside = 0
    there = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal inside
        inside += 1
        if inside >= count:
            there.set()
        await there.wait()
        return web.json_response(WHOLE)

    return answer


@pytest.mark.parametrize("open_before", [0, 20])
def test_every_request_is_sent_without_any_answer(loop: OpenLoopClient, tls: ssl.SSLContext, open_before: int) -> None:
    """All requests are sent before the first answer, otherwise the gate would stay shut."""
    with running_http_server(gate(20), tls) as port:
        ran = loop.run(plan(port, 20, open_before=open_before))
    assert [sent.is_ok for sent in ran.sent] == [True] * 20
    assert {ran.text(sent) for sent in ran.sent} == {"w1"}


def test_silent_server_loses_no_request(loop: OpenLoopClient, tls: ssl.SSLContext) -> None:
    """Negative control: with one connection the gate stays shut, and each request ends with `no_end`."""
    with running_http_server(gate(2), tls) as port:
        ran = loop.run(plan(port, 3, most=1, patience_s=0.5))
    assert [sent.code for sent in ran.sent] == ["no_end"] * 3
    assert [sent.sent_us for sent in ran.sent[1:]] == [None, None]


def test_wait_is_measured_from_the_due_time(loop: OpenLoopClient, tls: ssl.SSLContext) -> None:
    """A request's time includes its wait for a free connection."""
    with running_http_server(gate(1), tls) as port:
        first, second = loop.run(plan(port, 2, most=1)).sent
    assert second.sent_us is not None
    assert second.due_us == 0 <= second.seen_us <= first.end_us <= second.sent_us <= second.end_us
    assert second.took_s >= first.took_s
    assert send_delays_s([second]) == [second.seen_us / 1e6]
    assert connection_waits_s([second]) == [(second.sent_us - second.seen_us) / 1e6]


def test_each_kind_of_failure_is_recorded(loop: OpenLoopClient, tls: ssl.SSLContext) -> None:
    """A refusal, an error in a stream, an incomplete answer and a cut connection are told apart."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked = json.loads(await request.read())["how"]
        if asked == "refused":
            return web.json_response({"error": {"code": "overloaded"}}, status=503, headers={"retry-after": "1"})
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(b'data: {"choices":[{"text":"w1"}]}\n\n')
        if asked == "failed":
            await stream.write(b'event: error\ndata: {"error":{"code":"replica_lost"}}\n\n')
        if asked == "cut":
            assert request.transport is not None
            request.transport.abort()
        return stream

    words = ("refused", "failed", "short", "cut")
    payloads = tuple(RequestTemplate("k", "/", json.dumps({"how": word})) for word in words)
    with running_http_server(answer, tls) as port:
        arrivals = tuple((0, number) for number in range(len(words)))
        ran = loop.run(OpenLoopPlan(port, payloads, arrivals, 0, 8, 20.0))
    found = [(sent.status, sent.code, ran.text(sent), sent.retry_after) for sent in ran.sent[:3]]
    assert found == [(503, "overloaded", "", True), (200, "replica_lost", "w1", False), (200, "cut", "w1", False)]
    assert ran.sent[3].code == "cut"


def test_slow_and_silent_readers_hold_their_server(loop: OpenLoopClient, tls: ssl.SSLContext) -> None:
    """A slow reader gets the whole stream. A silent reader never ends, and its server can't send the rest."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for _ in range(3):
            await stream.write(b'data: {"choices":[{"text":"w1"}]}\n\n' + b": " + b"x" * 20_000 + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    with running_http_server(answer, tls) as port:
        slow = loop.run(
            OpenLoopPlan(port, (RequestTemplate("k", "/", "{}", reader=ReaderKind.SLOW),), ((0, 0),), 0, 8, 30.0)
        )
        silent = loop.run(
            OpenLoopPlan(port, (RequestTemplate("k", "/", "{}", reader=ReaderKind.SILENT),), ((0, 0),), 0, 8, 0.5)
        )
    assert slow.sent[0].is_ok
    assert silent.sent[0].code == "no_end"


def test_missing_server_fails_each_request(loop: OpenLoopClient) -> None:
    """Without a server, each request fails. If connections are opened in advance, the run fails."""
    ran = loop.run(plan(free_port(), 3))
    assert [sent.code for sent in ran.sent] == ["no_door"] * 3
    with pytest.raises(ProgramFailed, match="Connect"):
        loop.run(plan(free_port(), 3, open_before=1))
    assert loop.run(plan(free_port(), 1)).sent[0].code == "no_door"


def test_request_times_are_ordered(loop: OpenLoopClient, tls: ssl.SSLContext, tmp_path: Path) -> None:
    """The times are due, seen, sent, first byte and end, and the client's own load is reported."""
    payloads = (RequestTemplate("k", "/", "{}"),)
    with running_http_server(gate(1), tls) as port:
        ran = loop.run(OpenLoopPlan(port, payloads, ((0, 0), (20_000, 0), (40_000, 0)), 1, 8, 20.0))
    for sent in ran.sent:
        assert sent.sent_us is not None
        assert sent.first_us is not None
        assert sent.due_us <= sent.seen_us <= sent.sent_us <= sent.first_us <= sent.end_us
    assert ran.load is not None
    assert ran.load.each_us > 0
