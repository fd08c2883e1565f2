"""A monthly budget over HTTP: which requests are refused, and how records count before the ledger has them."""

import asyncio
import json
from pathlib import Path

from kelvin.contracts.accounting.spending import SpendingRow, TokenPrices
from kelvin.contracts.serving.stream_frames import FrameKind
from tests.activator.control import STRANGER, limited
from tests.activator.limits import spending
from tests.activator.redis_server import RedisServer
from tests.activator.replica import END, Held, ReceivedRequest, whole
from tests.activator.world import CHAT, ActivatorWorld, http, world
from tests.eventually import eventually

PRICES = TokenPrices(per_tokens=1, prompt=10, cached=10, completion=100, request=0)
SMALL = CHAT | {"max_tokens": 5}
ANSWER = 3 * 10 + 2 * 100  # cost of the answer of `hello`
MOST = len(json.dumps(SMALL)) * 10 + 5 * 100  # the most that `SMALL` may cost: a token of its prompt may be one byte
FAR_US = 1 << 60


async def budget(here: ActivatorWorld, micros: int, spent: int, seen: dict[str, int] | None = None) -> None:
    row = SpendingRow(
        tenant="default", month="2026-11", ends_at_us=FAR_US, spent_micros=spent, prices=PRICES, seen=seen or {}
    )
    await here.publish(tenants=(limited(budget_micros=micros),), spending=(row,))


async def test_spent_budget_refuses_before_the_body(tmp_path: Path) -> None:
    """429 `insufficient_quota` without Retry-After comes before the body is read. Other tenants are served."""

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        await budget(here, 1000, 1000)
        reader, writer = await here.raw()
        writer.write(http(b"x" * 1000)[:-1000])  # a head without its body
        answer = await asyncio.wait_for(reader.read(), 30)
        assert answer.startswith(b"HTTP/1.1 429"), answer
        assert b'"code":"insufficient_quota"' in answer
        assert b"this month (1000 micro-units) is spent" in answer
        assert b"retry-after" not in answer
        writer.close()
        assert (await here.post(body=CHAT | {"model": "nothing"}, key=STRANGER)).status == 404
        assert replica.calls == []
        await budget(here, 10_000, 1000)
        assert (await here.post(body=SMALL)).status == 200


async def test_a_record_counts_before_the_ledger_has_it(tmp_path: Path) -> None:
    """A running request holds the most it may cost, and is charged its cost. The ledger's sum replaces its record."""
    held = Held()

    async with world(tmp_path) as here:
        replica = await here.replica("a", held)
        await budget(here, MOST + ANSWER, 0)
        first = asyncio.create_task(here.post(body=SMALL))
        await replica.until(lambda r: len(r.calls) == 1)
        got = await here.post(body=SMALL)
        assert (got.status, got.code) == (429, "insufficient_quota")
        assert b"does not cover this request" in got.body
        assert b"a lower max_tokens" in got.body
        held.release()
        assert (await first).status == 200
        assert (await here.post(body=SMALL)).status == 200  # fits beside the cost of the first one
        assert (await here.post(body=SMALL)).status == 429
        records = await here.control.wait_for_records(4)
        assert [record.outcome for record in records if record.status == 429] == ["insufficient_quota"] * 2
        seen = {records[-1].source: max(record.sequence for record in records)}
        await budget(here, MOST + ANSWER, 2 * ANSWER, seen)
        # counted once, though both the record and the ledger have it
        assert (await here.post(body=SMALL)).status == 429
        await budget(here, MOST + 2 * ANSWER, 2 * ANSWER, seen)
        assert (await here.post(body=SMALL)).status == 200


async def dense(call: ReceivedRequest) -> None:
    """Answer as if the prompt were token ids of two bytes each."""
    prompt = len(call.body) // 2
    await call.write(FrameKind.DATA, whole("hello", chat=False), 2, prompt)
    await call.write(FrameKind.END, END, 2, prompt)


async def test_short_token_ids_do_not_exceed_a_budget(tmp_path: Path) -> None:
    """A prompt of short token ids has twice as many tokens as a text of as many bytes would. It is refused where it
    might exceed the budget, and costs no more than the budget if admitted.
    """
    body = b'{"model":"m","max_tokens":2,"prompt":[%s]}' % b",".join([b"1"] * 400)
    most = len(body) * 10 + 2 * 100

    async with world(tmp_path) as here:
        await here.replica("a", dense)
        await budget(here, most - 1, 0)
        got = await here.post("/v1/completions", body)
        assert (got.status, got.code) == (429, "insufficient_quota")
        await budget(here, most, 0)
        assert (await here.post("/v1/completions", body)).status == 200
        *_, record = await here.control.wait_for_records(2)
        cost = PRICES.cost_micros(record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        assert most / 4 < 400 * 10 < cost <= most


async def test_a_budget_outlives_the_activator(tmp_path: Path) -> None:
    """The saved feed has the budget: an activator that starts without a control plane still refuses."""

    async with world(tmp_path) as here:
        await here.replica("a")
        await budget(here, 1000, 1000)
        assert (await here.post(body=SMALL)).status == 429
        kept = here.data / "run" / "feed"
        await eventually(lambda: kept.exists() and b'"spent_micros":1000' in kept.read_bytes())
        await here.control.stop()
        assert await here.terminate() == 0
        await here.restart()
        assert (await here.post(body=SMALL)).status == 429


async def test_limits_hold_without_a_control_plane(tmp_path: Path) -> None:
    """Budgets and limits per minute count on from the last feed row, record by record. Every record is shipped once a
    control plane is back.
    """

    async with world(tmp_path) as here:
        await here.replica("a")
        await budget(here, MOST + 2 * ANSWER, 0)
        await here.control.stop()
        got = [await here.post(body=SMALL) for _ in range(4)]
        assert [each.status for each in got] == [200, 200, 200, 429]
        assert got[-1].code == "insufficient_quota"
        assert here.control.records == []
        await here.control.start(here.data / "run")
        records = await here.control.wait_for_records(4)
        assert [record.status for record in records] == [200, 200, 200, 429]
        await here.settled()  # it follows the feed again, so what is published from now on reaches it
        await here.limit(rpm=2)
        await here.control.stop()
        assert [(await here.post(body=SMALL)).status for _ in range(3)] == [200, 200, 429]
        here.control.publish(tenants=(limited(),))
        await here.control.start(here.data / "run")


async def test_two_activators_spend_one_budget(tmp_path: Path, redis: RedisServer) -> None:
    """An amount leased by another activator is not available until it is returned. While Redis is down the own lease is
    used, then 429 with `Retry-After`. The activator ends cleanly.
    """
    async with world(tmp_path, redis=redis.url) as here, spending.budget_activator(redis, "other") as other:
        await here.replica("a")
        await budget(here, 100_000, 0)
        other.tell(spending.Ledger("2026-11", FAR_US, tenant="default").row())
        assert await other.try_hold(100_000, 98_500) is None
        got = await here.post(body=CHAT | {"max_tokens": 15})
        assert (got.status, got.code) == (429, "insufficient_quota")
        other.end(0, 0)
        await other.tend()
        async with asyncio.timeout(30):
            while (got := await here.post(body=SMALL)).status == 429:
                await asyncio.sleep(0.05)
        assert got.status == 200
        redis.kill()
        async with asyncio.timeout(30):
            while (got := await here.post(body=SMALL)).status == 200:
                await asyncio.sleep(0.01)
        assert (got.status, got.code, got.headers["retry-after"]) == (429, "budget_unavailable", "1")
        redis.start()
        async with asyncio.timeout(30):
            while (got := await here.post(body=SMALL)).status == 429:
                await asyncio.sleep(0.05)
        assert await here.terminate() == 0
