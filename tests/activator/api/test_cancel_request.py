"""DELETE /v1/requests/ID at every stage of a request: its slot is freed, and only delivered tokens are billed."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from kelvin.contracts.serving.control_messages import Scope
from tests.activator.control import KEY, OTHER, STRANGER, key_row
from tests.activator.replica import ReceivedRequest, Script, endless, hello, silent
from tests.activator.world import CHAT, STREAM, ActivatorWorld, ReceivedResponse, world

NAME = "mine-1"
HELD: list["asyncio.Task[ReceivedResponse]"] = []  # a request that holds the only slot


def _first(endless: Script) -> Script:
    """Run the script for a replica's first call. Answer all other calls at once."""

    async def script(call: ReceivedRequest) -> None:
        await (endless if call.replica.calls[0] is call else hello)(call)

    return script


async def _cancel(here: ActivatorWorld, name: str = NAME, key: str = KEY) -> ReceivedResponse:
    return await here.request("DELETE", f"/v1/requests/{name}", None, key)


def _ask(here: ActivatorWorld, body: object) -> "asyncio.Task[ReceivedResponse]":
    return asyncio.create_task(here.post(body=body, x_request_id=NAME))


async def _restoring(here: ActivatorWorld, body: object) -> "asyncio.Task[ReceivedResponse]":
    """Reach the stage where a request waits for a cold start."""
    request_task = _ask(here, body)
    await here.control.wait_for_stat(1.0)
    return request_task


async def _queued(here: ActivatorWorld, body: object) -> "asyncio.Task[ReceivedResponse]":
    """Reach the stage where the only slot is taken."""
    replica = await here.replica("a", _first(silent), max_streams=1)
    holder = asyncio.create_task(here.post(x_request_id="holder"))
    await replica.until(lambda r: len(r.calls) == 1)
    request_task = _ask(here, body)
    await here.wait_for_queued(1)
    HELD.append(holder)
    return request_task


async def _prefilling(here: ActivatorWorld, body: object) -> "asyncio.Task[ReceivedResponse]":
    """Reach the stage where the replica has received the request and sent nothing."""
    replica = await here.replica("a", _first(silent), max_streams=1)
    request_task = _ask(here, body)
    await replica.until(lambda r: len(r.calls) == 1)
    return request_task


async def _decoding(here: ActivatorWorld, body: object) -> "asyncio.Task[ReceivedResponse]":
    """Reach the stage where tokens have been sent."""
    replica = await here.replica("a", _first(endless), max_streams=1)
    request_task = _ask(here, body)
    await replica.until(lambda r: len(r.calls) == 1 and r.calls[0].answer is not None)
    return request_task


Reach = Callable[[ActivatorWorld, object], Awaitable["asyncio.Task[ReceivedResponse]"]]


@pytest.mark.parametrize("body", [pytest.param(CHAT, id="whole"), pytest.param(STREAM, id="streamed")])
@pytest.mark.parametrize(
    "reach",
    [
        pytest.param(_restoring, id="restoring"),
        pytest.param(_queued, id="queued"),
        pytest.param(_prefilling, id="prefilling"),
        pytest.param(_decoding, id="decoding"),
    ],
)
async def test_a_request_ends_at_every_stage(tmp_path: Path, reach: Reach, body: dict[str, object]) -> None:
    """The caller and the replica are told, and the slot is free. A second cancellation also returns 204; another tenant
    gets 404. A stream that has begun ends with an error event; otherwise the status is 499.
    """

    async with world(tmp_path) as here:
        request_task = await reach(here, body)
        assert (await _cancel(here, key=STRANGER)).status == 404, "a request of another tenant is not found"
        done = await _cancel(here)
        assert (done.status, done.body) == (204, b"")
        got = await request_task
        if got.status == 200:
            event = got.body.rstrip().rsplit(b"\n\n", 1)[-1]
            assert event.startswith(b"event: error\ndata: ")
            assert json.loads(event.partition(b"data: ")[2])["error"]["code"] == "cancelled"
            assert b"[DONE]" not in got.body
        else:
            assert (got.status, got.code) == (499, "cancelled")
        assert (await _cancel(here)).status == 204
        record = next(each for each in await here.control.wait_for_records(1) if each.outcome == "cancelled")
        assert record.request_id == got.headers["x-request-id"]
        assert record.status == got.status or got.status == 200
        if reach is _decoding and body is CHAT:  # nothing was delivered before the end, so the computed tokens count
            assert record.completion_tokens == here.replicas[0].calls[0].tokens > 0
        else:
            assert record.completion_tokens <= got.body.count(b'"content": "x"')
        if reach in (_prefilling, _decoding):
            replica = here.replicas[0]
            await replica.until(lambda r: r.deleted == [record.request_id])
            assert reach is _prefilling or replica.deleted_before_close == replica.deleted
        if reach is _restoring:
            await here.replica("late", waits_until_read=False)
        if reach is _queued:
            assert (await _cancel(here, "holder")).status == 204
            assert (await HELD.pop()).status == 499
        assert (await here.post()).status == 200


async def test_request_is_cancelled_by_its_response_id(tmp_path: Path) -> None:
    """The id is in the header of the stream. Only delivered tokens are billed."""

    async with world(tmp_path) as here:
        await here.replica("a", _first(endless), max_streams=1)
        own = {"authorization": f"Bearer {KEY}"}
        async with here.client.post(f"{here.url}/v1/chat/completions", json=STREAM, headers=own) as stream:
            name = stream.headers["x-request-id"]
            first = await stream.content.readuntil(b"\n\n")
            assert (await _cancel(here, name)).status == 204
            body = first + await stream.read()
        assert b'"code":"cancelled"' in body
        (record,) = await here.control.wait_for_records(1)
        assert (record.request_id, record.outcome) == (name, "cancelled")
        assert 0 < record.completion_tokens <= body.count(b'"content": "x"')


async def test_cancelling_finished_or_unknown_requests(tmp_path: Path) -> None:
    """A finished answer stands. Unknown ids, and requests of models that the key may not call, are 404."""

    async with world(tmp_path) as here:
        limited = "kv-limitedlimit-" + "l" * 43
        row = key_row("k9", limited, "default", Scope.INFER)
        here.control.publish(keys=(msgspec.structs.replace(row, models=("other",)),))
        replica = await here.replica("a")
        name = (await here.post()).headers["x-request-id"]
        assert (await _cancel(here, name)).status == 204
        assert (await _cancel(here, name, STRANGER)).status == 404
        assert (await _cancel(here, name, limited)).status == 404
        unknown = await _cancel(here, "req_unknown")
        assert (unknown.status, unknown.code) == (404, "not_found")
        (record,) = await here.control.wait_for_records(1)
        assert record.outcome == "ok"
        replica.script = _first(silent)
        replica.calls.clear()
        request_task = _ask(here, CHAT)
        await replica.until(lambda r: len(r.calls) == 1)
        assert (await _cancel(here, NAME, limited)).status == 404
        assert not request_task.done()
        assert (await _cancel(here)).status == 204
        assert (await request_task).status == 499
        assert (await here.get(f"/v1/requests/{NAME}")).status == 405
        assert (await here.request("DELETE", f"/v1/requests/{NAME}", None, "kv-bad")).status == 401


async def test_shared_client_id_cancels_all_its_requests(tmp_path: Path) -> None:
    """Two requests have the same client id: cancelling it ends both. Another request goes on."""

    async with world(tmp_path) as here:
        both = [_ask(here, CHAT) for _ in range(2)]
        bystander = asyncio.create_task(here.post(body=CHAT | {"model": "m@next"}))
        await here.wait_for_queued(3)
        assert (await _cancel(here)).status == 204
        assert [got.status for got in await asyncio.gather(*both)] == [499, 499]
        replica = await here.replica("a", version=OTHER, waits_until_read=False)
        assert (await bystander).status == 200
        assert len(replica.calls) == 1
