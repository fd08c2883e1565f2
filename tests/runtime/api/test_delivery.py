"""Ends of responses: failures, deadlines, cancellation, lost activators and slow readers."""

import asyncio
import json
from pathlib import Path

import pytest

from kelvin.contracts.accounting.usage import RecordOrigin
from kelvin.contracts.errors import Internal
from kelvin.contracts.serving.stream_frames import FrameDecoder, FrameKind
from runtime.api import delivery
from tests.runtime.fakes import BIND, CODEC, TEXT, failure_of, frames_until, script_of, serve_replica
from tests.runtime.scripted_engine import ScriptedEngine


async def test_a_failure_after_tokens_is_a_last_frame(tmp_path: Path) -> None:
    """After tokens, a failure is a last frame FAILED with its code and the counts."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            decoder = FrameDecoder()
            each.engine.allow(2)
            frames = await frames_until(answer, decoder, 2)
            each.engine.break_with = Internal()
            each.engine.allow()
            frames += decoder.feed(await answer.read())
            assert decoder.is_clean
        assert failure_of(frames[-1]).code == "internal"
        assert frames[-1].counts.completion_tokens == 2
        assert each.meter.meter.requests == 1
        await each.wait_until_idle()


async def test_damaged_weights_end_requests_over_them(tmp_path: Path) -> None:
    """Streams over damaged weights end with FAILED, also during a drain, and new requests are refused."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            decoder = FrameDecoder()
            each.engine.allow(2)
            frames = await frames_until(answer, decoder, 2)
            for path in ("drain", "condemn", "condemn"):
                async with each.session.post(f"http://rt/control/{path}") as told:
                    assert told.status == 202
            frames += decoder.feed(await answer.read())
        failure = failure_of(frames[-1])
        assert (failure.code, failure.retryable) == ("weights_damaged", True)
        assert BIND.version in failure.message
        async with each.open() as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "weights_damaged")
        assert each.replica.may_exit.is_set()


async def test_a_deadline_ends_a_request_wherever_it_is(tmp_path: Path) -> None:
    """Before the first byte a deadline is a 504, afterwards a FAILED frame. The engine's request ends both times."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        async with each.open(body={"stream": True}, deadline_ms="60") as answer:
            assert answer.status == 504
        async with each.open(body={"stream": True, "max_tokens": 9}, deadline_ms="600") as answer:
            each.engine.allow(2)
            frames = FrameDecoder().feed(await answer.read())
        assert failure_of(frames[-1]).code == "deadline_exceeded"
        await each.wait_until_idle()


async def test_delete_cancels(tmp_path: Path) -> None:
    """A DELETE is 204, the response ends as cancelled, and its record is left to the activator."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            decoder = FrameDecoder()
            each.engine.allow()
            frames = await frames_until(answer, decoder, 1)
            async with each.session.delete("http://rt/v1/requests/r1") as deleted:
                assert deleted.status == 204
            frames += decoder.feed(await answer.read())
        assert failure_of(frames[-1]).code == "cancelled"
        await each.wait_until_idle()
        await each.send_receipt("r1", 0, recorded=True)
        await each.orphans.flush()
        assert each.records.records == []
        async with each.session.delete("http://rt/v1/requests/r1") as deleted:
            assert deleted.status == 204, "it may be repeated"


@pytest.mark.parametrize(
    ("told", "tenant", "model"),
    [
        pytest.param({}, BIND.tenant, BIND.model, id="the version's own tenant"),
        pytest.param({"guest": "guest"}, "guest", f"{BIND.tenant}/{BIND.model}", id="a guest"),
    ],
)
async def test_a_lost_activator_leaves_a_record(tmp_path: Path, told: dict[str, str], tenant: str, model: str) -> None:
    """If the activator's connection is lost, a record has the acknowledged tokens, not the computed ones."""

    told = told | {"once": "abc", "gave-up": "fallback-of=big"}
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each:
        async with each.open(body={"stream": True, "max_tokens": 50}, key_id="key1", **told) as answer:
            each.engine.allow(5)
            await frames_until(answer, FrameDecoder(), 5)
            for tokens in (3, 2):
                await each.send_receipt("r1", tokens)
            answer.close()
        await each.wait_until_idle()
        async with asyncio.timeout(30):
            await each.records.written.wait()
        (record,) = each.records.records
        assert (record.request_id, record.origin, record.source, record.sequence) == ("r1", RecordOrigin.ORPHAN, "x", 1)
        assert (record.tenant, record.model, record.version) == (tenant, model, BIND.version)
        assert (record.key_id, record.runtime_id, record.stream) == ("key1", "x", True)
        assert (record.once, record.degraded) == ("abc", "fallback-of=big")
        assert record.completion_tokens == 3
        assert record.prompt_tokens == len(CODEC.encode("Once"))
        assert (record.outcome, record.status) == ("cancelled", 499)
        assert record.started_at_us <= record.ended_at_us
        assert each.meter.meter.requests == 1, "one request, one record"


async def test_late_delete_leaves_the_record_to_its_activator(tmp_path: Path) -> None:
    """A DELETE after a lost connection leaves the record to the activator. Once durable there, none is written here."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True), grace_s=60.0) as each:
        async with each.open(body={"stream": True, "max_tokens": 50}) as answer:
            each.engine.allow()
            await frames_until(answer, FrameDecoder(), 1)
            answer.close()
        await each.wait_until_idle()
        async with each.session.delete("http://rt/v1/requests/r1"):
            pass
        assert len(each.orphans) == 1
        await each.send_receipt("r1", 1, recorded=True)
        assert len(each.orphans) == 0
        await each.orphans.flush()
        assert each.records.records == []


@pytest.mark.parametrize("after", ["its end", "a DELETE"])
async def test_dead_activators_unconfirmed_request_is_recorded(tmp_path: Path, after: str) -> None:
    """If an activator dies before its record is durable, the last acknowledged tokens are recorded here."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True), grace_s=0.05) as each:
        async with each.open(body={"stream": True, "max_tokens": 5}, source="activator-dead") as answer:
            each.engine.allow(1)
            await frames_until(answer, FrameDecoder(), 1)
            if after == "a DELETE":
                async with each.session.delete("http://rt/v1/requests/r1"):
                    pass
            each.engine.run_freely()
            await answer.read()
        await each.send_receipt("r1", 1)
        await each.until("a record", lambda: bool(each.records.records))
        (record,) = each.records.records
        assert (record.request_id, record.origin, record.completion_tokens) == ("r1", RecordOrigin.ORPHAN, 1)
        assert len(each.orphans) == 0


async def test_a_slow_activator_that_lives_is_waited_for(tmp_path: Path) -> None:
    """A living activator's record is awaited. It is written here when the replica itself ends."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT)), grace_s=0.01) as each:
        await each.frames(body={"stream": True, "max_tokens": 5})
        await each.frames(body={"stream": True, "max_tokens": 5}, request_id="dead", source="activator-dead")
        await each.until("the dead one's is written", lambda: len(each.records.records) == 1)
        assert each.records.records[0].request_id == "dead"
        assert len(each.orphans) == 1
        await each.orphans.wait_until_empty(0.01)
        await each.orphans.flush()
        assert [record.request_id for record in each.records.records] == ["dead", "r1"]


async def test_receipts_that_nobody_waits_for_change_nothing(tmp_path: Path) -> None:
    """Repeated, late and unknown receipts are accepted. A malformed list is refused."""
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT))) as each:
        await each.frames(body={"max_tokens": 5})
        for _ in range(2):
            await each.send_receipt("r1", 5, recorded=True)
        await each.send_receipt("stranger", 5)
        async with each.session.post("http://rt/v1/receipts", json={"receipts": [{"request_id": 1}]}) as answer:
            assert answer.status == 400
        await each.orphans.flush()
        assert each.records.records == []


async def test_slow_answer_sends_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats carry the counts while an answer is not complete."""
    monkeypatch.setattr(delivery, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(delivery, "COMMIT_DELAY_S", 0.02)
    async with (
        serve_replica(tmp_path, ScriptedEngine(script_of(TEXT), paced=True)) as each,
        each.open(body={"max_tokens": 50}) as answer,
    ):
        decoder = FrameDecoder()
        beats = await frames_until(answer, decoder, 0)
        each.engine.allow(3)
        beats += await frames_until(answer, decoder, 3)
        assert {beat.kind for beat in beats} == {FrameKind.HEARTBEAT}
        each.engine.run_freely()
        assert decoder.feed(await answer.read())[-1].kind is FrameKind.END


async def test_a_client_that_does_not_read_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read is cancelled in the engine soon, and its connection is cut later."""
    monkeypatch.setattr(delivery, "WRITE_TIMEOUT_S", 0.2)
    endless = ScriptedEngine(lambda request: [CODEC.encode("a")[1]] * request.sampling.max_tokens, step_s=0.0005)
    async with serve_replica(tmp_path, endless) as each:
        body = json.dumps({"prompt": "Once", "stream": True, "max_tokens": 20_000}).encode()  # ten seconds of tokens
        head = f"POST /v1/completions HTTP/1.1\r\nhost: rt\r\nx-kelvin-request-id: r1\r\ncontent-length: {len(body)}"
        with each.directory.connect("rt-x.sock") as client:
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            await each.until("the engine is free of it", lambda: bool(each.engine.cancelled))
            assert each.engine.admitted[0].request_id == each.engine.cancelled[0]
            await each.wait_until_idle()
            received = await asyncio.to_thread(lambda: b"".join(iter(lambda: client.recv(65536), b"")))
        assert b"HTTP/1.1 200" in received
        assert not received.endswith(b"0\r\n\r\n"), "it must not look complete"


async def test_answer_that_no_frame_takes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer too long for one frame is refused as too long, with the limit."""
    for module in ("kelvin.contracts.serving.stream_frames", "runtime.api.delivery"):
        monkeypatch.setattr(f"{module}.MAX_PAYLOAD", 300)
    async with serve_replica(tmp_path, ScriptedEngine(script_of(TEXT * 20))) as each:
        async with each.open(body={"max_tokens": 500}) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].endswith("this model allows at most 300")
        await each.wait_until_idle()
