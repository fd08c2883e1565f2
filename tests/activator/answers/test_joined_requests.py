"""Requests that share a run, over TLS: a repeat joins the running request, and the run lasts while any
client listens."""

import asyncio
from pathlib import Path

import pytest

from activator.answers.idempotency_policy import RUNS_PER_CHARGE
from activator.answers.response_broadcast import MAX_LISTENERS
from tests.activator.answers.idempotent_calls import ASK, KEYED, same, sent, wait_for_joined
from tests.activator.control import KEY
from tests.activator.replica import DONE, ReceivedRequest, chunk, halves, hello
from tests.activator.world import CHAT, STREAM, ActivatorWorld, world


@pytest.mark.parametrize("body", [pytest.param(CHAT, id="whole"), pytest.param(STREAM, id="streamed")])
async def test_repeated_request_joins_the_running_one(tmp_path: Path, body: dict[str, object]) -> None:
    """Three repeats get the whole response of one run, at one charge."""

    async with world(tmp_path) as here:
        held = halves()
        replica = await here.replica("a", held)
        requests = [asyncio.create_task(here.post(body=body, **ASK))]
        await replica.until(lambda r: len(r.calls) == 1)
        requests += [asyncio.create_task(here.post(body=body, **ASK)) for _ in range(3)]
        await wait_for_joined(here, 3)
        held.release()
        first, *others = await asyncio.gather(*requests)
        assert first.status == 200
        assert all(same(first, other) for other in others)
        assert {other.headers["x-kelvin-repeat-of"] for other in others} == {first.headers["x-request-id"]}
        assert len(replica.calls) == 1
        records = await here.control.wait_for_records(4)
        assert sorted(sent(records)) == [("joined", 200, 0, False)] * 3 + [("ok", 200, 2, True)]


async def test_run_continues_while_any_client_listens(tmp_path: Path) -> None:
    """The first client disconnects. The joined one gets the response from its first byte. Nothing is cancelled."""

    async with world(tmp_path) as here:
        held = halves()
        replica = await here.replica("a", held)
        reader, writer = await here.raw(KEYED)
        await reader.readuntil(b"hel")
        joined = asyncio.create_task(here.post(body=STREAM, **ASK))
        await wait_for_joined(here, 1)
        writer.transport.abort()
        await here.wait_for_metric("kelvin_requests_inside", 1)
        held.release()
        got = await joined
        assert b"hel" in got.body
        assert got.body.endswith(DONE)
        assert (len(replica.calls), replica.deleted) == (1, [])
        assert sorted(sent(await here.control.wait_for_records(2))) == [
            ("joined", 200, 0, False),
            ("ok", 200, 2, True),
        ]
        assert same(await here.post(body=STREAM, **ASK), got)


async def leave(here: ActivatorWorld) -> None:
    """Send a keyed request, and abort the connection once the answer has begun."""
    reader, writer = await here.raw(KEYED)
    await reader.readuntil(b"hel")
    writer.transport.abort()


async def test_run_ends_when_the_last_client_leaves(tmp_path: Path) -> None:
    """The replica run is cancelled and the delivered tokens are recorded. The next request with the key runs again
    under the same charge id.
    """

    async with world(tmp_path) as here:
        replica = await here.replica("a", halves(), max_streams=1)
        await leave(here)
        await replica.until(lambda r: r.deleted == [r.calls[0].request_id])
        (cut,) = await here.control.wait_for_records(1)
        assert sent([cut]) == [("cancelled", 499, 1, True)]
        replica.script = hello
        again = await here.post(body=STREAM, **ASK)
        assert (again.status, len(replica.calls)) == (200, 2)
        assert "x-kelvin-repeat-of" not in again.headers
        records = await here.control.wait_for_records(2)
        assert records[1].once == cut.once
        assert await here.metric_value("kelvin_keyed_runs") == 0


async def test_slow_client_does_not_delay_a_fast_one(tmp_path: Path) -> None:
    """Each client reads at its own speed. An answer that is too large to store can't be joined or replayed."""
    piece = "x" * 60_000

    go = asyncio.Event()

    async def long(call: ReceivedRequest) -> None:
        for tokens in range(1, 41):
            await call.data(chunk(piece), tokens)
            if tokens == 2:
                await go.wait()
        await call.data(DONE, 40)
        await call.end(40)

    async with world(tmp_path, once_answer_bytes=1 << 19) as here:
        replica = await here.replica("a", long)
        reader, writer = await here.raw(KEYED)
        await reader.readuntil(b"data: ")  # then the client stops reading
        quick = asyncio.create_task(here.post(body=STREAM, **ASK))
        await wait_for_joined(here, 1)
        go.set()
        got = await quick
        assert got.body.count(piece.encode()) == 40
        writer.transport.abort()
        assert (await here.post(body=STREAM, **ASK)).headers.get("idempotent-replayed") is None
        assert len(replica.calls) == 2


async def test_oversized_response_is_not_joined(tmp_path: Path) -> None:
    """The beginning of a large answer is dropped, so a repeat gets 409 while it runs. Afterwards the key is free."""
    piece, go = "x" * 60_000, asyncio.Event()

    async def long(call: ReceivedRequest) -> None:
        for tokens in range(1, 21):
            await call.data(chunk(piece), tokens)
        await go.wait()
        await call.data(DONE, 20)
        await call.end(20)

    async with world(tmp_path, once_answer_bytes=1 << 19) as here:
        replica = await here.replica("a", long)
        reader, writer = await here.raw(KEYED)
        for _ in range(20):
            await reader.readuntil(b"\n\n")
        await here.wait_for_metric("kelvin_keyed_run_bytes", 0)
        refused = await here.post(body=STREAM, **ASK)
        assert (refused.status, refused.code) == (409, "idempotency_key_in_use")
        assert refused.headers["retry-after"] == "1"
        go.set()
        await reader.readuntil(DONE)
        writer.close()
        assert (await here.post(body=STREAM, **ASK)).body.count(piece.encode()) == 20
        assert len(replica.calls) == 2


async def test_one_answer_has_a_bounded_number_of_listeners(tmp_path: Path) -> None:
    """A client beyond MAX_LISTENERS gets 409 with a retry time. A disconnect makes room. All others get the answer."""

    async with world(tmp_path) as here:
        held = halves()
        replica = await here.replica("a", held)
        requests = [asyncio.create_task(here.post(body=STREAM, **ASK)) for _ in range(MAX_LISTENERS - 1)]
        reader, writer = await here.raw(KEYED)
        await reader.readuntil(b"hel")
        await wait_for_joined(here, MAX_LISTENERS - 1)
        refused = await asyncio.wait_for(here.post(body=STREAM, **ASK), 10)
        assert (refused.status, refused.code) == (409, "idempotency_key_in_use")
        assert refused.headers["retry-after"] == "1"
        writer.transport.abort()
        await here.wait_for_metric("kelvin_requests_inside", MAX_LISTENERS - 1)
        requests.append(asyncio.create_task(here.post(body=STREAM, **ASK)))
        await wait_for_joined(here, MAX_LISTENERS)
        held.release()
        first, *others = await asyncio.gather(*requests)
        assert first.body.endswith(DONE)
        assert all(same(first, other) for other in others)
        assert len(replica.calls) == 1


async def test_one_request_is_ended_by_its_id(tmp_path: Path) -> None:
    """Cancelling the id of the running request ends all clients. Cancelling the id of a joined one ends it alone."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", halves(), max_streams=1)
        first = asyncio.create_task(here.post(body=CHAT, **ASK, **{"x-request-id": "one"}))
        await replica.until(lambda r: len(r.calls) == 1)
        second = asyncio.create_task(here.post(body=CHAT, **ASK, **{"x-request-id": "two"}))
        third = asyncio.create_task(here.post(body=CHAT, **ASK, **{"x-request-id": "three"}))
        await wait_for_joined(here, 2)
        assert (await here.request("DELETE", "/v1/requests/two", None, KEY)).status == 204
        assert ((await second).status, replica.deleted) == (499, [])
        assert (await here.request("DELETE", "/v1/requests/one", None, KEY)).status == 204
        assert [(await first).status, (await third).status] == [499, 499]
        await replica.until(lambda r: len(r.deleted) == 1)
        replica.script = hello
        assert (await here.post(body=CHAT, **ASK)).status == 200


async def test_repeatedly_aborted_runs_are_charged_in_the_end(tmp_path: Path) -> None:
    """RUNS_PER_CHARGE runs of one key share a charge id. Later runs are charged one by one."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", halves())
        for count in range(1, RUNS_PER_CHARGE + 2):
            await leave(here)
            await replica.until(lambda r, count=count: len(r.deleted) == count)  # type: ignore[misc]
            await here.control.wait_for_records(count)
        records = here.control.records
        assert {each.completion_tokens for each in records} == {1}
        assert [bool(each.once) for each in records] == [True] * RUNS_PER_CHARGE + [False]


async def test_repeatedly_evicted_answers_are_charged_in_the_end(tmp_path: Path) -> None:
    """Two keys alternate with room for one stored answer, so each run evicts the other's answer. Runs beyond the free
    ones are charged.
    """
    keys = ["one", "two"]

    async with world(tmp_path, once_answers_per_tenant=1) as here:
        replica = await here.replica("a")
        for _ in range(RUNS_PER_CHARGE + 1):
            for key in keys:
                assert (await here.post(**{"idempotency-key": key})).status == 200
                await here.wait_for_metric("kelvin_keyed_runs", 0)
        runs = len(keys) * (RUNS_PER_CHARGE + 1)
        assert len(replica.calls) == runs
        records = await here.control.wait_for_records(runs)
        marks = [each.once for each in sorted(records, key=lambda each: each.started_at_us)]
        assert len(set(filter(None, marks))) == len(keys)
        assert [bool(each) for each in marks] == [True] * len(keys) * RUNS_PER_CHARGE + [False] * len(keys)
