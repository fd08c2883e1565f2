"""Nothing that a caller sends (unknown fields, header values, queries, bodies) reaches a log or a file."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.activator.replica import lost
from tests.activator.world import ActivatorWorld, http, world

MARK = "xyzzy4711"


def chat(**more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": MARK}], **more}


async def ask_all(here: ActivatorWorld) -> None:
    """Send requests with the mark in every field, header and path, both valid and invalid ones."""
    replica = await here.replica("a")
    headers = {"X_Mark": MARK, "Cookie": f"a={MARK}", "User_Agent": MARK, "Idempotency_Key": MARK, MARK: "1"}
    unknown = {MARK: MARK, "metadata": {MARK: MARK}, "user": MARK, "tools": [{"type": MARK}]}
    where = f"/v1/chat/completions?{MARK}={MARK}"
    assert (await here.post(where, chat(), **headers)).status == 200
    wanted = [
        (where, chat(**unknown)),
        (where, chat(max_tokens=MARK)),
        (where, chat(stream=MARK)),
        (where, f'{{"model": "m", "{MARK}": '.encode()),
        (where, f'"{MARK}"'.encode()),
        (where, {"model": MARK, "messages": []}),
        ("/v1/completions", {"model": "m", "prompt": MARK, "max_tokens": 1 << 40, "logit_bias": {MARK: 1}}),
        ("/v1/embeddings", {"model": "m", "input": [MARK]}),
        ("/v2/models/m/infer", {"inputs": [{"name": MARK, "data": [MARK]}]}),
        (f"/v1/{MARK}", chat()),
        ("/admin/v1/models", {MARK: MARK}),
    ]
    for path, body in wanted:
        assert (await here.post(path, body, **headers)).status < 600
    assert (await here.post(where, chat(), key=MARK)).status == 401
    assert (await here.get(f"/v1/models/{MARK}?{MARK}")).status == 404
    assert (await here.post(where, chat(), x_kelvin_deadline_ms=MARK)).status == 400
    for raw in (b"GET / HTTP/1.1\r\nX-Mark: %s\r\nbad header\r\n\r\n" % MARK.encode(), http(MARK.encode(), extra="")):
        reader, writer = await here.raw(raw)
        await asyncio.wait_for(reader.read(1), 30)
        writer.close()
    replica.script = lost
    assert (await here.post(where, chat())).status >= 500
    (here.data / "page").write_text(await here.page())


def places(data: Path) -> list[str]:
    """Return the files that contain the mark. The log is one of them."""
    wanted = MARK.encode()
    files = [path for path in data.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(data)) for path in files if wanted in path.read_bytes())


async def searched(tmp_path: Path, **settings: object) -> list[str]:
    """Return the files with the mark after an activator with debug logging has ended."""
    async with world(tmp_path, log_level="debug", **settings) as here:  # type: ignore[arg-type]
        await ask_all(here)
    lines = [json.loads(line) for line in (here.data / "log").read_text().splitlines()]
    assert lines, "it does log"
    return places(here.data)


async def test_secrets_and_content_are_never_logged(tmp_path: Path) -> None:
    """At level `debug`, valid and invalid requests leave the mark in no log, spool or metrics page."""
    assert await searched(tmp_path) == []


@pytest.mark.parametrize("logged_part", ["headers", "query", "body"])
async def test_control_leaking_activator_is_detected(tmp_path: Path, logged_part: str) -> None:
    """Negative control: an activator that logs a header, the query or the body is detected."""
    assert await searched(tmp_path, program="tests.activator.content_logging", logged_part=logged_part) == ["log"]
