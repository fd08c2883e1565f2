"""Shedding: which queued requests are displaced by a newcomer, and which can't meet their deadline. Queue limits hold,
and no request is shed twice.
"""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activator.queue.policy import shed_decision, shed_order
from activator.queue.policy.admission import QueueLimits
from activator.queue.policy.queue_bounds import UNBOUNDED, QueueLimit
from activator.queue.policy.queued_request import PriorityClass, QueuedRequest
from activator.queue.policy.shed_decision import (
    MAX_DISPLACED,
    completion_time_s,
    find_late_requests,
    required_time_s,
    try_enter,
)
from activator.queue.policy.shed_order import ShedClass, ShedOrder
from activator.queue.policy.tenant_fair_queue import FairQueue, QueueEntry
from activator.queue.policy.wait_estimate import MIN_ANSWERS, Throughput
from tests.activator.queue.policy.test_tenant_fair_queue import taken

F, S, B = PriorityClass.INTERACTIVE, PriorityClass.STANDARD, PriorityClass.BATCH
LIMITS = QueueLimits(QueueLimit(3, 100, 100), QueueLimit(3, 100, 100), QueueLimit(4, 150, 150), 60.0)


class Queues:
    """The queues of two versions with a shared limit. Entries are numbers."""

    def __init__(self, limits: QueueLimits = LIMITS) -> None:
        self.limits = limits
        self.shared_shed_order: ShedOrder[QueueEntry[int]] = ShedOrder(limits.total)
        self.queues = [FairQueue[int](self.shared_shed_order, limits.per_version) for _ in range(2)]
        self.next = 0

    def enter(self, ask: QueuedRequest, which: int = 0, deadline_s: float = 0.0) -> list[tuple[ShedClass, int]] | None:
        """Add a request. Return the displaced entries and why, or None if it was refused."""
        number, self.next = self.next, self.next + 1
        out = try_enter(self.queues[which], number, ask, deadline_s, self.limits)
        return None if out is None else [(shed_class, place.entry) for shed_class, place in out]

    def waiting(self) -> list[set[int]]:
        """Return the queued entries of each queue."""
        return [{place.entry for places in queue.entries_by_backlog() for place in places} for queue in self.queues]

    def check(self) -> None:
        for queue in self.queues:
            queue.check_integrity()
            assert not queue.queue_usage.is_over(self.limits.per_version)
        assert not self.shared_shed_order.usage_by_tenant.total.is_over(self.limits.total)
        for tenant in "tuv":
            assert not self.shared_shed_order.usage_by_tenant.usage_of(tenant).is_over(self.limits.per_tenant)


def ask(tenant: str = "t", priority_class: PriorityClass = F, *, tokens: int = 1) -> QueuedRequest:
    return QueuedRequest(tenant, 1, tokens, priority_class)


@pytest.mark.parametrize(
    ("before", "comes", "which", "want"),
    [
        pytest.param([], ask(), 0, [], id="there is room"),
        pytest.param([ask(), ask("u"), ask("v")], ask(), 0, None, id="an equal newcomer is refused"),
        pytest.param([ask(), ask("u", B), ask("v")], ask("v"), 0, [(ShedClass.BATCH, 1)], id="batch makes way"),
        pytest.param([ask(), ask("u", B), ask("v")], ask("v", S), 0, [(ShedClass.BATCH, 1)], id="also for standard"),
        pytest.param([ask(), ask("u", S), ask("v")], ask("v", B), 0, None, id="batch displaces no request"),
        pytest.param([ask(), ask("t", S), ask()], ask(), 0, [(ShedClass.STANDARD, 1)],
                     id="a tenant's own standard request"),
        pytest.param([ask(), ask(), ask()], ask("u"), 0, [(ShedClass.OVER, 2)], id="the largest tenant makes way"),
        pytest.param([ask(), ask(), ask("u")], ask("u"), 0, None, id="a fair share is not displaced"),
        pytest.param([ask(tokens=50), ask("u", tokens=50)], ask("v", tokens=90), 0, None, id="a large newcomer"),
        pytest.param(
            [ask("t", B, tokens=40), ask("t", B, tokens=40)], ask("v", tokens=90), 0,
            [(ShedClass.BATCH, 1), (ShedClass.BATCH, 0)], id="several make way for one",
        ),
        pytest.param([], ask(tokens=101), 0, None, id="too large for an empty queue"),
        pytest.param([ask("u", B, tokens=99)], ask(tokens=101), 0, None, id="too large: none is shed"),
        pytest.param(
            [ask("u", B, tokens=99), ask("v")], ask("v", tokens=101), 1, None, id="too large: none is shed elsewhere"
        ),
    ],
)  # fmt: skip
def test_full_queue_sheds_lower_requests(
    before: Sequence[QueuedRequest], comes: QueuedRequest, which: int, want: list[tuple[ShedClass, int]] | None
) -> None:
    """A version's queue holds three requests, all queues together four. None: the newcomer is refused and the queue is
    unchanged.
    """
    queues = Queues()
    for each in before:
        assert queues.enter(each) == []
    queued_before = queues.waiting()
    assert queues.enter(comes, which) == want
    if want is None:
        assert queues.waiting() == queued_before
    queues.check()


def test_full_installation_sheds_from_another_version() -> None:
    """Four requests wait for two versions. The lowest of them waits for the other version."""
    queues = Queues()
    for which, each in ((0, ask("t")), (1, ask("u", B)), (1, ask("u")), (0, ask("v"))):
        assert queues.enter(each, which) == []
    assert queues.enter(ask("v"), 0) == [(ShedClass.BATCH, 1)]
    queues.check()


def test_failed_entry_restores_the_queue() -> None:
    """Seventeen requests would have to be shed for one, so none is, and the service order is unchanged."""
    queues = Queues(QueueLimits(QueueLimit(50, 1000, 100), UNBOUNDED, UNBOUNDED, 60.0))
    for number in range(50):
        assert queues.enter(ask("t", B, tokens=2), 0, float(number)) == []
    assert queues.enter(ask("u", tokens=2 * MAX_DISPLACED + 1)) is None
    queues.check()
    assert [taken(queues.queues[0])[0] for _ in range(len(queues.queues[0]))] == list(range(50))
    for number in range(50):
        assert queues.enter(ask("t", B, tokens=2), 0, float(number)) == []
    assert len(queues.enter(ask("u", tokens=2 * MAX_DISPLACED)) or ()) == MAX_DISPLACED


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "enter", "take", "leave"]), st.integers(0, 1), st.sampled_from("tuv"),
        st.sampled_from(list(PriorityClass)), st.integers(1, 110), st.integers(0, 20),
    ),
    max_size=60,
)  # fmt: skip


@given(STEPS)
def test_bounds_hold_and_nobody_is_shed_twice(
    steps: list[tuple[str, int, str, PriorityClass, int, int]],
) -> None:
    """Each newcomer waits or is refused. Each queued request leaves once: served, cancelled or shed. A request with a
    slot is never shed. No request is shed for a lower one of the same tenant.
    """
    queues, requests, gone = Queues(), dict[int, QueuedRequest](), set[int]()
    for what, which, tenant, priority_class, tokens, number in steps:
        queue, queued_before = queues.queues[which], queues.waiting()
        if what == "enter":
            requests[queues.next] = comes = ask(tenant, priority_class, tokens=tokens)
            entry, out = queues.next, queues.enter(comes, which, float(number))
            if out is None:
                assert queues.waiting() == queued_before
                gone.add(entry)
            else:
                left = {each for _, each in out}
                assert len(left) == len(out)
                assert left <= (queued_before[0] | queued_before[1]) - gone
                assert all(
                    requests[each].priority_class <= priority_class for each in left if requests[each].tenant == tenant
                )
                assert queues.waiting()[which] >= {entry}
                gone |= left
        elif what == "take" and len(queue):
            gone.add(taken(queue)[0])
        elif what == "leave" and queue.discard(number):
            gone.add(number)
        queues.check()
        assert queues.waiting()[0] | queues.waiting()[1] == set(requests) - gone


def test_control_unrestored_queue_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a removed entry is not put back."""
    monkeypatch.setattr(FairQueue, "put_back", lambda queue, place: None)
    with pytest.raises(AssertionError):
        test_failed_entry_restores_the_queue()


def _served(pattern: list[tuple[int, int]]) -> Counter[PriorityClass]:
    """Count the served requests of each priority class in 420 steps. Each step serves one request, and more than one
    arrives: so many interactive and standard ones, and one of batch.
    """
    bound = QueueLimit(42, 10_000, 10_000)
    queues, requests, served = (
        Queues(QueueLimits(bound, bound, bound, 60.0)),
        dict[int, QueuedRequest](),
        Counter[PriorityClass](),
    )
    for step in range(420):
        urgent, standard = pattern[step % len(pattern)]
        for each in [ask("v", B)] + [ask("u", S)] * standard + [ask("tu"[step % 2])] * urgent:
            requests[queues.next] = each
            queues.enter(each, 0, float(step))
        served[requests[taken(queues.queues[0])[0]].priority_class] += 1
    queues.check()
    return served


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_no_priority_class_starves_in_a_full_queue(pattern: list[tuple[int, int]]) -> None:
    """Batch gets a twentieth of the service and standard a fifth, except while the queue fills, and no more."""
    served = _served(pattern)
    assert served[B] >= 18
    assert served[S] >= 72
    assert served[F] >= 300


def test_control_missing_reserve_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: batch starves in a queue full of interactive requests."""
    monkeypatch.setattr(shed_order, "_protected_classes", lambda tiers, bound: [])
    assert _served([(5, 1)])[B] <= 2


# Requests that can't meet their deadline.


def _throughput(answers: int = MIN_ANSWERS) -> Throughput:
    """Return the throughput after so many answers of ten tokens and two seconds each. The time is 0."""
    throughput = Throughput(_at_s=-2.0 * answers)
    for number in range(answers, 0, -1):
        throughput.record_grant(-2.0 * number)
        throughput.record_release(-2.0 * (number - 1), 10, 10)
    return throughput


@pytest.mark.parametrize(
    ("deadlines", "want"),
    [
        pytest.param([1.0], [], id="the next request is not judged"),
        pytest.param([2.0, 3.0], [(1, 4.0, 3.0)], id="ten tokens before it take two seconds"),
        pytest.param([2.0, 4.0, 6.0], [], id="just in time"),
        pytest.param([2.0, 3.9, 4.5], [(1, 4.0, 3.9)], id="a late request does not delay the next"),
        pytest.param([9.0, 2.0, 3.0], [(2, 4.0, 3.0)], id="a later deadline is not before it"),
    ],
)
def test_requests_behind_too_many_tokens_are_late(deadlines: list[float], want: list[tuple[int, float, float]]) -> None:
    """Requests of ten tokens wait for one slot. Expected are the number, the needed seconds and the remaining ones."""
    queues = Queues()
    for deadline_s in deadlines:
        queues.enter(ask(tokens=10), 0, deadline_s)
    found = list(find_late_requests(queues.queues[0], _throughput(), 1, 0.0))
    assert [(late.place.entry, late.expected_s, late.remaining_s) for late in found] == want
    assert not list(find_late_requests(queues.queues[0], _throughput(MIN_ANSWERS - 1), 1, 0.0)), (
        "the throughput is unknown"
    )


@pytest.mark.parametrize(
    ("before", "tokens", "slots", "want"),
    [
        pytest.param(10, 10, 1, 4.0, id="two seconds each"),
        pytest.param(10, 10, 2, 3.0, id="two slots halve only the tokens before it"),
        pytest.param(10, 5, 1, 3.0, id="a short answer takes less"),
        pytest.param(10, 1000, 1, 6.0, id="a long answer counts as twice the mean"),
        pytest.param(0, 10, 1, None, id="no request before it"),
    ],
)
def test_completion_time_includes_tokens_before(before: int, tokens: int, slots: int, want: float | None) -> None:
    """Ten tokens took two seconds."""
    assert completion_time_s(before, ask(tokens=tokens), _throughput(), slots) == want


@pytest.mark.parametrize(
    ("waited_s", "remaining_s", "want"),
    [
        pytest.param(1.0, 2.0, 2.0, id="a short wait needs no margin"),
        pytest.param(2.0, 2.0, 2.0, id="a wait as long as the rest needs no margin"),
        pytest.param(2.1, 2.0, 8.0, id="a longer wait needs a margin"),
    ],
)
def test_long_waiter_needs_a_time_margin(waited_s: float, remaining_s: float, want: float) -> None:
    """Ten tokens took two seconds; the request has ten."""
    assert required_time_s(_throughput(), ask(tokens=10), waited_s, remaining_s) == want


def test_control_ignoring_tokens_before_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(shed_decision, "completion_time_s", lambda before, ask, throughput, slots: None)
    with pytest.raises(AssertionError):
        test_requests_behind_too_many_tokens_are_late([2.0, 3.0], [(1, 4.0, 3.0)])
