"""Counters of several queues: told in whatever order, they become the same; a new scale moves nobody before another."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.policy.ask import Ask
from activator.policy.bounds import UNBOUNDED
from activator.policy.crowd import Crowd
from activator.policy.fair import FairQueue
from activator.policy.turns import EVERY, LULL_S, PAUSE_S, Answer, Change, Question, SharedCounters, Turns

STEPS = st.lists(st.tuples(st.sampled_from(["give", "correct", "join"]), st.sampled_from("tu"), st.integers(0, 50)))


class Told:
    """Counters that two have in common, as the store keeps them for those in step."""

    def __init__(self) -> None:
        self.floor = 0.0
        self.values: dict[str, float] = {}

    def meet(self, one: SharedCounters[str], between: list[tuple[str, str, int]]) -> None:
        """It tells, does something more, and hears."""
        floor, rows = one.floor, one.rows(set("tu"))
        do(one, between)
        self.floor = max(self.floor, floor)
        for row in rows:
            known = self.values.get(row.key)
            change = Change(row.more, row.least)
            self.values[row.key] = max(row.own, self.floor) if known is None else change.of(known)
        one.heard({row.key: self.values[row.key] for row in rows}, self.floor, 0.0)


def do(counters: SharedCounters[str], steps: list[tuple[str, str, int]]) -> None:
    for step, key, amount in steps:
        match step:
            case "give":
                counters.give(key, amount)
            case "correct":
                counters.correct(key, -amount / 2)
            case _:
                counters.join(key)


@given(st.lists(st.tuples(st.booleans(), STEPS, STEPS), max_size=8))
def test_two_that_tell_all_have_the_same(rounds: list[tuple[bool, list[Any], list[Any]]]) -> None:
    """Whatever either does, before it tells or while the answer is on its way."""
    told, both = Told(), [SharedCounters[str](), SharedCounters[str]()]
    for one in both:
        do(one, [("join", "t", 0), ("join", "u", 0)])
        told.meet(one, [])
    for which, steps, between in rounds:
        do(both[which], steps)
        told.meet(both[which], between)
    for one in (*both, *both):
        told.meet(one, [])
    for key in "tu":
        assert both[0].of(key) == pytest.approx(both[1].of(key)) == pytest.approx(told.values[key])


def test_who_returns_is_where_the_others_are() -> None:
    """Also for the queue that knows it from before; without a lift that is told it would claim all that was."""
    told, one, other = Told(), SharedCounters[str](), SharedCounters[str]()
    for each in (one, other):
        do(each, [("join", "t", 0), ("join", "u", 0)])
        told.meet(each, [])
    do(one, [("give", "u", 500), ("give", "u", 500)])
    told.meet(one, [])
    do(one, [("join", "t", 0)])
    for each in (one, other):
        told.meet(each, [])
        assert [each.of(key) for key in "tu"] == [500.0, 1000.0]


@given(st.lists(st.tuples(st.booleans(), st.integers(-50, 50))), st.integers(0, 500))
def test_changes_compose(steps: list[tuple[bool, int]], begin: int) -> None:
    """What was noted does what was done."""
    change, value = Change(), float(begin)
    for is_lift, amount in steps:
        if is_lift:
            change.lift(10 * amount)
            value = max(value, 10 * amount)
        else:
            change.add(amount)
            value += amount
    assert change.of(begin) == pytest.approx(value)


def test_another_scale_moves_nobody_before_another() -> None:
    """Out of step, all are moved alike: those that were told of, those that were not, and what was done meanwhile."""
    queue: FairQueue[int] = FairQueue(Crowd(UNBOUNDED), UNBOUNDED, SharedCounters)
    turns = Turns()
    for number, tenant in enumerate("tuv"):
        queue.pass_by(Ask(tenant, 0, 10 * number + 1))
    queue.put(1, Ask("t", 0, 5), 0.0)
    asked = turns.ask(queue, 0.0)
    before = {name: (counters, dict(counters._given)) for name, counters, _ in queue.groups()}
    queue.take()
    turns.told(queue, asked, answer(asked, "e", 1000.0))
    counters, was = before["interactive"]
    assert {key: counters.of(key) - was[key] for key in "uv"} == {"u": 1000.0, "v": 1000.0}
    assert counters.of("t") == was["t"] + 1000.0 + 5
    assert isinstance(counters, SharedCounters)
    assert counters.floor == counters.of("t") - 5
    assert turns.ask(queue, 1.0).epoch == "e"


def answer(asked: Question, epoch: str, moved: float) -> Answer:
    """Of a store whose scale is that much higher, in which nobody is known."""
    groups = tuple((each.floor + moved, tuple(row.own + moved for row in each.rows)) for each in asked.groups)
    return Answer(epoch, groups)


def test_when_to_speak() -> None:
    """After so many requests, or a second; after a lull, or no answer, out of step; what was told is told once."""
    queue: FairQueue[int] = FairQueue(Crowd(UNBOUNDED), UNBOUNDED, SharedCounters)
    turns = Turns()
    queue.put(1, Ask("t", 0, 5), 0.0)
    assert turns.is_due(0.0)
    asked = turns.ask(queue, 0.0)
    turns.told(queue, asked, answer(asked, "e", 0.0))
    assert not turns.is_due(PAUSE_S / 2)
    turns.given = EVERY
    assert turns.is_due(PAUSE_S / 2)
    turns.given = 0
    assert turns.is_due(PAUSE_S)
    queue.take()
    again = turns.ask(queue, PAUSE_S)
    assert again.epoch == "e"
    assert [(row.key, row.more) for each in again.groups if each.name == "interactive" for row in each.rows] == [
        ("t", 5.0)
    ]
    turns.lost()
    assert turns.ask(queue, PAUSE_S).epoch == ""
    turns.told(queue, asked, answer(asked, "e", 0.0))
    last = turns.ask(queue, PAUSE_S + LULL_S)
    assert last.epoch == ""
    assert all(not each.rows for each in last.groups), "nobody waits, and nothing was done"


def test_counters_that_nobody_shares_note_nothing() -> None:
    """A queue of one activator has nothing to tell."""
    queue: FairQueue[int] = FairQueue(Crowd(UNBOUNDED))
    queue.put(1, Ask("t", 0, 5), 0.0)
    assert Turns().ask(queue, 0.0).groups == ()
    assert Change().least == -inf
