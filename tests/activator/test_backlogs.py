"""What is inside of each version, and what is reported of it for a model that scales by tokens."""

import asyncio
from dataclasses import dataclass

import pytest

from activator.backlogs import KEPT, Backlogs
from activator.keys import VersionKey
from activator.policy.ask import Ask
from activator.policy.expected import LEAST, Pace
from activator.reporter import Reporter
from tests.activator.test_reporter import ALONE, Decider, M, N


@dataclass
class Asked:
    """A request of so many tokens."""

    ask: Ask | None
    computed_tokens: int = 0


def asked(tokens: int) -> Asked:
    return Asked(Ask("t", 1, tokens))


def paced(tokens_per_s: int = 10) -> Pace:
    """A slot that was measured to compute so many."""
    pace = Pace()
    for second in range(LEAST):
        pace.took(second)
        pace.came_back(second + 1, tokens_per_s, tokens_per_s)
    return pace


class Place:
    """What backlogs ask for."""

    def __init__(self) -> None:
        self.backlog_s = {M: 10.0}
        self.waiting: dict[VersionKey, int] = {}
        self.paces: dict[VersionKey, Pace] = {M: paced(), N: paced()}
        self.it = Backlogs(
            lambda key: self.backlog_s.get(key, 0.0), lambda key: self.waiting.get(key, 0), self.paces.get
        )


def test_of_one_model() -> None:
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


def test_a_pace_is_remembered_at_zero() -> None:
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
    place.paces[M] = Pace()
    assert place.it.weigh(M, 1.0) == 10.0, "its first answers tell nothing yet"


def test_what_is_remembered_is_bounded() -> None:
    """Who was measured last is known longest."""
    here = Backlogs(lambda _: 10.0, lambda _: 0, lambda key: None if key.version == "old" else paced())
    first = VersionKey("t", "m", "0")
    for number in range(KEPT + 1):
        here.weigh(VersionKey("t", "m", str(number)), 1.0)
    here.check_integrity()
    assert first not in here._measured


@pytest.mark.virtual_time
async def test_it_is_in_the_report_and_what_was_announced_is_taken_off() -> None:
    """The first request is told at once, the next report is less by it, whatever it is weighed as; then a zero."""
    decider, place = Decider(ALONE), Place()
    reporter = Reporter(decider, place.it, clock=asyncio.get_running_loop().time)
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0.5)
    work = asked(1000)
    reporter.began(M, lambda key: False, work)
    await asyncio.sleep(1.0)
    work.computed_tokens = 500
    await asyncio.sleep(1.0)
    reporter.ended(M, work)
    await asyncio.sleep(3.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    place.it.check_integrity()
    assert decider.told == [
        (0.5, "m", 1.0, 1), (1.0, "m", 9.0, 0), (2.0, "m", 5.0, 0), (3.0, "m", 0.5, 0), (4.0, "m", 0.0, 0),
    ]  # fmt: skip


def test_without_what_is_inside_nothing_is_weighed() -> None:
    """The control: one who only counts requests reports no more than those."""
    place = Place()
    assert place.it.weigh(M, 1.0) == pytest.approx(1.0)
