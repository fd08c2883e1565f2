"""Inference requests as the activator sends them, on a scripted engine."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from kelvin.contracts.accounting.meter_format import Phase
from kelvin.contracts.artifact_errors import ProbeFailed
from kelvin.contracts.errors import Conflict, Refused
from kelvin.contracts.serving.stream_frames import ENCODED_TOKENS_HEADER, Counts, FrameDecoder, FrameKind, StreamEnd
from kelvin.contracts.timeline import Stage
from kelvin.contracts.traffic_errors import Overloaded
from runtime.surface.served_version import ServedDecoder
from runtime.text.tokenizer import TextCodec
from tests.runtime.fakes import (
    BIND,
    CODEC,
    DEADLINE_S,
    LIMITS,
    TEXT,
    ReplicaServer,
    data_of,
    events_of,
    frames_until,
    script_of,
    serve_replica,
)
from tests.runtime.scripted_engine import ScriptedEngine


async def test_a_streamed_chat_arrives_whole(tmp_path: Path) -> None:
    """A streamed chat has whole events in DATA frames, growing counts, `[DONE]`, and an END with the stages."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_completion_tokens": 100}
        frames = await each.frames("/v1/chat/completions", body)
        *data, end = frames
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events_of(frames))
        assert text == TEXT
        assert all(frame.payload.endswith(b"\n\n") for frame in data if frame.kind is FrameKind.DATA)
        assert data_of(frames).endswith(b"data: [DONE]\n\n")
        counts = [frame.counts.completion_tokens for frame in frames]
        assert counts == sorted(counts)
        assert end.kind is FrameKind.END
        ending = msgspec.json.decode(end.payload, type=StreamEnd)
        assert ending.finish_reason == "stop"
        assert [span.stage for span in ending.spans] == [Stage.TOKENIZED, Stage.PREFILLED]
        prompt = CODEC.encode_chat([{"role": "user", "content": "Hi"}])
        said = len(script_of(TEXT)(each.engine.admitted[0]))
        assert end.counts == Counts(len(prompt), 0, said, said * 10)
        assert each.engine.admitted[0].prompt_ids == prompt
        await each.wait_until_idle()


async def test_a_whole_answer_is_one_frame(tmp_path: Path) -> None:
    """A whole answer is one DATA frame with the JSON object."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        frames = await each.frames(body={"max_tokens": 100, "model": "m@prod"})
        assert [frame.kind for frame in frames if frame.kind is not FrameKind.HEARTBEAT] == [
            FrameKind.DATA,
            FrameKind.END,
        ]
        answer = json.loads(data_of(frames))
        assert answer["choices"][0]["text"] == TEXT
        assert answer["model"] == "m@prod"
        assert answer["system_fingerprint"] == f"fp_{BIND.version[:12]}"


async def test_request_parameters_reach_the_engine(tmp_path: Path) -> None:
    """Sampling, token ids and the vocabulary's end tokens reach the engine."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        asked = {"prompt": [5, 6], "max_tokens": 7, "temperature": 0, "top_p": 0.0, "top_k": 3, "seed": 11}
        await each.frames(body=asked)
        request = each.engine.admitted[0]
        assert request.prompt_ids == (5, 6)
        assert request.stop_ids == {1}
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (7, 0.0, 3, 11)
        assert 0 < sampling.top_p < 1e-5


async def test_a_cap_ends_the_answer_short(tmp_path: Path) -> None:
    """A cap in the header ends an answer below its `max_tokens`."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        frames = await each.frames(body={"max_tokens": 100}, cap_tokens="3")
        answer = json.loads(data_of(frames))
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3
        assert each.engine.admitted[0].sampling.max_tokens == 3


async def test_stop_string_ends_the_answer_and_the_engine_run(tmp_path: Path) -> None:
    """Nothing of the stop string is sent, the finish reason is `stop`, and the rest is not generated."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT + " and more" * 20))) as each:
        frames = await each.frames(body={"max_tokens": 200, "stop": ["文 t", "zzz"], "stream": True})
        assert "".join(event["choices"][0]["text"] for event in events_of(frames)) == "naïve 中"
        assert events_of(frames)[-1]["choices"][0]["finish_reason"] == "stop"
        await each.wait_until_idle()
        assert len(each.engine.cancelled) == 1


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
    pytest.param("/v1/completions", {}, {"cap_tokens": "few"}, 400, "invalid_request", id="a cap in words"),
    pytest.param("/v1/completions", {}, {"output_tokens": "-1"}, 400, "invalid_request", id="a maximum below nothing"),
    pytest.param(
        "/v1/completions",
        {"max_tokens": 6},
        {"output_tokens": "5"},
        400,
        "context_length_exceeded",
        id="over the maximum of its tenant",
    ),
    pytest.param("/v1/completions", {}, {"deadline_ms": "0"}, 504, "deadline_exceeded", id="a deadline in the past"),
    pytest.param("/v1/images", {}, {}, 404, "not_found", id="an unknown route"),
    pytest.param("/v1/embeddings", {"input": "x"}, {}, 400, "invalid_request", id="embeddings of a generating model"),
    pytest.param("/v1/requests/r1", {}, {}, 405, "method_not_allowed", id="a method that the route lacks"),
]


@pytest.mark.parametrize(("path", "body", "headers", "status", "code"), REFUSALS)
async def test_refusals_before_compute(
    tmp_path: Path, path: str, body: Any, headers: dict[str, str], status: int, code: str
) -> None:
    """A refused request gets OpenAI's error form, does not reach the engine, and is not counted."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        async with each.open(path, body, **headers) as answer:
            assert answer.status == status
            error = (await answer.json())["error"]
            assert error["code"] == code
        assert each.engine.admitted == []
        assert each.meter.meter.requests == 0


@pytest.mark.parametrize(
    ("body", "encoded"),
    [
        pytest.param({"prompt": "a b " * 300}, len(CODEC.encode("a b " * 300)), id="a long prompt"),
        pytest.param({"max_tokens": 20_001}, len(CODEC.encode("Once")), id="too long an answer"),
        pytest.param({"prompt": [4] * 301}, None, id="tokens by their ids"),
        pytest.param({"prompt": "a" * 90_000}, None, id="too many characters for its tokens"),
    ],
)
async def test_refusal_says_how_many_tokens_were_encoded(tmp_path: Path, body: Any, encoded: int | None) -> None:
    """A refusal reports the encoded prompt tokens, which the activator counts against the tenant's rate limit."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each, each.open(body=body) as answer:
        assert (await answer.json())["error"]["code"] == "context_length_exceeded"
        assert answer.headers.get(ENCODED_TOKENS_HEADER) == (None if encoded is None else str(encoded))


async def test_a_refusal_of_the_engine_keeps_its_status(tmp_path: Path) -> None:
    """A full engine queue is a 503 with Retry-After, since nothing is sent before admission."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        each.engine.refuse = Overloaded("the engine's queue", 3, 1.0)
        async with each.open() as answer:
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert (await answer.json())["error"]["code"] == "overloaded"
        await each.wait_until_idle()
        assert each.meter.meter.requests == 0


async def test_drain_finishes_what_is_in_flight(tmp_path: Path) -> None:
    """A drain refuses new requests, completes the running one, and then lets the process exit."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            each.engine.allow()
            decoder = FrameDecoder()
            frames = await frames_until(answer, decoder, 1)
            async with each.session.post("http://rt/control/drain") as drained:
                assert drained.status == 202
            async with each.open(request_id="r2") as refused:
                assert refused.status == 503
                assert (await refused.json())["error"]["code"] == "unavailable"
            assert not each.replica.may_exit.is_set()
            each.engine.run_freely()
            frames += decoder.feed(await answer.read())
        assert frames[-1].kind is FrameKind.END
        async with asyncio.timeout(30):
            await each.replica.may_exit.wait()


async def test_standby_refuses_requests(tmp_path: Path) -> None:
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT)), bound=False) as each, each.open() as answer:
        assert answer.status == 503


async def test_a_probe_that_fails_closes_the_replica(tmp_path: Path) -> None:
    """The request gets the probe's failure, later requests too, and the process may exit."""
    failed = ProbeFailed(BIND.version, "position 3 is off")
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        each.engine.break_with = each.engine.poisoned = failed
        async with each.open() as answer:
            assert answer.status == 500
            assert (await answer.json())["error"]["code"] == "probe_failed"
        async with each.open(request_id="r2") as answer:
            assert answer.status == 500
        assert each.replica.failure == failed
        assert each.replica.may_exit.is_set()


async def test_a_probe_that_fails_alone_is_noticed(tmp_path: Path) -> None:
    """A failed probe fails the replica even without a request."""
    failed = ProbeFailed(BIND.version, "position 3 is off")
    engine = ScriptedEngine(script_of(TEXT))
    engine.needs_probe, engine.poisoned = True, failed
    async with serve_replica(tmp_path, engine) as each:
        async with asyncio.timeout(30):
            await each.replica.may_exit.wait()
        assert each.replica.failure == failed


def _phase(each: ReplicaServer) -> Phase:
    return each.meter.meter.phase


async def test_the_meter_follows_the_engine(tmp_path: Path) -> None:
    """The meter is idle once ready, active during a request, and idle again."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        assert _phase(each) is Phase.IDLE
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            each.engine.allow()
            await frames_until(answer, FrameDecoder(), 1)
            assert _phase(each) is Phase.ACTIVE
            each.engine.run_freely()
            await answer.read()
        await each.until("it is idle again", lambda: each.meter.meter.phase is Phase.IDLE)
        spent = each.meter.meter.spent_ns
        assert spent[Phase.STANDBY] > 0
        assert spent[Phase.RESTORE] > 0
        assert spent[Phase.ACTIVE] > 0


async def test_a_retry_may_carry_the_same_request_id(tmp_path: Path) -> None:
    """Two attempts with the same request id are both served."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        async with each.open(body={"stream": True, "max_tokens": 50}) as first:
            each.engine.allow()
            await frames_until(first, FrameDecoder(), 1)
            async with each.open(body={"max_tokens": 3}) as second:
                each.engine.run_freely()
                assert FrameDecoder().feed(await second.read())[-1].kind is FrameKind.END
            assert FrameDecoder().feed(await first.read())[-1].kind is FrameKind.END
        await each.wait_until_idle()


class HeldEncoding:
    """Blocks the encoding of prompts, in the replica's thread for long prompts, until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[str] = []  # the first letter of each text
        self.may_go_on = threading.Event()
        honest: Callable[[TextCodec, str], tuple[int, ...]] = TextCodec.encode

        def encode(codec: TextCodec, text: str) -> tuple[int, ...]:
            self.began.append(text[0])
            assert self.may_go_on.wait(DEADLINE_S)
            return honest(codec, text)

        monkeypatch.setattr(TextCodec, "encode", encode)

    async def send(self, each: ReplicaServer, letter: str, guest: str) -> None:
        """Send a prompt so long that it is encoded in the thread, and is refused for its length."""
        assert await self.status(each, letter, guest) == 400

    async def status(self, each: ReplicaServer, letter: str, guest: str = "") -> int:
        """Send such a prompt. Return the status."""
        async with each.open(body={"prompt": letter * 5000}, request_id=letter, guest=guest) as answer:
            return int(answer.status)


def waiting_prompts(each: ReplicaServer) -> int:
    serving, _ = each.replica.require_ready()
    assert isinstance(serving, ServedDecoder)
    return serving.encoding.waiting


async def test_owners_long_prompt_waits_for_one_of_a_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner's long prompt is encoded next, before a guest's waiting prompts."""
    encoding = HeldEncoding(monkeypatch)
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        async with asyncio.TaskGroup() as tasks:
            for letter in "abcd":
                tasks.create_task(encoding.send(each, letter, "guest"))
            await each.until("a guest's prompt is encoded", lambda: bool(encoding.began))
            tasks.create_task(encoding.send(each, "o", ""))
            await each.until("the owner's waits", lambda: waiting_prompts(each) == 4)
            encoding.may_go_on.set()
        assert encoding.began.index("o") == 1


async def test_long_prompt_whose_caller_left_is_not_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt whose client has left is not encoded."""
    encoding = HeldEncoding(monkeypatch)
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        first = asyncio.create_task(encoding.send(each, "a", "guest"))
        await each.until("the first is encoded", lambda: bool(encoding.began))
        second = asyncio.create_task(encoding.send(each, "b", "guest"))
        await each.until("the second waits", lambda: waiting_prompts(each) == 1)
        second.cancel()
        await each.until("it waits no more", lambda: waiting_prompts(each) == 0)
        encoding.may_go_on.set()
        await first
        assert encoding.began == ["a"]


@pytest.mark.parametrize("letter", ["a", "b"], ids=["is-encoded", "waits-for-its-turn"])
async def test_long_prompt_of_a_cancelled_request_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    """A cancelled request ends with 499 before its long prompt is encoded."""
    encoding = HeldEncoding(monkeypatch)
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        answers = {"a": asyncio.create_task(encoding.status(each, "a"))}
        await each.until("the first is encoded", lambda: bool(encoding.began))
        answers["b"] = asyncio.create_task(encoding.status(each, "b"))
        await each.until("the second waits", lambda: waiting_prompts(each) == 1)
        for _ in range(2):  # a second cancellation does no harm
            async with each.session.delete(f"http://rt/v1/requests/{letter}") as deleted:
                assert deleted.status == 204
        try:
            async with asyncio.timeout(DEADLINE_S / 2):
                assert await answers.pop(letter) == 499
        finally:
            encoding.may_go_on.set()
        assert [await answer for answer in answers.values()] == [400]
        assert encoding.began == (["a"] if letter == "b" else ["a", "b"])


async def test_a_full_replica_refuses_before_any_work(tmp_path: Path) -> None:
    """A full replica refuses with `no_credit` before it reads the body. A slot is free with the last frame."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        taken = [each.open(request_id=f"r{n}", wants="9") for n in range(LIMITS.max_streams)]
        opened = [asyncio.ensure_future(answer.__aenter__()) for answer in taken]
        await each.until("all are inside", lambda: each.replica.credits.active_requests == LIMITS.max_streams)
        async with each.open(body=b"no JSON", request_id="more", wants="9") as refused:
            assert refused.status == 503
            assert refused.headers["x-kelvin-credit"] == str(LIMITS.max_streams)
            error = (await refused.json())["error"]
            assert (error["code"], error["request_id"]) == ("no_credit", "more")
        assert len(each.engine.admitted) <= LIMITS.max_streams
        each.engine.run_freely()
        for answer in await asyncio.gather(*opened):
            assert answer.headers["x-kelvin-credit"] == str(LIMITS.max_streams)
            await answer.read()
        assert each.replica.credits.active_requests == 0
        assert await each.frames(request_id="last", wants="1")
        await each.wait_until_idle()


async def test_a_replica_with_a_request_inside_does_not_sleep(tmp_path: Path) -> None:
    """A request whose body is still arriving keeps the replica awake, so that it stays counted."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        arrives = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'{"prompt": '
            await arrives.wait()
            yield b'"Once"}'

        headers = {"x-kelvin-request-id": "r1", "x-kelvin-wants": "1"}
        asked = asyncio.ensure_future(each.session.post("http://rt/v1/completions", data=body(), headers=headers))
        await each.until("it is inside", lambda: each.replica.credits.active_requests == 1)
        with pytest.raises(Refused) as refused:
            await each.replica.sleep()
        assert refused.value.failure.code == Conflict.code
        arrives.set()
        async with await asked as answer:
            assert answer.status == 200
            await answer.read()
        await each.wait_until_idle()


async def test_an_older_activator_is_never_refused_for_credit(tmp_path: Path) -> None:
    """An activator that sends no wants is never refused, because it would pass the refusal to its client."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        answers = [each.open(request_id=f"r{n}") for n in range(LIMITS.max_streams + 1)]
        opened = [asyncio.ensure_future(answer.__aenter__()) for answer in answers]
        await each.until("all are inside", lambda: each.replica.credits.active_requests == LIMITS.max_streams + 1)
        each.engine.run_freely()
        for answer in await asyncio.gather(*opened):
            assert answer.status == 200
            await answer.read()
        assert each.replica.credits.active_requests == 0
        await each.wait_until_idle()


async def test_stream_is_returned_before_the_last_frame(tmp_path: Path) -> None:
    """A request has left the count before its last frame, since its activator sends the next one at once."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        inside: list[int] = []
        body: list[Message] = [{"type": "http.request", "body": b'{"prompt": "Once"}'}]

        async def receive() -> Message:
            return body.pop() if body else await asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                inside.append(each.replica.credits.active_requests)

        headers = [(b"x-kelvin-request-id", b"r1"), (b"x-kelvin-wants", b"1")]
        scope = {"type": "http", "method": "POST", "scheme": "http", "path": "/v1/completions", "headers": headers}
        await each.api(scope, receive, send)
        assert inside[-1] == 0
        assert set(inside[:-1]) <= {1}
