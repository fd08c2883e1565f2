"""One request from the activator's side: what it gets, in which form, whatever happens meanwhile."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts.errors import Internal, Overloaded, ProbeFailed
from contracts.frames import Counts, End, Frame, FrameDecoder, FrameKind
from contracts.meter import Phase
from contracts.problem import WireFailure
from contracts.timeline import Stage
from contracts.usage import Origin
from runtime import delivery
from tests.runtime.fakes import BIND, CODEC, Bench, ScriptedEngine, bench, frames_until, saying

TEXT = "naïve 中文 text"


def _run(tmp_path: Path, engine: ScriptedEngine, scene: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with bench(tmp_path, engine, **options) as each:
            await scene(each)

    asyncio.run(main())


def _data(frames: list[Frame]) -> bytes:
    return b"".join(frame.payload for frame in frames if frame.kind is FrameKind.DATA)


def _events(frames: list[Frame]) -> list[Any]:
    return [json.loads(line[6:]) for line in _data(frames).decode().splitlines() if line.startswith("data: {")]


def _failure(frame: Frame) -> WireFailure:
    assert frame.kind is FrameKind.FAILED
    return msgspec.json.decode(frame.payload, type=WireFailure)


def test_a_streamed_chat_arrives_whole(tmp_path: Path) -> None:
    """Complete events in DATA frames, counts that grow, `[DONE]` before END, the runtime's stages in END."""

    async def scene(each: Bench) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_completion_tokens": 100}
        frames = await each.frames("/v1/chat/completions", body)
        *data, end = frames
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in _events(frames))
        assert text == TEXT
        assert all(frame.payload.endswith(b"\n\n") for frame in data if frame.kind is FrameKind.DATA)
        assert _data(frames).endswith(b"data: [DONE]\n\n")
        counts = [frame.counts.completion_tokens for frame in frames]
        assert counts == sorted(counts)
        assert end.kind is FrameKind.END
        ending = msgspec.json.decode(end.payload, type=End)
        assert ending.finish_reason == "stop"
        assert [span.stage for span in ending.spans] == [Stage.TOKENIZED, Stage.PREFILLED]
        prompt = CODEC.encode_chat([{"role": "user", "content": "Hi"}])
        said = len(saying(TEXT)(each.engine.admitted[0]))
        assert end.counts == Counts(len(prompt), 0, said, said * 10)
        assert each.engine.admitted[0].prompt_ids == prompt
        await each.quiet()

    _run(tmp_path, ScriptedEngine(saying(TEXT)), scene)


def test_a_whole_answer_is_one_frame(tmp_path: Path) -> None:
    """Not streamed: one DATA frame holds the JSON object."""

    async def scene(each: Bench) -> None:
        frames = await each.frames(body={"max_tokens": 100, "model": "m@prod"})
        assert [frame.kind for frame in frames if frame.kind is not FrameKind.BEAT] == [FrameKind.DATA, FrameKind.END]
        answer = json.loads(_data(frames))
        assert answer["choices"][0]["text"] == TEXT
        assert answer["model"] == "m@prod"
        assert answer["system_fingerprint"] == f"fp_{BIND.version[:12]}"

    _run(tmp_path, ScriptedEngine(saying(TEXT)), scene)


def test_what_is_asked_reaches_the_engine(tmp_path: Path) -> None:
    """Sampling, token ids and the vocabulary's end tokens."""

    async def scene(each: Bench) -> None:
        asked = {"prompt": [5, 6], "max_tokens": 7, "temperature": 0, "top_p": 0.0, "top_k": 3, "seed": 11}
        await each.frames(body=asked)
        request = each.engine.admitted[0]
        assert request.prompt_ids == (5, 6)
        assert request.stop_ids == {1}
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (7, 0.0, 3, 11)
        assert 0 < sampling.top_p < 1e-5

    _run(tmp_path, ScriptedEngine(saying(TEXT)), scene)


def test_a_stop_string_ends_the_answer_and_the_engine_is_told(tmp_path: Path) -> None:
    """Nothing of the stop string is sent, the finish reason is `stop`, the rest is not generated."""

    async def scene(each: Bench) -> None:
        frames = await each.frames(body={"max_tokens": 200, "stop": ["文 t", "zzz"], "stream": True})
        assert "".join(event["choices"][0]["text"] for event in _events(frames)) == "naïve 中"
        assert _events(frames)[-1]["choices"][0]["finish_reason"] == "stop"
        await each.quiet()
        assert len(each.engine.cancelled) == 1

    _run(tmp_path, ScriptedEngine(saying(TEXT + " and more" * 20)), scene)


REFUSALS: list[Any] = [
    pytest.param("/v1/completions", b"{", {}, 400, "invalid_request", id="a body that is not JSON"),
    pytest.param("/v1/completions", {"temperature": 3}, {}, 400, "invalid_request", id="a value that breaks a rule"),
    pytest.param(
        "/v1/completions", {"max_tokens": 20_001}, {}, 400, "context_length_exceeded", id="too long an answer"
    ),
    pytest.param("/v1/completions", {"prompt": "a b " * 300}, {}, 400, "context_length_exceeded", id="a long prompt"),
    pytest.param("/v1/completions", b" " * 100_001, {}, 413, "request_too_large", id="too large a body"),
    pytest.param("/v1/chat/completions", {"n": 2}, {}, 400, "invalid_request", id="something not supported"),
    pytest.param("/v1/completions", {}, {"request_id": ""}, 400, "invalid_request", id="no request id"),
    pytest.param("/v1/completions", {}, {"deadline_ms": "soon"}, 400, "invalid_request", id="a deadline in words"),
    pytest.param("/v1/completions", {}, {"deadline_ms": "0"}, 504, "deadline_exceeded", id="a deadline in the past"),
    pytest.param("/v1/embeddings", {}, {}, 404, "not_found", id="an unknown route"),
    pytest.param("/v1/requests/r1", {}, {}, 405, "method_not_allowed", id="a method that the route lacks"),
]


@pytest.mark.parametrize(("path", "body", "headers", "status", "code"), REFUSALS)
def test_refusals_before_compute(
    tmp_path: Path, path: str, body: Any, headers: dict[str, str], status: int, code: str
) -> None:
    """A plain HTTP error in OpenAI's form; the engine hears nothing, no record will be missed."""

    async def scene(each: Bench) -> None:
        async with each.open(path, body, **headers) as answer:
            assert answer.status == status
            error = (await answer.json())["error"]
            assert error["code"] == code
        assert each.engine.admitted == []
        assert each.meter.meter.requests == 0

    _run(tmp_path, ScriptedEngine(saying(TEXT)), scene)


def test_a_refusal_of_the_engine_keeps_its_status(tmp_path: Path) -> None:
    """Nothing is committed before the engine took the request: a full queue is a 503 with Retry-After."""

    async def scene(each: Bench) -> None:
        each.engine.refuse = Overloaded("the engine's queue", 3, 1.0)
        async with each.open() as answer:
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert (await answer.json())["error"]["code"] == "overloaded"
        await each.quiet()
        assert each.meter.meter.requests == 0

    _run(tmp_path, ScriptedEngine(saying(TEXT)), scene)


def test_a_failure_after_tokens_is_a_last_frame(tmp_path: Path) -> None:
    """What was said stands; the answer ends in FAILED with the failure's own code and the counts so far."""

    async def scene(each: Bench) -> None:
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            decoder = FrameDecoder()
            each.engine.allow(2)
            frames = await frames_until(answer, decoder, 2)
            each.engine.break_with = Internal()
            each.engine.allow()
            frames += decoder.feed(await answer.read())
            assert decoder.is_clean
        assert _failure(frames[-1]).code == "internal"
        assert frames[-1].counts.completion_tokens == 2
        assert each.meter.meter.requests == 1
        await each.quiet()

    _run(tmp_path, ScriptedEngine(saying(TEXT), paced=True), scene)


def test_a_deadline_ends_a_request_wherever_it_is(tmp_path: Path) -> None:
    """Before anything was sent it is a 504, afterwards a FAILED frame; the engine is let go of both times."""

    async def scene(each: Bench) -> None:
        async with each.open(body={"stream": True}, deadline_ms="60") as answer:
            assert answer.status == 504
        async with each.open(body={"stream": True, "max_tokens": 9}, deadline_ms="600") as answer:
            each.engine.allow(2)
            frames = FrameDecoder().feed(await answer.read())
        assert _failure(frames[-1]).code == "deadline_exceeded"
        await each.quiet()

    _run(tmp_path, ScriptedEngine(saying(TEXT), paced=True), scene)


def test_delete_cancels(tmp_path: Path) -> None:
    """204 at once; the answer ends as cancelled, the blocks are free, and no orphan is made of it."""

    async def scene(each: Bench) -> None:
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            decoder = FrameDecoder()
            each.engine.allow()
            frames = await frames_until(answer, decoder, 1)
            async with each.session.delete("http://rt/v1/requests/r1") as deleted:
                assert deleted.status == 204
            frames += decoder.feed(await answer.read())
        assert _failure(frames[-1]).code == "cancelled"
        await each.quiet()
        await each.orphans.flush()
        assert each.records.records == []
        async with each.session.delete("http://rt/v1/requests/r1") as deleted:
            assert deleted.status == 204, "it may be repeated"

    _run(tmp_path, ScriptedEngine(saying(TEXT), paced=True), scene)


def test_a_lost_activator_leaves_a_record(tmp_path: Path) -> None:
    """Connection gone without a DELETE: freed, and recorded with the tokens that were acknowledged, not those made."""

    async def scene(each: Bench) -> None:
        async with each.open(body={"stream": True, "max_tokens": 50}, key_id="key1") as answer:
            each.engine.allow(5)
            await frames_until(answer, FrameDecoder(), 5)
            for tokens in (3, 2):
                url = "http://rt/v1/requests/r1/delivered"
                async with each.session.post(url, data=json.dumps({"completion_tokens": tokens})) as acknowledged:
                    assert acknowledged.status == 204
            answer.close()
        await each.quiet()
        async with asyncio.timeout(10):
            await each.records.written.wait()
        (record,) = each.records.records
        assert (record.request_id, record.origin, record.source, record.sequence) == ("r1", Origin.ORPHAN, "x", 1)
        assert (record.tenant, record.model, record.version) == (BIND.tenant, BIND.model, BIND.version)
        assert (record.key_id, record.runtime_id, record.stream) == ("key1", "x", True)
        assert record.completion_tokens == 3
        assert record.prompt_tokens == len(CODEC.encode("Once"))
        assert record.outcome == "activator_lost"
        assert record.started_at_us <= record.ended_at_us
        assert each.meter.meter.requests == 1, "one request, one record"

    _run(tmp_path, ScriptedEngine(saying(TEXT), paced=True), scene)


def test_a_delete_that_comes_late_takes_the_orphan_back(tmp_path: Path) -> None:
    """The activator lives: its own record stands, none is written here."""

    async def scene(each: Bench) -> None:
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            each.engine.allow()
            await frames_until(answer, FrameDecoder(), 1)
            answer.close()
        await each.quiet()
        async with each.session.delete("http://rt/v1/requests/r1"):
            pass
        await each.orphans.flush()
        assert each.records.records == []

    _run(tmp_path, ScriptedEngine(saying(TEXT), paced=True), scene, grace_s=60.0)


def test_an_answer_that_ended_leaves_no_orphan(tmp_path: Path) -> None:
    """Closing a connection after END is how connections end."""

    async def scene(each: Bench) -> None:
        async with each.open(body={"stream": True}) as answer:
            await answer.read()
            answer.close()
        await each.quiet()
        await each.orphans.flush()
        assert each.records.records == []

    _run(tmp_path, ScriptedEngine(saying(TEXT)), scene)


def test_an_answer_in_the_making_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole answers, and streams that have nothing to say yet, show that they live and what they cost."""
    monkeypatch.setattr(delivery, "BEAT_S", 0.02)
    monkeypatch.setattr(delivery, "COMMIT_S", 0.02)

    async def scene(each: Bench) -> None:
        async with each.open(body={"max_tokens": 50}) as answer:
            decoder = FrameDecoder()
            beats = await frames_until(answer, decoder, 0)
            each.engine.allow(3)
            beats += await frames_until(answer, decoder, 3)
            assert {beat.kind for beat in beats} == {FrameKind.BEAT}
            each.engine.free_running()
            assert decoder.feed(await answer.read())[-1].kind is FrameKind.END

    _run(tmp_path, ScriptedEngine(saying(TEXT), paced=True), scene)


def test_a_client_that_does_not_read_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded: the engine is free of it soon, and the connection is cut a while later."""
    monkeypatch.setattr(delivery, "STALL_S", 0.2)
    endless = ScriptedEngine(lambda request: [CODEC.encode("a")[1]] * request.sampling.max_tokens)

    async def scene(each: Bench) -> None:
        body = json.dumps({"prompt": "Once", "stream": True, "max_tokens": 20_000}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: rt\r\nx-kelvin-request-id: r1\r\ncontent-length: {len(body)}"
        with each.directory.connect("rt-x.sock") as client:
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            await each.until("the engine is free of it", lambda: bool(each.engine.cancelled))
            assert each.engine.admitted[0].request_id == each.engine.cancelled[0]
            await each.quiet()
            received = await asyncio.to_thread(lambda: b"".join(iter(lambda: client.recv(65536), b"")))
        assert b"HTTP/1.1 200" in received
        assert not received.endswith(b"0\r\n\r\n"), "it must not look complete"

    _run(tmp_path, endless, scene)


def test_drain_finishes_what_is_in_flight(tmp_path: Path) -> None:
    """New requests are refused as unavailable, the old one ends well, then the process may end."""

    async def scene(each: Bench) -> None:
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            each.engine.allow()
            decoder = FrameDecoder()
            frames = await frames_until(answer, decoder, 1)
            async with each.session.post("http://rt/control/drain") as drained:
                assert drained.status == 202
            async with each.open(request_id="r2") as refused:
                assert refused.status == 503
                assert (await refused.json())["error"]["code"] == "unavailable"
            assert not each.replica.over.is_set()
            each.engine.free_running()
            frames += decoder.feed(await answer.read())
        assert frames[-1].kind is FrameKind.END
        async with asyncio.timeout(10):
            await each.replica.over.wait()

    _run(tmp_path, ScriptedEngine(saying(TEXT), paced=True), scene)


def test_a_standby_takes_no_requests(tmp_path: Path) -> None:
    """Not bound is not available."""

    async def scene(each: Bench) -> None:
        async with each.open() as answer:
            assert answer.status == 503

    _run(tmp_path, ScriptedEngine(saying(TEXT)), scene, bound=False)


def test_a_probe_that_fails_closes_the_replica(tmp_path: Path) -> None:
    """The waiting request gets the failure with its status, no later one is taken, and the process may end."""
    failed = ProbeFailed(BIND.version, "position 3 is off")

    async def scene(each: Bench) -> None:
        each.engine.break_with = each.engine.poisoned = failed
        async with each.open() as answer:
            assert answer.status == 500
            assert (await answer.json())["error"]["code"] == "probe_failed"
        async with each.open(request_id="r2") as answer:
            assert answer.status == 500
        assert each.replica.failure == failed
        assert each.replica.over.is_set()

    _run(tmp_path, ScriptedEngine(saying(TEXT)), scene)


def test_a_probe_that_fails_alone_is_noticed(tmp_path: Path) -> None:
    """With no request to tell, the replica still fails closed."""
    failed = ProbeFailed(BIND.version, "position 3 is off")
    engine = ScriptedEngine(saying(TEXT))
    engine.needs_probe, engine.poisoned = True, failed

    async def scene(each: Bench) -> None:
        async with asyncio.timeout(10):
            await each.replica.over.wait()
        assert each.replica.failure == failed

    _run(tmp_path, engine, scene)


def _phase(each: Bench) -> Phase:
    return each.meter.meter.phase


def test_the_meter_follows_the_engine(tmp_path: Path) -> None:
    """Idle once ready, active while a request is in the engine, idle again after it."""

    async def scene(each: Bench) -> None:
        assert _phase(each) is Phase.IDLE
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            each.engine.allow()
            await frames_until(answer, FrameDecoder(), 1)
            assert _phase(each) is Phase.ACTIVE
            each.engine.free_running()
            await answer.read()
        await each.until("it is idle again", lambda: each.meter.meter.phase is Phase.IDLE)
        spent = each.meter.meter.spent_ns
        assert spent[Phase.STANDBY] > 0
        assert spent[Phase.RESTORE] > 0
        assert spent[Phase.ACTIVE] > 0

    _run(tmp_path, ScriptedEngine(saying(TEXT), paced=True), scene)


def test_a_retry_may_carry_the_same_request_id(tmp_path: Path) -> None:
    """The activator tries again while the first attempt is still in the engine: both are served, apart."""

    async def scene(each: Bench) -> None:
        async with each.open(body={"stream": True, "max_tokens": 50}) as first:
            each.engine.allow()
            await frames_until(first, FrameDecoder(), 1)
            async with each.open(body={"max_tokens": 3}) as second:
                each.engine.free_running()
                assert FrameDecoder().feed(await second.read())[-1].kind is FrameKind.END
            assert FrameDecoder().feed(await first.read())[-1].kind is FrameKind.END
        await each.quiet()

    _run(tmp_path, ScriptedEngine(saying(TEXT), paced=True), scene)
