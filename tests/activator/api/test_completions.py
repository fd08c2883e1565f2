"""A request to a running model: stream and whole answer over TLS, usage record, log line."""

import json
from pathlib import Path

import pytest

from tests.activator.control import VERSION
from tests.activator.world import STREAM, world


async def test_a_stream_arrives_whole_with_its_record(tmp_path: Path) -> None:
    """A warm stream ends with the timeline and [DONE]. One usage record has the delivered tokens."""

    async with world(tmp_path) as here:
        await here.replica("a")
        got = await here.post(body=STREAM)
        assert got.status == 200, got
        assert got.headers["content-type"].startswith("text/event-stream")
        events = got.body.split(b"\n\n")
        assert [json.loads(e[6:])["choices"][0]["delta"]["content"] for e in events[:2]] == ["hel", "lo"]
        assert events[2].startswith(b": timeline {")
        assert events[3:] == [b"data: [DONE]", b""]
        timeline = json.loads(events[2][11:])
        assert [stamp["stage"] for stamp in timeline["stamps"]] == [
            "routed", "dispatched", "tokenized", "prefilled", "first_token", "done",
        ]  # fmt: skip
        assert not timeline["cold"]
        (record,) = await here.control.wait_for_records(1)
        assert record.request_id == got.headers["x-request-id"]
        assert (record.outcome, record.status, record.version, record.runtime_id) == ("ok", 200, VERSION, "a")
        assert (record.prompt_tokens, record.completion_tokens, record.sequence) == (3, 2, 1)


async def test_a_whole_answer_is_timed_in_its_head(tmp_path: Path) -> None:
    """The body of a whole answer passes unchanged, and Server-Timing lists the runtime's stages."""

    async with world(tmp_path) as here:
        await here.replica("a")
        got = await here.post()
        assert got.status == 200
        assert got.json["choices"][0]["message"]["content"] == "hello"  # type: ignore[index]
        assert "prefilled;dur=" in got.headers["server-timing"]
        (record,) = await here.control.wait_for_records(1)
        assert (record.completion_tokens, record.stream, record.device_us) == (2, False, 20)


@pytest.mark.parametrize(("level", "count"), [("debug", 1), ("info", 0)])
async def test_completion_is_logged_at_debug(tmp_path: Path, level: str, count: int) -> None:
    """The completion is logged once by its id, with its outcome. At the default level it is not logged."""
    async with world(tmp_path, log_level=level) as here:
        await here.replica("a")
        got = await here.post()
        await here.control.wait_for_records(1)
        lines = [json.loads(line) for line in (here.data / "log").read_text().splitlines()]
        found = [line for line in lines if line["message"] == "a request ended"]
        assert [line["request_id"] for line in found] == [got.headers["x-request-id"]] * count
        for line in found:
            seen = (line["outcome"], line["status"], line["cold"], line["version"], line["completion_tokens"])
            assert seen == ("ok", 200, False, VERSION, 2)
