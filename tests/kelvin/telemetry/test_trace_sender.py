"""Sending traces never delays the process. A failing or hanging collector loses only its traces, counted."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kelvin.contracts.timeline import Stage, Stamp
from kelvin.telemetry import trace_sender as module
from kelvin.telemetry.otlp import OtlpCollector
from kelvin.telemetry.policy.spans import RequestFacts
from kelvin.telemetry.trace_sender import QUEUE_LIMIT, TraceFacts, TraceSender
from tests.eventually import wait


def facts(number: int = 0, **fields: Any) -> RequestFacts:
    """Return the facts of a successful request."""
    known: dict[str, Any] = {
        "request_id": f"req_{number}", "caller": None, "tenant": "t", "model": "m", "version": None,
        "runtime_id": None, "cold": False, "outcome": "ok", "status": 200, "prompt_tokens": 1, "cached_tokens": 0,
        "completion_tokens": 1, "began_at_us": 1, "stamps": (Stamp(Stage.DONE, 5),),
    }  # fmt: skip
    return RequestFacts(**(known | fields))


class FakeCollector(OtlpCollector):
    """A collector that opens no connection, and accepts, refuses, raises or hangs."""

    def __init__(self, answer: Callable[[], bool] = lambda: True) -> None:
        self.answer = answer
        self.batches: list[Sequence[TraceFacts]] = []
        self.closed = threading.Event()

    def export(self, batch: Sequence[TraceFacts]) -> bool:
        self.batches.append(batch)
        return self.answer()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the poll interval."""
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)


def started(collector: FakeCollector, clock: Callable[[], float] = lambda: 0.0) -> TraceSender:
    """Return a started sender to `collector`."""
    sender = TraceSender(lambda: collector, clock=clock)
    sender.start()
    return sender


async def test_offered_traces_arrive_once_and_in_order() -> None:
    """Traces that wait at the close are sent too."""
    collector = FakeCollector()
    sender = started(collector)
    for number in range(50):
        sender.offer(facts(number))
    assert await sender.close(10)
    assert [fact.request_id for batch in collector.batches for fact in batch] == [f"req_{n}" for n in range(50)]  # type: ignore[union-attr]
    assert (sender.sent, sender.dropped, sender.lost) == (50, 0, 0)
    assert collector.closed.is_set()


async def test_traces_without_a_collector_are_lost() -> None:
    """If the collector can't be created, as without its library, all traces are counted as lost."""

    def fail() -> OtlpCollector:
        raise ImportError

    sender = TraceSender(fail, clock=lambda: 0.0)
    sender.offer(facts(0))
    sender.start()
    assert await sender.close(10)
    sender.offer(facts(1))
    assert (sender.sent, sender.dropped, sender.lost) == (0, 0, 2)


async def test_a_collector_that_hangs_costs_nothing() -> None:
    """Offering never waits, a full queue drops and counts, and the close waits only for its limit."""
    hold = threading.Event()
    collector = FakeCollector(hold.wait)
    ticks = iter(range(10**9))
    sender = started(collector, lambda: float(next(ticks)))
    sender.offer(facts())
    wait(lambda: collector.batches, "the thread hangs")
    for number in range(QUEUE_LIMIT + 100):
        sender.offer(facts(number))
    assert sender.dropped == 100
    assert not await sender.close(0.05)
    assert collector.closed.is_set()
    hold.set()


async def test_refusing_collector_is_logged_less_and_less(caplog: pytest.LogCaptureFixture) -> None:
    """Refused traces are counted. The 1st, 2nd, 4th, ... refusal is logged."""
    collector = FakeCollector(lambda: False)
    sender = started(collector)
    for number in range(16 * 5):
        sender.offer(facts(number))
    assert await sender.close(10)
    assert (sender.sent, sender.lost) == (0, 80)
    failure_counts = [record.failures for record in caplog.records if record.message.startswith("the collector")]  # type: ignore[attr-defined]
    assert failure_counts == [number for number in (1, 2, 4, 8) if number <= len(collector.batches)]


async def test_a_defect_of_one_batch_is_not_the_next_ones(caplog: pytest.LogCaptureFixture) -> None:
    """The batch is logged and counted as lost. The next one is sent."""
    defects = iter([RuntimeError("a defect")])

    def answer() -> bool:
        for defect in defects:
            raise defect
        return True

    collector = FakeCollector(answer)
    sender = started(collector)
    sender.offer(facts())
    wait(lambda: sender.lost, "the first batch is lost")
    sender.offer(facts())
    assert await sender.close(10)
    assert (sender.sent, sender.lost) == (1, 1)
    assert "a defect" in caplog.text


async def test_missing_collector_ends_sending_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged. Offering and closing still work."""

    def make() -> FakeCollector:
        raise RuntimeError("a defect")

    sender = TraceSender(make, clock=lambda: 0.0)
    sender.start()
    sender.offer(facts())
    assert await sender.close(10)
    assert "telemetry ends; nothing more is sent" in caplog.text


def test_trace_rate_is_limited() -> None:
    """Of a flood of errors, only a burst and then a fixed number per second are kept."""
    now = [0.0]
    sender = TraceSender(FakeCollector, clock=lambda: now[0])
    for number in range(1000):
        sender.offer(facts(number))
    assert sender.dropped == 1000 - module.BURST
    now[0] = 1.0
    for number in range(1000):
        sender.offer(facts(number))
    assert sender.dropped == 2000 - module.BURST - module.TRACES_PER_S
