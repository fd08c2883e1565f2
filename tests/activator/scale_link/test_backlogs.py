"""What is inside of each version, and what is reported of it for a model that scales by tokens."""

import asyncio
from dataclasses import dataclass

import pytest

from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.wait_estimate import MIN_ANSWERS, Throughput
from activator.routing.policy.version_key import VersionKey
from activator.scale_link.backlogs import MAX_REMEMBERED_VERSIONS, Backlogs
from activator.scale_link.load_reporter import LoadReporter
from tests.activator.scale_link.test_load_reporter import ALONE, Decider, M, N


@dataclass
class Asked:
    """A request of so many tokens."""

    queued_request: QueuedRequest | None
    computed_tokens: int = 0


def asked(tokens: int) -> Asked:
    return Asked(QueuedRequest("t", 1, tokens))


def paced(tokens_per_s: int = 10) -> Throughput:
    """A slot that was measured to compute so many."""
    throughput = Throughput()
    for second in range(MIN_ANSWERS):
        throughput.record_grant(second)
        throughput.record_release(second + 1, tokens_per_s, tokens_per_s)
    return throughput


class Place:
    """What backlogs ask for."""

    def __init__(self) -> None:
        self.backlog_s = {M: 10.0}
        self.waiting: dict[VersionKey, int] = {}
        self.paces: dict[VersionKey, Throughput] = {M: paced(), N: paced()}
        self.it = Backlogs(
            lambda key: self.backlog_s.get(key, 0.0), lambda key: self.waiting.get(key, 0), self.paces.get
        )


def test_concurrency_is_weighted_for_models_that_ask_for_it() -> None:
    """By tokens where its model says so, by what is left of what is inside; another is as it was."""
    place = Place()
    works = [asked(1000), asked(500)]
    for key in (M, N):
        for work in works:
            place.it.enter(key, work)
    assert place.it.weigh(M, 2.0) == 15.0
    assert place.it.weigh(N, 2.0) == 2.0
    works[0].computed_tokens = 400
    assert place.it.weigh(M, 2.0) == 11.0
    place.it.leave(M, works[0])
    place.it.check_integrity()
    assert place.it.weigh(M, 2.0) == 5.0
    place.it.leave(M, works[1])
    place.it.check_integrity()
    assert place.it.weigh(M, 0.5) == 0.5
    place.waiting[M] = 1
    assert place.it.weigh(M, 0.5) == 1.0
    place.backlog_s.clear()
    assert place.it.weigh(M, 0.5) == 0.5, "a setting counts at once, both ways"


def test_throughput_is_remembered_at_zero_replicas() -> None:
    """Of a version that comes from there nothing is measured yet; one that never was is reported by its requests."""
    place = Place()
    place.backlog_s[N] = 10.0
    work = asked(1000)
    place.it.enter(M, work)
    place.it.enter(N, work)
    assert place.it.weigh(M, 1.0) == 10.0
    place.paces.clear()
    assert place.it.weigh(M, 1.0) == 10.0
    assert place.it.weigh(N, 1.0) == 1.0
    place.paces[M] = Throughput()
    assert place.it.weigh(M, 1.0) == 10.0, "its first answers tell nothing yet"


def test_what_is_remembered_is_bounded() -> None:
    """Who was measured last is known longest."""
    here = Backlogs(lambda _: 10.0, lambda _: 0, lambda key: None if key.version == "old" else paced())
    first = VersionKey("t", "m", "0")
    for number in range(MAX_REMEMBERED_VERSIONS + 1):
        here.weigh(VersionKey("t", "m", str(number)), 1.0)
    here.check_integrity()
    assert first not in here._measured


@pytest.mark.virtual_time
async def test_weighted_report_subtracts_announcements() -> None:
    """The first request is told at once, the next report is less by it, whatever it is weighed as; then a zero."""
    decider, place = Decider(ALONE), Place()
    reporter = LoadReporter(decider, place.it, clock=asyncio.get_running_loop().time)
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0.5)
    work = asked(1000)
    reporter.begin_request(M, lambda key: False, work)
    await asyncio.sleep(1.0)
    work.computed_tokens = 500
    await asyncio.sleep(1.0)
    reporter.end_request(M, work)
    await asyncio.sleep(3.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    place.it.check_integrity()
    assert decider.told == [
        (0.5, "m", 1.0, 1), (1.0, "m", 9.0, 0), (2.0, "m", 5.0, 0), (3.0, "m", 0.5, 0), (4.0, "m", 0.0, 0),
    ]  # fmt: skip


def test_control_request_count_alone_is_not_weighted() -> None:
    """The control: one who only counts requests reports no more than those."""
    place = Place()
    assert place.it.weigh(M, 1.0) == pytest.approx(1.0)
