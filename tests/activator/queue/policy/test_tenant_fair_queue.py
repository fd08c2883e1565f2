"""FairQueue: tenants get fair shares in tokens, whatever arrives, leaves, is served, and costs more or less than
estimated.
"""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from activator.queue.policy import tenant_fair_queue
from activator.queue.policy.queue_bounds import UNBOUNDED, QueueUsage, QueueUsageByTenant
from activator.queue.policy.queued_request import WEIGHTS, PriorityClass, QueuedRequest
from activator.queue.policy.shed_order import ShedOrder
from activator.queue.policy.tenant_fair_queue import (
    FINEST,
    DeadlineIndex,
    FairQueue,
    QueueEntry,
    VirtualCounters,
    _PriorityLane,
)

LARGEST = 100
TOKENS = st.integers(1, LARGEST)
CLASSES = st.sampled_from(list(PriorityClass))


def taken(queue: FairQueue[int]) -> tuple[int, QueuedRequest]:
    """Return the next entry. The queue must not be empty."""
    found = queue.take()
    assert found is not None
    return found


class Arrivals(FairQueue[int]):
    """Control: a queue that serves in order of arrival."""

    def take(self, may_take: Callable[[str], bool] = lambda _: True) -> tuple[int, QueuedRequest]:
        entry, place = next(iter(self._places.items()))
        self.discard(entry)
        return entry, place.queued_request


class Machine(RuleBasedStateMachine):
    """Two queues with shared loads, compared with the set of entries in each."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_shed_order: ShedOrder[QueueEntry[int]] = ShedOrder(UNBOUNDED)
        self.queues = [FairQueue[int](self.shared_shed_order), FairQueue[int](self.shared_shed_order)]
        self.held: list[dict[int, QueuedRequest]] = [{}, {}]
        self.granted: list[list[QueuedRequest]] = [[], []]
        self.next = 0

    @rule(
        which=st.integers(0, 1),
        tenant=st.sampled_from("tu"),
        tokens=TOKENS,
        priority_class=CLASSES,
        deadline_s=st.floats(0, 9),
    )
    def put(self, which: int, tenant: str, tokens: int, priority_class: PriorityClass, deadline_s: float) -> None:
        queued_request = QueuedRequest(tenant, tokens, tokens, priority_class)
        self.queues[which].put(self.next, queued_request, deadline_s)
        self.held[which][self.next] = queued_request
        self.next += 1

    @precondition(lambda self: any(self.held))
    @rule(which=st.integers(0, 1))
    def take(self, which: int) -> None:
        if self.held[which]:
            entry, queued_request = taken(self.queues[which])
            assert self.held[which].pop(entry) == queued_request
            self.granted[which].append(queued_request)

    @rule(which=st.integers(0, 1), tenant=st.sampled_from("tu"), tokens=TOKENS, priority_class=CLASSES)
    def charge_immediate(self, which: int, tenant: str, tokens: int, priority_class: PriorityClass) -> None:
        if not self.held[which]:
            self.queues[which].charge_immediate(QueuedRequest(tenant, 0, tokens, priority_class))

    @rule(which=st.integers(0, 1), entry=st.integers(0, 30))
    def discard(self, which: int, entry: int) -> None:
        assert self.queues[which].discard(entry) == (self.held[which].pop(entry, None) is not None)

    @rule(which=st.integers(0, 1), tokens=st.integers(0, LARGEST))
    def settle(self, which: int, tokens: int) -> None:
        if self.granted[which]:
            self.queues[which].settle(self.granted[which].pop(), tokens)

    @invariant()
    def loads_add_up(self) -> None:
        for queue, held in zip(self.queues, self.held, strict=True):
            queue.check_integrity()
            assert len(queue) == len(held)
        asks = [queued_request for held in self.held for queued_request in held.values()]
        assert self.shared_shed_order.usage_by_tenant.total == _sum(asks)
        for tenant in "tu":
            assert self.shared_shed_order.usage_by_tenant.usage_of(tenant) == _sum(
                [queued_request for queued_request in asks if queued_request.tenant == tenant]
            )


def _sum(asks: list[QueuedRequest]) -> QueueUsage:
    return QueueUsage(
        len(asks),
        sum(queued_request.nbytes for queued_request in asks),
        sum(queued_request.tokens for queued_request in asks),
    )


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=30)


def test_control_uncounted_tenant_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a queue that counts a request in the total but not for its tenant fails the check."""
    monkeypatch.setattr(QueueUsageByTenant, "add", lambda loads, queued_request: loads.total.add(queued_request))
    queue = FairQueue[int](ShedOrder(UNBOUNDED))
    queue.put(1, QueuedRequest("t", 1, 1), 0.0)
    with pytest.raises(AssertionError):
        queue.check_integrity()


# While two tenants wait, the tokens given to each differ by at most two of their largest requests.

HISTORIES = st.lists(st.tuples(st.sampled_from("tu"), TOKENS), max_size=40)


def _unfairness(queue: FairQueue[int], before: list[tuple[str, int]], both: list[tuple[str, int]]) -> float:
    """Return the largest difference in tokens while both tenants wait, after `before` was served in
    order of arrival.
    """
    for number, (tenant, tokens) in enumerate(before):
        queue.put(-1 - number, QueuedRequest(tenant, 0, tokens), 0.0)
        taken(queue)
    for number, (tenant, tokens) in enumerate(both):
        queue.put(number, QueuedRequest(tenant, 0, tokens), 0.0)
    waiting, given, worst = Counter(tenant for tenant, _ in both), Counter[str](), 0
    while waiting["t"] and waiting["u"]:
        _, queued_request = taken(queue)
        waiting[queued_request.tenant] -= 1
        given[queued_request.tenant] += queued_request.tokens
        worst = max(worst, abs(given["t"] - given["u"]))
    return worst


@given(HISTORIES, HISTORIES)
def test_waiting_tenants_get_equal_tokens(before: list[tuple[str, int]], both: list[tuple[str, int]]) -> None:
    """The difference is at most two of the largest requests, whatever was served before."""
    assert _unfairness(FairQueue(ShedOrder(UNBOUNDED)), before, both) <= 2 * LARGEST


def test_control_arrival_order_is_not_fair() -> None:
    """Control: a tenant that sends ten requests at once gets ten times as much."""
    both = [("t", LARGEST)] * 10 + [("u", LARGEST)] * 10
    assert _unfairness(Arrivals(ShedOrder(UNBOUNDED)), [], both) == 10 * LARGEST
    assert _unfairness(FairQueue(ShedOrder(UNBOUNDED)), [], both) <= 2 * LARGEST


def test_returning_tenant_claims_no_past_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant was served alone for long. The other one returns and does not get what it did not use. Control: a
    queue that keeps its old counter.
    """
    before, both = [("t", LARGEST)] * 50, [("t", LARGEST), ("u", LARGEST)] * 20
    assert _unfairness(FairQueue(ShedOrder(UNBOUNDED)), before, both) <= 2 * LARGEST
    monkeypatch.setattr(VirtualCounters, "join", lambda counters, key: counters._counters.setdefault(key, 0.0))
    assert _unfairness(FairQueue(ShedOrder(UNBOUNDED)), before, both) > 10 * LARGEST


def test_leaving_tenant_keeps_its_debt(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant always waits. The other returns with each large request. What it was given still counts. Control: a
    queue that resets the counter at each return.
    """

    def served() -> int:
        queue = FairQueue[int](ShedOrder(UNBOUNDED))
        for number in range(200):
            queue.put(number, QueuedRequest("u", 0, 10), 0.0)
        count = 0
        queue.put(200, QueuedRequest("t", 0, 90), 0.0)
        for number in range(201, 301):
            if taken(queue)[1].tenant == "t":
                count += 1
                queue.put(number, QueuedRequest("t", 0, 90), 0.0)
        return count

    assert 9 <= served() <= 11
    monkeypatch.setattr(
        VirtualCounters, "join", lambda counters, key: counters._counters.update({key: counters._floor})
    )
    assert served() > 40


# Weights


@pytest.mark.parametrize("weight", [1, 3, 10])
def test_heavier_tenant_gets_proportionally_more(weight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares follow the weights while both wait. Control: a queue that ignores weights."""

    def share() -> float:
        queue, given = FairQueue[int](ShedOrder(UNBOUNDED)), Counter[str]()
        for number in range(880):
            queue.put(number, QueuedRequest("tu"[number % 2], 0, 10, weight=weight if number % 2 else 1), 0.0)
        for _ in range(440):
            given[taken(queue)[1].tenant] += 1
        return given["u"] / 440

    want = weight / (weight + 1)
    assert abs(share() - want) < 0.01
    monkeypatch.setattr(VirtualCounters, "charge", lambda counters, key, amount: give(counters, key, 10.0))
    assert abs(share() - 0.5) < 0.01


give = VirtualCounters.charge


# Priority classes


@pytest.mark.parametrize("priority_class", list(PriorityClass))
def test_no_rank_starves(priority_class: PriorityClass, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all three classes wait, each gets its weight's share. Control: serve the highest class only."""

    def share() -> float:
        queue, given = FairQueue[int](ShedOrder(UNBOUNDED)), Counter[PriorityClass]()
        for number in range(3 * 420):
            queue.put(number, QueuedRequest("t", 0, 10, PriorityClass(number % 3)), 0.0)
        for _ in range(420):
            given[taken(queue)[1].priority_class] += 1
        return given[priority_class] / 420

    want = WEIGHTS[priority_class] / sum(WEIGHTS.values())
    assert abs(share() - want) < 0.01
    monkeypatch.setattr(
        VirtualCounters, "counter_of", lambda counters, key: -key if isinstance(key, PriorityClass) else 0.0
    )
    assert share() == (priority_class is PriorityClass.INTERACTIVE)


# Deadlines


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.data())
def test_the_earliest_deadline_of_a_tenant_is_next(deadlines: list[float], data: st.DataObject) -> None:
    """Equal deadlines are served in order of arrival, whichever entries leave in between."""
    queue = FairQueue[int](ShedOrder(UNBOUNDED))
    for number, deadline_s in enumerate(deadlines):
        queue.put(number, QueuedRequest("t", 0, 10), deadline_s)
    leaving = data.draw(st.sets(st.sampled_from(range(len(deadlines)))))
    for number in leaving:
        queue.discard(number)
    want = sorted(set(range(len(deadlines))) - leaving, key=lambda number: (deadlines[number], number))
    assert [taken(queue)[0] for _ in range(len(queue))] == want


def test_control_arrival_order_ignores_deadlines() -> None:
    """Negative control."""
    queue = Arrivals(ShedOrder(UNBOUNDED))
    queue.put(0, QueuedRequest("t", 0, 10), 9.0)
    queue.put(1, QueuedRequest("t", 0, 10), 1.0)
    assert taken(queue)[0] == 0


# Settlement


@given(st.lists(st.tuples(st.sampled_from("tu"), CLASSES, TOKENS, st.integers(0, LARGEST)), max_size=40))
def test_settled_tokens_replace_estimates(history: list[tuple[str, PriorityClass, int, int]]) -> None:
    """The counters equal those of a queue that knew each actual cost from the start."""
    guessing, knowing = FairQueue[int](ShedOrder(UNBOUNDED)), FairQueue[int](ShedOrder(UNBOUNDED))
    for queue in (guessing, knowing):
        for priority_class in PriorityClass:
            queue._counters.join(priority_class)
            queue._priority_lanes[priority_class] = _PriorityLane(counters=VirtualCounters({"t": 0.0, "u": 0.0}))
    for tenant, priority_class, guess, tokens in history:
        weight = {"t": 1, "u": 3}[tenant]
        queued_request = QueuedRequest(tenant, 0, guess, priority_class, weight=weight)
        for queue, each in (
            (guessing, queued_request),
            (knowing, QueuedRequest(tenant, 0, tokens, priority_class, weight=weight)),
        ):
            queue._charge(each)
        guessing.settle(queued_request, tokens)
    for priority_class in PriorityClass:
        assert guessing._counters.counter_of(priority_class) == pytest.approx(
            knowing._counters.counter_of(priority_class)
        )
        for tenant in "tu":
            assert guessing._priority_lanes[priority_class].counters.counter_of(tenant) == pytest.approx(
                knowing._priority_lanes[priority_class].counters.counter_of(tenant)
            )


# A flood, in virtual time


def _quiet_waits(queue: FairQueue[int], slots: int, every: int) -> list[int]:
    """Return how many steps each request of the quiet tenant waited. One tenant sends 1,000 requests at once, the quiet
    one sends one per `every` steps. A slot is held for `slots` steps, so one is free in each step.
    """
    for number in range(1000):
        queue.put(number, QueuedRequest("loud", 0, 10), 0.0)
    sent: dict[int, int] = {}
    waits = []
    for step in range(400):
        if step % every == 0:
            sent[1000 + step] = step
            queue.put(1000 + step, QueuedRequest("quiet", 0, 10), 0.0)
        entry, _ = taken(queue)
        if entry in sent:
            waits.append(step - sent.pop(entry))
    return waits + [400 - step for step in sent.values()]


def test_flood_of_one_tenant_delays_only_itself() -> None:
    """The quiet tenant's requests wait at most one service time. In order of arrival they would wait longer."""
    assert max(_quiet_waits(FairQueue(ShedOrder(UNBOUNDED)), 8, 16)) <= 8
    assert min(_quiet_waits(Arrivals(ShedOrder(UNBOUNDED)), 8, 16)) > 8


def test_counters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds however many tenants there were, even while they wait."""
    monkeypatch.setattr(tenant_fair_queue, "MAX_COUNTERS", 10)
    queue = FairQueue[int](ShedOrder(UNBOUNDED))
    for number in range(100):
        queue.put(number, QueuedRequest(f"t{number}", 0, 10), 0.0)
        assert len(queue._priority_lanes[PriorityClass.INTERACTIVE].counters._counters) <= 10
    assert sorted(taken(queue)[0] for _ in range(100)) == list(range(100))
    queue.check_integrity()


@pytest.mark.parametrize(
    ("queued_request", "deadline_s", "want"),
    [
        pytest.param(QueuedRequest("t", 1, 5), 10.0, 30, id="earlier deadlines count"),
        pytest.param(QueuedRequest("t", 1, 5), 2.0, 10, id="an equal deadline does not count"),
        pytest.param(QueuedRequest("t", 1, 5), 1.0, 0, id="the earliest deadline has none before it"),
        pytest.param(
            QueuedRequest("t", 1, 5, PriorityClass.BATCH),
            10.0,
            1,
            id="another class does not count; no tokens count as one",
        ),
        pytest.param(QueuedRequest("u", 1, 5), 10.0, 40, id="another tenant does not count"),
        pytest.param(QueuedRequest("v", 1, 5), 10.0, 0, id="a tenant without requests"),
    ],
)
def test_tokens_before_counts_earlier_deadlines(queued_request: QueuedRequest, deadline_s: float, want: int) -> None:
    """One entry of tenant t has left."""
    queue = FairQueue[int](ShedOrder(UNBOUNDED))
    for entry, (tenant, tokens, at_s, priority_class) in enumerate(
        [
            ("t", 10, 1.0, PriorityClass.INTERACTIVE),
            ("t", 20, 2.0, PriorityClass.INTERACTIVE),
            ("t", 99, 3.0, PriorityClass.INTERACTIVE),
            ("t", 0, 4.0, PriorityClass.BATCH),
            ("u", 40, 5.0, PriorityClass.INTERACTIVE),
        ]
    ):
        queue.put(entry, QueuedRequest(tenant, 1, tokens, priority_class), at_s)
    queue.discard(2)
    assert queue.tokens_before(queued_request, deadline_s) == want


def test_entry_put_back_comes_first_and_uncharged() -> None:
    """It comes before those of its tenant with the same deadline. If it were charged, another tenant would be next."""
    queue: FairQueue[str] = FairQueue(ShedOrder(UNBOUNDED))
    for entry, queued_request in (
        ("t1", QueuedRequest("t", 0, 100)),
        ("t2", QueuedRequest("t", 0, 100)),
        ("u1", QueuedRequest("u", 0, 100)),
    ):
        queue.put(entry, queued_request, 5.0)
    for _ in range(3):
        found = queue.take()
        assert found is not None
        assert found[0] == "t1"
        queue.put_first("t1", found[1], 5.0)
        queue.check_integrity()
    assert [taken[0] for taken in iter(queue.take, None)] == ["t1", "u1", "t2"]


ENTRIES = st.lists(st.tuples(st.floats(0, 100_000), st.integers(1, 100)), max_size=40)


@given(ENTRIES, st.floats(0, 100_000), st.integers(0, 40))
def test_deadline_index_returns_the_prefix_sum(
    entries: list[tuple[float, int]], deadline_s: float, leaving: int
) -> None:
    """The sum covers earlier sixteenths of a second, after some entries have left. Removed entries leave nothing."""
    deadline_index = DeadlineIndex()
    for at_s, tokens in entries:
        deadline_index.add(at_s, tokens)
    for at_s, tokens in entries[:leaving]:
        deadline_index.add(at_s, -tokens)
    stay = entries[leaving:]
    want = sum(tokens for at_s, tokens in stay if int(at_s * FINEST) < int(deadline_s * FINEST))
    assert deadline_index.before(deadline_s) == want
    assert deadline_index.total() == sum(tokens for _, tokens in stay)
    for at_s, tokens in stay:
        deadline_index.add(at_s, -tokens)
    assert not any(deadline_index._sums)
