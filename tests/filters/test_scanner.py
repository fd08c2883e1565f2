"""Tenants share the scanning thread in slices, and an abandoned scan ends."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import httpx
import pytest

from contracts.errors import Refused
from contracts.filters import CHECK, DEADLINE, ENTITIES, TENANT, Action, Looked, Question, Rule
from contracts.traffic_errors import DeadlineExceeded, Overloaded
from contracts.wire import encode
from filters.app import Meters, make_app
from filters.scanner import MAX_WAITING_OF_TENANT, Scanner
from telemetry.policy.instruments import Page

RULES = (Rule(filter="pii", actions={"EMAIL_ADDRESS": "redact"}),)
REGIONS = ("US", "DE", "FR", "GB", "IT", "ES", "NL", "BE", "AT", "CH", "SE", "NO", "DK", "PL", "PT", "IE")
ALL: dict[str, Action] = dict.fromkeys(ENTITIES, "redact")
DEAR = (Rule(filter="pii", actions=ALL, phone_regions=REGIONS),)  # some 70 ms for a thousand digits
SHORT = Question(direction="input", rules=RULES, texts=("to a@b.example",), whole=True)
# As many texts as the messages of a request, each too short for a step of its own.
MANY = Question(direction="input", rules=RULES, texts=("a " * 32,) * 4096, whole=True)
LONG = Question(direction="input", rules=DEAR, texts=("212 555 0143 " * 2000,), whole=True)


@asynccontextmanager
async def _scanner() -> AsyncIterator[Scanner]:
    executor = ThreadPoolExecutor(1)
    try:
        async with asyncio.timeout(120):
            yield Scanner(executor)
    finally:
        executor.shutdown(cancel_futures=True)


async def test_short_text_of_another_tenant_is_looked_at_between_slices() -> None:
    """While one tenant has many seconds of work in the queue, another one's short texts take milliseconds."""
    async with _scanner() as scanner:
        hostile = [asyncio.create_task(scanner.scan("hostile", LONG, 60.0)) for _ in range(12)]
        await asyncio.sleep(0.2)
        for _ in range(10):
            began = time.monotonic()
            (looked,) = await scanner.scan("victim", SHORT, 30.0)
            assert [span.label for span in looked.spans] == ["EMAIL_ADDRESS"]
            assert time.monotonic() - began < 1.0
        assert not any(task.done() for task in hostile)
        for task in hostile:
            task.cancel()
        await asyncio.wait(hostile)


async def test_short_text_of_another_tenant_is_looked_at_between_many_short_ones() -> None:
    """A question of thousands of short texts is cut into slices, as one long text is."""
    async with _scanner() as scanner:
        hostile = asyncio.create_task(scanner.scan("hostile", MANY, 60.0))
        await asyncio.sleep(0)  # it has the thread
        assert await scanner.scan("victim", SHORT, 60.0)
        assert not hostile.done()
        assert len(await hostile) == 4096


async def test_tenant_fills_no_more_than_its_part_of_the_queue() -> None:
    """Beyond it that tenant is refused at once, and another one is not."""
    async with _scanner() as scanner:
        hostile = [asyncio.create_task(scanner.scan("hostile", LONG, 60.0)) for _ in range(1 + MAX_WAITING_OF_TENANT)]
        await asyncio.sleep(0.05)
        with pytest.raises(Refused) as refused:
            await scanner.scan("hostile", SHORT, 30.0)
        assert isinstance(refused.value.failure, Overloaded)
        assert await scanner.scan("victim", SHORT, 30.0)
        for task in hostile:
            task.cancel()
        await asyncio.wait(hostile)


async def test_looking_ends_with_the_time_of_whoever_asked() -> None:
    """The scan ends after its current step, so the thread is free for the next one."""
    async with _scanner() as scanner:
        with pytest.raises(Refused) as refused:
            await scanner.scan("a", LONG, 0.05)
        assert isinstance(refused.value.failure, DeadlineExceeded)
        began = time.monotonic()
        assert await scanner.scan("a", SHORT, 30.0)
        assert time.monotonic() - began < 1.0


async def test_slices_give_what_one_look_gives() -> None:
    """However often it is put aside, a text is looked at once, and whole."""
    async with _scanner() as scanner:
        text = "a@b.example and 4111 1111 1111 1111, " * 200
        question = Question(direction="input", rules=DEAR, texts=(text, "none"), whole=True)
        looked, none = await scanner.scan("a", question, 60.0)
        assert len(looked.spans) == 400
        assert none == Looked(decided=4)


async def test_loop_answers_while_a_text_is_looked_at() -> None:
    """Scans run off the event loop, and a header names their tenant."""
    tenants: list[str] = []
    gate = threading.Event()

    class Noting(Scanner):
        async def scan(self, tenant: str, question: Question, within_s: float) -> tuple[Looked, ...]:
            tenants.append(tenant)
            return await super().scan(tenant, question, within_s)

    executor = ThreadPoolExecutor(1)
    executor.submit(gate.wait)
    app = make_app(Meters(Page("filters")), Noting(executor))
    transport = httpx.ASGITransport(app=app)
    async with asyncio.timeout(60), httpx.AsyncClient(transport=transport, base_url="http://filters") as client:
        asking = asyncio.create_task(client.post(CHECK, content=encode(SHORT), headers={TENANT: "acme"}))
        assert (await client.get("/healthz")).status_code == 200
        late = await client.post(CHECK, content=encode(SHORT), headers={DEADLINE: "50"})
        assert late.status_code == 504
        gate.set()
        assert (await asking).status_code == 200
        assert sorted(tenants) == ["", "acme"]
    executor.shutdown()


@pytest.mark.parametrize("said", ["soon", "-1", "1.5"])
async def test_time_that_is_none_is_refused_by_name(said: str) -> None:
    """Whole milliseconds alone."""
    async with _scanner() as scanner:
        transport = httpx.ASGITransport(app=make_app(Meters(Page("filters")), scanner))
        async with httpx.AsyncClient(transport=transport, base_url="http://filters") as client:
            answer = await client.post(CHECK, content=encode(SHORT), headers={DEADLINE: said})
            assert (answer.status_code, answer.json()["param"]) == (400, DEADLINE)
