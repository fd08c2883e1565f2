"""The filter's scanning thread is shared by tenants in slices. An abandoned scan ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from kelvin.contracts.artifacts.filter_api import (
    CHECK_PATH,
    DEADLINE_HEADER,
    ENTITIES,
    TENANT_HEADER,
    Action,
    FilterRequest,
    FilterRule,
    TextResult,
)
from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded
from kelvin.contracts.wire import encode
from kelvin.filters.app import FilterMetrics, make_app
from kelvin.filters.scanner import MAX_WAITING_OF_TENANT, Scanner
from kelvin.telemetry.policy.instruments import MetricsPage
from tests.eventually import eventually

RULES = (FilterRule(filter="pii", actions={"EMAIL_ADDRESS": "redact"}),)
REGIONS = ("US", "DE", "FR", "GB", "IT", "ES", "NL", "BE", "AT", "CH", "SE", "NO", "DK", "PL", "PT", "IE")
ALL: dict[str, Action] = dict.fromkeys(ENTITIES, "redact")
SLOW_RULES = (FilterRule(filter="pii", actions=ALL, phone_regions=REGIONS),)  # about 70 ms per thousand digits
SHORT = FilterRequest(direction="input", rules=RULES, texts=("to a@b.example",), whole=True)
# As many texts as a request has messages, each too short for a slice of its own.
MANY = FilterRequest(direction="input", rules=RULES, texts=("a " * 32,) * 4096, whole=True)
LONG = FilterRequest(direction="input", rules=SLOW_RULES, texts=("212 555 0143 " * 2000,), whole=True)


OWN_SLICES = 4  # the most slices that SHORT takes, one per step


class Thread(ThreadPoolExecutor):
    """The scanning thread, which counts its slices."""

    def __init__(self) -> None:
        super().__init__(1)
        self.slices = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.slices += 1
        return super().submit(fn, *args, **kwargs)


@asynccontextmanager
async def _scanning() -> AsyncIterator[tuple[Scanner, Thread]]:
    thread = Thread()
    try:
        async with asyncio.timeout(120):
            yield Scanner(thread), thread
    finally:
        thread.shutdown(cancel_futures=True)


async def test_short_text_of_another_tenant_is_scanned_between_slices() -> None:
    """While one tenant has seconds of work queued, each slice of another tenant waits for one slice of it."""
    async with _scanning() as (scanner, thread):
        hostile = [asyncio.create_task(scanner.scan("hostile", LONG, 60.0)) for _ in range(12)]
        await eventually(lambda: thread.slices > len(hostile))
        for _ in range(10):
            before = thread.slices
            (looked,) = await scanner.scan("victim", SHORT, 60.0)
            assert [span.label for span in looked.spans] == ["EMAIL_ADDRESS"]
            assert thread.slices - before <= 2 * OWN_SLICES < len(hostile)
        assert not any(task.done() for task in hostile)
        for task in hostile:
            task.cancel()
        await asyncio.wait(hostile)


async def test_short_text_is_scanned_between_many_of_another_tenant() -> None:
    """A request of thousands of short texts is cut into slices, like one long text."""
    async with _scanning() as (scanner, _):
        hostile = asyncio.create_task(scanner.scan("hostile", MANY, 60.0))
        await asyncio.sleep(0)  # lets it take the thread
        assert await scanner.scan("victim", SHORT, 60.0)
        assert not hostile.done()
        assert len(await hostile) == 4096


async def test_tenant_fills_no_more_than_its_part_of_the_queue() -> None:
    """Above its share, the tenant is refused at once. Other tenants are not."""
    async with _scanning() as (scanner, _):
        hostile = [asyncio.create_task(scanner.scan("hostile", LONG, 60.0)) for _ in range(1 + MAX_WAITING_OF_TENANT)]
        await asyncio.sleep(0)  # lets them enter the queue
        with pytest.raises(Refused) as refused:
            await scanner.scan("hostile", SHORT, 30.0)
        assert isinstance(refused.value.failure, Overloaded)
        assert await scanner.scan("victim", SHORT, 30.0)
        for task in hostile:
            task.cancel()
        await asyncio.wait(hostile)


async def test_scan_ends_at_the_callers_deadline() -> None:
    """The scan ends after its current step, which frees the thread for the next one."""
    async with _scanning() as (scanner, thread):
        with pytest.raises(Refused) as refused:
            await scanner.scan("a", LONG, 0.05)
        assert isinstance(refused.value.failure, DeadlineExceeded)
        before = thread.slices
        assert await scanner.scan("a", SHORT, 60.0)
        assert thread.slices - before <= OWN_SLICES


async def test_sliced_scan_equals_whole_scan() -> None:
    """A text that is scanned in slices is scanned once and completely."""
    async with _scanning() as (scanner, _):
        text = "a@b.example and 4111 1111 1111 1111, " * 200
        question = FilterRequest(direction="input", rules=SLOW_RULES, texts=(text, "none"), whole=True)
        looked, none = await scanner.scan("a", question, 60.0)
        assert len(looked.spans) == 400
        assert none == TextResult(decided=4)


async def test_loop_answers_during_a_scan() -> None:
    """Scans run outside the event loop. A header names the tenant."""
    tenants: list[str] = []
    gate = threading.Event()

    class Noting(Scanner):
        async def scan(self, tenant: str, question: FilterRequest, within_s: float) -> tuple[TextResult, ...]:
            tenants.append(tenant)
            return await super().scan(tenant, question, within_s)

    executor = ThreadPoolExecutor(1)
    executor.submit(gate.wait)
    app = make_app(FilterMetrics(MetricsPage("filters")), Noting(executor))
    transport = httpx.ASGITransport(app=app)
    async with asyncio.timeout(60), httpx.AsyncClient(transport=transport, base_url="http://filters") as client:
        asking = asyncio.create_task(client.post(CHECK_PATH, content=encode(SHORT), headers={TENANT_HEADER: "acme"}))
        assert (await client.get("/healthz")).status_code == 200
        late = await client.post(CHECK_PATH, content=encode(SHORT), headers={DEADLINE_HEADER: "50"})
        assert late.status_code == 504
        gate.set()
        assert (await asking).status_code == 200
        assert sorted(tenants) == ["", "acme"]
    executor.shutdown()


@pytest.mark.parametrize("deadline", ["soon", "-1", "1.5"])
async def test_invalid_deadline_is_refused_by_name(deadline: str) -> None:
    """A deadline must be whole milliseconds."""
    async with _scanning() as (scanner, _):
        transport = httpx.ASGITransport(app=make_app(FilterMetrics(MetricsPage("filters")), scanner))
        async with httpx.AsyncClient(transport=transport, base_url="http://filters") as client:
            answer = await client.post(CHECK_PATH, content=encode(SHORT), headers={DEADLINE_HEADER: deadline})
            assert (answer.status_code, answer.json()["param"]) == (400, DEADLINE_HEADER)
