"""Backlogs: the work inside each version, and the reported concurrency of a model that scales by tokens."""

import asyncio
from dataclasses import dataclass

import pytest

from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.wait_estimate import MIN_ANSWERS, Throughput
from activator.routing.policy.version_key import VersionKey
from activator.scale_link.backlogs import MAX_REMEMBERED_VERSIONS, Backlogs
from activator.scale_link.load_reporter import LoadReporter
from tests.activator.scale_link.test_load_reporter import POSTED, FakeAutoscaler, M, N


@dataclass
class FakeRequest:
    """A request with an estimate of tokens."""

    queued_request: QueuedRequest | None
    computed_tokens: int = 0


def request_of(tokens: int) -> FakeRequest:
    return FakeRequest(QueuedRequest("t", 1, tokens))


def throughput_of(tokens_per_s: int = 10) -> Throughput:
    """Return a throughput measured at so many tokens per second of a slot."""
    throughput = Throughput()
    for second in range(MIN_ANSWERS):
        throughput.record_grant(second)
        throughput.record_release(second + 1, tokens_per_s, tokens_per_s)
    return throughput


class BacklogWorld:
    """Backlogs with settable settings, waiting requests and throughputs."""

    def __init__(self) -> None:
        self.backlog_s = {M: 10.0}
        self.waiting: dict[VersionKey, int] = {}
        self.paces: dict[VersionKey, Throughput] = {M: throughput_of(), N: throughput_of()}
        self.it = Backlogs(
            lambda key: self.backlog_s.get(key, 0.0), lambda key: self.waiting.get(key, 0), self.paces.get
        )


def test_concurrency_is_weighted_for_models_that_ask_for_it() -> None:
    """A model with a backlog setting is weighted by its remaining tokens. Another one is reported by requests."""
    backlog_world = BacklogWorld()
    works = [request_of(1000), request_of(500)]
    for key in (M, N):
        for work in works:
            backlog_world.it.add(key, work)
    assert backlog_world.it.weigh(M, 2.0) == 15.0
    assert backlog_world.it.weigh(N, 2.0) == 2.0
    works[0].computed_tokens = 400
    assert backlog_world.it.weigh(M, 2.0) == 11.0
    backlog_world.it.remove(M, works[0])
    backlog_world.it.check_integrity()
    assert backlog_world.it.weigh(M, 2.0) == 5.0
    backlog_world.it.remove(M, works[1])
    backlog_world.it.check_integrity()
    assert backlog_world.it.weigh(M, 0.5) == 0.5
    backlog_world.waiting[M] = 1
    assert backlog_world.it.weigh(M, 0.5) == 1.0
    backlog_world.backlog_s.clear()
    assert backlog_world.it.weigh(M, 0.5) == 0.5, "a setting counts at once, both ways"


def test_throughput_is_remembered_at_zero_replicas() -> None:
    """A version that starts from zero uses its last throughput. One that was never measured is reported by requests."""
    backlog_world = BacklogWorld()
    backlog_world.backlog_s[N] = 10.0
    work = request_of(1000)
    backlog_world.it.add(M, work)
    backlog_world.it.add(N, work)
    assert backlog_world.it.weigh(M, 1.0) == 10.0
    backlog_world.paces.clear()
    assert backlog_world.it.weigh(M, 1.0) == 10.0
    assert backlog_world.it.weigh(N, 1.0) == 1.0
    backlog_world.paces[M] = Throughput()
    assert backlog_world.it.weigh(M, 1.0) == 10.0, "its first answers tell nothing yet"


def test_what_is_remembered_is_bounded() -> None:
    """The version measured least recently is forgotten first."""
    here = Backlogs(lambda _: 10.0, lambda _: 0, lambda key: None if key.version == "old" else throughput_of())
    first = VersionKey("t", "m", "0")
    for number in range(MAX_REMEMBERED_VERSIONS + 1):
        here.weigh(VersionKey("t", "m", str(number)), 1.0)
    here.check_integrity()
    assert first not in here._measured


@pytest.mark.virtual_time
async def test_weighted_report_subtracts_announcements() -> None:
    """The first request is announced at once. The next report is less by the announcement, then comes a zero."""
    autoscaler, backlog_world = FakeAutoscaler(POSTED), BacklogWorld()
    reporter = LoadReporter(autoscaler, backlog_world.it, clock=asyncio.get_running_loop().time)
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0.5)
    work = request_of(1000)
    reporter.begin_request(M, lambda key: False, work)
    await asyncio.sleep(1.0)
    work.computed_tokens = 500
    await asyncio.sleep(1.0)
    reporter.end_request(M, work)
    await asyncio.sleep(3.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    backlog_world.it.check_integrity()
    assert autoscaler.received == [
        (0.5, "m", 1.0, 1), (1.0, "m", 9.0, 0), (2.0, "m", 5.0, 0), (3.0, "m", 0.5, 0), (4.0, "m", 0.0, 0),
    ]  # fmt: skip


def test_control_request_count_alone_is_not_weighted() -> None:
    """Negative control: counting requests only reports no more than their number."""
    backlog_world = BacklogWorld()
    assert backlog_world.it.weigh(M, 1.0) == pytest.approx(1.0)
