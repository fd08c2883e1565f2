"""Ten times the capacity: goodput stays at its peak, the queue is bounded, and requests are shed in order. The
product's throttler, queue and shedding run in virtual time.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import pytest

from activator.queue.load_shedding import LoadShedder
from activator.queue.policy import shed_decision
from activator.queue.policy.queued_request import PriorityClass, QueuedRequest
from activator.queue.throttler import Throttler
from activator.queue.version_queue import next_waiter
from kelvin.contracts.deadline import Deadline
from kelvin.contracts.errors import Refused
from tests.activator.control import replica_row
from tests.activator.queue.slot_world import KEY, SlotWorld, queue_limits
from tests.virtual_loop import run_virtually

SLOTS = 16
TOKENS_PER_S = 100.0  # of a slot
TOKENS = 100  # of a request, on average
LASTS_S = 30.0
WAITING = 256  # sixteen seconds of work


Size = Callable[[random.Random], tuple[int, float]]  # estimated tokens of a request, and seconds that it takes


@dataclass(frozen=True)
class Kind:
    """A tenant's requests: class, share of the capacity, and `rest`, the share of the load beyond the capacity."""

    tenant: str
    priority_class: PriorityClass
    share: float
    rest: float
    patience_s: float = 8.0


KINDS = (
    Kind("paid", PriorityClass.INTERACTIVE, 0.3, 0.0),
    Kind("free", PriorityClass.STANDARD, 0.2, 0.2),
    Kind("hog", PriorityClass.INTERACTIVE, 0.2, 0.4),
    Kind("bulk", PriorityClass.BATCH, 0.3, 0.4, patience_s=60.0),
)


@dataclass
class Outcomes:
    """Outcomes by tenant."""

    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    good_tokens: float = 0.0  # while requests still arrive
    is_flooded: bool = True
    most_waiting: int = 0

    def part(self, tenant: str, outcome: str) -> float:
        """Return the part of the tenant's requests with this outcome."""
        return self.ended[tenant, outcome] / self.sent[tenant]


def _exactly(rng: random.Random) -> tuple[int, float]:
    """Return an exact estimate of tokens, and the seconds."""
    tokens = rng.randrange(TOKENS // 2, TOKENS * 3 // 2)
    return tokens, tokens / TOKENS_PER_S


def _at_most(rng: random.Random) -> tuple[int, float]:
    """Return the upper bound of tokens, equal for all, and the seconds. Most are short, some are long."""
    return 10 * TOKENS, min(5.0, rng.expovariate(TOKENS_PER_S / TOKENS))


SIZES = [pytest.param(_exactly, id="exact estimates"), pytest.param(_at_most, id="upper bounds only")]


async def _send(throttler: Throttler, kind: Kind, tokens: int, takes_s: float, outcomes: Outcomes) -> None:
    """Send one request. Its deadline ends it in the queue or while it runs."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + kind.patience_s
    outcomes.sent[kind.tenant] += 1
    outcome = "late"
    try:
        async with asyncio.timeout_at(deadline_s):
            async with throttler.slot(
                KEY, QueuedRequest(kind.tenant, 10, tokens, kind.priority_class), Deadline(deadline_s)
            ):
                await asyncio.sleep(takes_s)
        outcome = "good"
        outcomes.good_tokens += takes_s * TOKENS_PER_S if outcomes.is_flooded else 0
    except Refused as refused:
        outcome = refused.failure.code
    except TimeoutError:
        pass
    outcomes.ended[kind.tenant, outcome] += 1


async def _flooded(times: float, size: Size) -> Outcomes:
    """Let requests arrive at random for half a minute at so many times the capacity. Return when all have ended."""
    loop, outcomes, rng = asyncio.get_running_loop(), Outcomes(), random.Random(7)
    await asyncio.sleep(1000.0)  # a machine's clock doesn't begin when an activator does
    rows = (replica_row(name, SLOTS // 2) for name in "ab")
    throttler = SlotWorld(*rows, limits=queue_limits(version=WAITING, wait_s=600.0), draw=rng.randrange).throttler
    rates = [kind.share + kind.rest * (times - 1) for kind in KINDS]
    until_s = loop.time() + LASTS_S
    async with asyncio.TaskGroup() as group:
        while loop.time() < until_s:
            await asyncio.sleep(rng.expovariate(times * SLOTS * TOKENS_PER_S / TOKENS))
            kind = rng.choices(KINDS, rates)[0]
            group.create_task(_send(throttler, kind, *size(rng), outcomes))
            outcomes.most_waiting = max(outcomes.most_waiting, throttler.usage_by_tenant.total.entries)
        outcomes.is_flooded = False
    throttler.check_integrity()
    assert throttler.usage_by_tenant.total.entries == 0
    return outcomes


def _run(times: float, size: Size = _exactly) -> Outcomes:
    return run_virtually(_flooded(times, size))


@cache
def _peak(size: Size = _exactly) -> float:
    """Return the goodput at about the capacity."""
    return max(_run(times, size).good_tokens for times in (1.0, 1.5, 2.0))


@pytest.mark.parametrize("size", SIZES)
def test_goodput_keeps_its_peak(size: Size) -> None:
    """At ten times the load it is at least 95 % of the peak. The paying tenant, at a third of the capacity, is served,
    batch is shed first, and the queue stays within its limit.
    """
    outcomes = _run(10.0, size)
    assert outcomes.good_tokens >= 0.95 * _peak(size)
    assert outcomes.part("paid", "good") >= 0.98
    assert outcomes.part("bulk", "good") < min(outcomes.part("hog", "good"), outcomes.part("free", "good"))
    assert outcomes.part("bulk", "displaced") > 0 < outcomes.part("hog", "over_share")
    assert outcomes.most_waiting == WAITING


def test_control_without_deadline_checks_goodput_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: slots go to requests that end too late."""
    monkeypatch.setattr(Throttler, "_check_time", lambda *_: None)
    monkeypatch.setattr(LoadShedder, "sweep", lambda *_: None)
    monkeypatch.setattr(LoadShedder, "next_waiter_in_time", lambda shedding, line, now: next_waiter(line))
    peak = _peak()
    assert _run(10.0).good_tokens < 0.9 * peak


def test_control_without_margin_goodput_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: each request gets its slot at the last possible moment."""
    peak = _peak(_at_most)
    monkeypatch.setattr(shed_decision, "MARGIN", 1.0)
    assert _run(10.0, _at_most).good_tokens < 0.9 * peak


def test_control_without_shed_order_interactive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a full queue refuses every newcomer."""
    monkeypatch.setattr(LoadShedder, "try_enter", lambda *_: False)
    assert _run(10.0).part("paid", "overloaded") > 0.2
