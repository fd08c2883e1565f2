"""Who makes way for whom, and who can't be in time: as tables; bounds hold, and nobody is shed twice."""

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
    """Two versions' queues that share what is in all; the entry is a number."""

    def __init__(self, limits: QueueLimits = LIMITS) -> None:
        self.limits = limits
        self.shared_shed_order: ShedOrder[QueueEntry[int]] = ShedOrder(limits.in_all)
        self.queues = [FairQueue[int](self.shared_shed_order, limits.per_version) for _ in range(2)]
        self.next = 0

    def come(self, ask: QueuedRequest, which: int = 0, deadline_s: float = 0.0) -> list[tuple[ShedClass, int]] | None:
        """Who made way, by number, and why."""
        number, self.next = self.next, self.next + 1
        out = try_enter(self.queues[which], number, ask, deadline_s, self.limits)
        return None if out is None else [(shed_class, place.entry) for shed_class, place in out]

    def waiting(self) -> list[set[int]]:
        """Who waits, by queue."""
        return [{place.entry for places in queue.entries_by_backlog() for place in places} for queue in self.queues]

    def check(self) -> None:
        for queue in self.queues:
            queue.check_integrity()
            assert not queue.queue_usage.is_over(self.limits.per_version)
        assert not self.shared_shed_order.loads.in_all.is_over(self.limits.in_all)
        for tenant in "tuv":
            assert not self.shared_shed_order.loads.of(tenant).is_over(self.limits.per_tenant)


def ask(tenant: str = "t", priority_class: PriorityClass = F, *, tokens: int = 1) -> QueuedRequest:
    return QueuedRequest(tenant, 1, tokens, priority_class)


@pytest.mark.parametrize(
    ("before", "comes", "which", "want"),
    [
        pytest.param([], ask(), 0, [], id="there is room"),
        pytest.param([ask(), ask("u"), ask("v")], ask(), 0, None, id="of equals the newcomer goes"),
        pytest.param([ask(), ask("u", B), ask("v")], ask("v"), 0, [(ShedClass.BATCH, 1)], id="batch makes way"),
        pytest.param([ask(), ask("u", B), ask("v")], ask("v", S), 0, [(ShedClass.BATCH, 1)], id="for standard, too"),
        pytest.param([ask(), ask("u", S), ask("v")], ask("v", B), 0, None, id="batch makes nobody leave"),
        pytest.param([ask(), ask("t", S), ask()], ask(), 0, [(ShedClass.STANDARD, 1)],
                     id="a tenant's own standard one"),
        pytest.param([ask(), ask(), ask()], ask("u"), 0, [(ShedClass.OVER, 2)], id="who holds most makes way"),
        pytest.param([ask(), ask(), ask("u")], ask("u"), 0, None, id="not beyond what is fair"),
        pytest.param([ask(tokens=50), ask("u", tokens=50)], ask("v", tokens=90), 0, None, id="large, itself too much"),
        pytest.param(
            [ask("t", B, tokens=40), ask("t", B, tokens=40)], ask("v", tokens=90), 0,
            [(ShedClass.BATCH, 1), (ShedClass.BATCH, 0)], id="several for one",
        ),
        pytest.param([], ask(tokens=101), 0, None, id="what would not fit into an empty queue"),
        pytest.param([ask("u", B, tokens=99)], ask(tokens=101), 0, None, id="nobody is shed for that"),
        pytest.param(
            [ask("u", B, tokens=99), ask("v")], ask("v", tokens=101), 1, None, id="nor where another queue has room"
        ),
    ],
)  # fmt: skip
def test_full_queue_sheds_lower_requests(
    before: Sequence[QueuedRequest], comes: QueuedRequest, which: int, want: list[tuple[ShedClass, int]] | None
) -> None:
    """The queue of a version holds three, all of them four. None: the newcomer is refused, and all others wait on."""
    queues = Queues()
    for each in before:
        assert queues.come(each) == []
    stood = queues.waiting()
    assert queues.come(comes, which) == want
    if want is None:
        assert queues.waiting() == stood
    queues.check()


def test_full_installation_sheds_from_another_version() -> None:
    """Four wait for two versions; the lowest of them is another version's."""
    queues = Queues()
    for which, each in ((0, ask("t")), (1, ask("u", B)), (1, ask("u")), (0, ask("v"))):
        assert queues.come(each, which) == []
    assert queues.come(ask("v"), 0) == [(ShedClass.BATCH, 1)]
    queues.check()


def test_failed_entry_restores_the_queue() -> None:
    """Seventeen would have to leave for one: nobody does, and the order of service is the old one."""
    queues = Queues(QueueLimits(QueueLimit(50, 1000, 100), UNBOUNDED, UNBOUNDED, 60.0))
    for number in range(50):
        assert queues.come(ask("t", B, tokens=2), 0, float(number)) == []
    assert queues.come(ask("u", tokens=2 * MAX_DISPLACED + 1)) is None
    queues.check()
    assert [taken(queues.queues[0])[0] for _ in range(len(queues.queues[0]))] == list(range(50))
    for number in range(50):
        assert queues.come(ask("t", B, tokens=2), 0, float(number)) == []
    assert len(queues.come(ask("u", tokens=2 * MAX_DISPLACED)) or ()) == MAX_DISPLACED


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "come", "take", "leave"]), st.integers(0, 1), st.sampled_from("tuv"),
        st.sampled_from(list(PriorityClass)), st.integers(1, 110), st.integers(0, 20),
    ),
    max_size=60,
)  # fmt: skip


@given(STEPS)
def test_bounds_hold_and_nobody_is_shed_twice(
    steps: list[tuple[str, int, str, PriorityClass, int, int]],
) -> None:
    """Each newcomer waits or is refused; each who waits leaves once: served, by itself or shed; who was given a slot
    is never shed; nobody of a higher rank makes way for a lower one of the same tenant.
    """
    queues, asked, gone = Queues(), dict[int, QueuedRequest](), set[int]()
    for what, which, tenant, priority_class, tokens, number in steps:
        queue, stood = queues.queues[which], queues.waiting()
        if what == "come":
            asked[queues.next] = comes = ask(tenant, priority_class, tokens=tokens)
            entry, out = queues.next, queues.come(comes, which, float(number))
            if out is None:
                assert queues.waiting() == stood
                gone.add(entry)
            else:
                left = {each for _, each in out}
                assert len(left) == len(out)
                assert left <= (stood[0] | stood[1]) - gone
                assert all(
                    asked[each].priority_class <= priority_class for each in left if asked[each].tenant == tenant
                )
                assert queues.waiting()[which] >= {entry}
                gone |= left
        elif what == "take" and len(queue):
            gone.add(taken(queue)[0])
        elif what == "leave" and queue.discard(number):
            gone.add(number)
        queues.check()
        assert queues.waiting()[0] | queues.waiting()[1] == set(asked) - gone


def test_control_unrestored_queue_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: who was taken out in vain stays out."""
    monkeypatch.setattr(FairQueue, "put_back", lambda queue, place: None)
    with pytest.raises(AssertionError):
        test_failed_entry_restores_the_queue()


def _served(pattern: list[tuple[int, int]]) -> Counter[PriorityClass]:
    """By rank, of 420 steps in each of which one is served, and more than one comes: so many interactive and standard
    ones, in turn, and one of batch.
    """
    bound = QueueLimit(42, 10_000, 10_000)
    queues, asked, served = (
        Queues(QueueLimits(bound, bound, bound, 60.0)),
        dict[int, QueuedRequest](),
        Counter[PriorityClass](),
    )
    for step in range(420):
        urgent, standard = pattern[step % len(pattern)]
        for each in [ask("v", B)] + [ask("u", S)] * standard + [ask("tu"[step % 2])] * urgent:
            asked[queues.next] = each
            queues.come(each, 0, float(step))
        served[asked[taken(queues.queues[0])[0]].priority_class] += 1
    queues.check()
    return served


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_no_priority_class_starves_in_a_full_queue(pattern: list[tuple[int, int]]) -> None:
    """Whatever comes, batch has its twentieth of what is served, and standard its fifth, but for the time in which the
    queue fills; and no more than that.
    """
    served = _served(pattern)
    assert served[B] >= 18
    assert served[S] >= 72
    assert served[F] >= 300


def test_control_missing_reserve_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: once it is full of interactive ones, batch waits for ever."""
    monkeypatch.setattr(shed_order, "_kept", lambda tiers, bound: [])
    assert _served([(5, 1)])[B] <= 2


# Those who can't be in time


def _pace(answers: int = MIN_ANSWERS) -> Throughput:
    """So many answers of ten tokens each, one after the other, of two seconds each; it is 0 now."""
    throughput = Throughput(_at_s=-2.0 * answers)
    for number in range(answers, 0, -1):
        throughput.record_grant(-2.0 * number)
        throughput.record_release(-2.0 * (number - 1), 10, 10)
    return throughput


@pytest.mark.parametrize(
    ("deadlines", "want"),
    [
        pytest.param([1.0], [], id="who is next is not judged here"),
        pytest.param([2.0, 3.0], [(1, 4.0, 3.0)], id="ten tokens before it, and its own ten, in two seconds each"),
        pytest.param([2.0, 4.0, 6.0], [], id="just in time"),
        pytest.param([2.0, 3.9, 4.5], [(1, 4.0, 3.9)], id="who leaves makes it in time for the next"),
        pytest.param([9.0, 2.0, 3.0], [(2, 4.0, 3.0)], id="who has more time is not before it"),
    ],
)
def test_requests_behind_too_many_tokens_are_late(deadlines: list[float], want: list[tuple[int, float, float]]) -> None:
    """Ten tokens each, at one slot; by number, the seconds that it would take and those that are left."""
    queues = Queues()
    for deadline_s in deadlines:
        queues.come(ask(tokens=10), 0, deadline_s)
    found = list(find_late_requests(queues.queues[0], _pace(), 1, 0.0))
    assert [(late.place.entry, late.expected_s, late.remaining_s) for late in found] == want
    assert not list(find_late_requests(queues.queues[0], _pace(MIN_ANSWERS - 1), 1, 0.0)), "no pace is known"


@pytest.mark.parametrize(
    ("before", "tokens", "slots", "want"),
    [
        pytest.param(10, 10, 1, 4.0, id="two seconds each"),
        pytest.param(10, 10, 2, 3.0, id="two at once; its own answer is no quicker for that"),
        pytest.param(10, 5, 1, 3.0, id="a short one takes less"),
        pytest.param(10, 1000, 1, 6.0, id="one that may take much is thought to take twice as long as others"),
        pytest.param(0, 10, 1, None, id="nobody before it"),
    ],
)
def test_completion_time_includes_tokens_before(before: int, tokens: int, slots: int, want: float | None) -> None:
    """Ten tokens took two seconds."""
    assert completion_time_s(before, ask(tokens=tokens), _pace(), slots) == want


@pytest.mark.parametrize(
    ("waited_s", "remaining_s", "want"),
    [
        pytest.param(1.0, 2.0, 2.0, id="who came with little time"),
        pytest.param(2.0, 2.0, 2.0, id="who waited for as long as is left"),
        pytest.param(2.1, 2.0, 8.0, id="who waited for longer leaves some more"),
    ],
)
def test_long_waiter_needs_a_time_margin(waited_s: float, remaining_s: float, want: float) -> None:
    """Ten tokens took two seconds; it asks for ten."""
    assert required_time_s(_pace(), ask(tokens=10), waited_s, remaining_s) == want


def test_control_ignoring_tokens_before_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(shed_decision, "completion_time_s", lambda before, ask, throughput, slots: None)
    with pytest.raises(AssertionError):
        test_requests_behind_too_many_tokens_are_late([2.0, 3.0], [(1, 4.0, 3.0)])
