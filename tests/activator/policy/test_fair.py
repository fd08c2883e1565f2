"""Fair in tokens, whatever comes, leaves, is served and costs more or less than it was thought to."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from activator.policy import fair
from activator.policy.ask import WEIGHTS, Ask, Rank
from activator.policy.bounds import UNBOUNDED, Load, Loads
from activator.policy.crowd import Crowd
from activator.policy.fair import FINEST, Counters, FairQueue, Place, Tally, _Lane

LARGEST = 100
TOKENS = st.integers(1, LARGEST)
RANKS = st.sampled_from(list(Rank))


def taken(queue: FairQueue[int]) -> tuple[int, Ask]:
    """The next; somebody waits."""
    found = queue.take()
    assert found is not None
    return found


class Arrivals(FairQueue[int]):
    """The control: whoever came first is next."""

    def take(self, may_take: Callable[[str], bool] = lambda _: True) -> tuple[int, Ask]:
        entry, place = next(iter(self._places.items()))
        self.discard(entry)
        return entry, place.ask


class Machine(RuleBasedStateMachine):
    """Two queues that share their loads, beside the set of what each holds."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: Crowd[Place[int]] = Crowd(UNBOUNDED)
        self.queues = [FairQueue[int](self.shared), FairQueue[int](self.shared)]
        self.held: list[dict[int, Ask]] = [{}, {}]
        self.granted: list[list[Ask]] = [[], []]
        self.next = 0

    @rule(which=st.integers(0, 1), tenant=st.sampled_from("tu"), tokens=TOKENS, rank=RANKS, deadline_s=st.floats(0, 9))
    def put(self, which: int, tenant: str, tokens: int, rank: Rank, deadline_s: float) -> None:
        ask = Ask(tenant, tokens, tokens, rank)
        self.queues[which].put(self.next, ask, deadline_s)
        self.held[which][self.next] = ask
        self.next += 1

    @precondition(lambda self: any(self.held))
    @rule(which=st.integers(0, 1))
    def take(self, which: int) -> None:
        if self.held[which]:
            entry, ask = taken(self.queues[which])
            assert self.held[which].pop(entry) == ask
            self.granted[which].append(ask)

    @rule(which=st.integers(0, 1), tenant=st.sampled_from("tu"), tokens=TOKENS, rank=RANKS)
    def pass_by(self, which: int, tenant: str, tokens: int, rank: Rank) -> None:
        if not self.held[which]:
            self.queues[which].pass_by(Ask(tenant, 0, tokens, rank))

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
        asks = [ask for held in self.held for ask in held.values()]
        assert self.shared.loads.in_all == _sum(asks)
        for tenant in "tu":
            assert self.shared.loads.of(tenant) == _sum([ask for ask in asks if ask.tenant == tenant])


def _sum(asks: list[Ask]) -> Load:
    return Load(len(asks), sum(ask.nbytes for ask in asks), sum(ask.tokens for ask in asks))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=30)


def test_a_tenant_that_is_not_counted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a queue that counts what comes in all, and for no tenant, fails the check."""
    monkeypatch.setattr(Loads, "add", lambda loads, ask: loads.in_all.add(ask))
    queue = FairQueue[int](Crowd(UNBOUNDED))
    queue.put(1, Ask("t", 1, 1), 0.0)
    with pytest.raises(AssertionError):
        queue.check_integrity()


# What two tenants were given while both wait differs by two of their largest requests at most.

HISTORIES = st.lists(st.tuples(st.sampled_from("tu"), TOKENS), max_size=40)


def _unfairness(queue: FairQueue[int], before: list[tuple[str, int]], both: list[tuple[str, int]]) -> float:
    """The largest difference while both wait, after `before` was served to whoever came."""
    for number, (tenant, tokens) in enumerate(before):
        queue.put(-1 - number, Ask(tenant, 0, tokens), 0.0)
        taken(queue)
    for number, (tenant, tokens) in enumerate(both):
        queue.put(number, Ask(tenant, 0, tokens), 0.0)
    waiting, given, worst = Counter(tenant for tenant, _ in both), Counter[str](), 0
    while waiting["t"] and waiting["u"]:
        _, ask = taken(queue)
        waiting[ask.tenant] -= 1
        given[ask.tenant] += ask.tokens
        worst = max(worst, abs(given["t"] - given["u"]))
    return worst


@given(HISTORIES, HISTORIES)
def test_two_tenants_that_wait_are_given_the_same(before: list[tuple[str, int]], both: list[tuple[str, int]]) -> None:
    """But for two of the largest requests, whatever was before."""
    assert _unfairness(FairQueue(Crowd(UNBOUNDED)), before, both) <= 2 * LARGEST


def test_the_order_of_arrival_is_not_fair() -> None:
    """The control: who sends ten requests at once is given ten times as much."""
    both = [("t", LARGEST)] * 10 + [("u", LARGEST)] * 10
    assert _unfairness(Arrivals(Crowd(UNBOUNDED)), [], both) == 10 * LARGEST
    assert _unfairness(FairQueue(Crowd(UNBOUNDED)), [], both) <= 2 * LARGEST


def test_who_returns_has_nothing_to_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant was served alone for long; the other comes, and is not given all that it did not ask for meanwhile.
    The control begins where it was.
    """
    before, both = [("t", LARGEST)] * 50, [("t", LARGEST), ("u", LARGEST)] * 20
    assert _unfairness(FairQueue(Crowd(UNBOUNDED)), before, both) <= 2 * LARGEST
    monkeypatch.setattr(Counters, "join", lambda counters, key: counters._given.setdefault(key, 0.0))
    assert _unfairness(FairQueue(Crowd(UNBOUNDED)), before, both) > 10 * LARGEST


def test_who_leaves_sheds_no_debt(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant always waits; the other comes with a large request, is served, leaves, and comes with the next one.
    What it was given counts all the same. The control lets everybody begin anew.
    """

    def served() -> int:
        queue = FairQueue[int](Crowd(UNBOUNDED))
        for number in range(200):
            queue.put(number, Ask("u", 0, 10), 0.0)
        count = 0
        queue.put(200, Ask("t", 0, 90), 0.0)
        for number in range(201, 301):
            if taken(queue)[1].tenant == "t":
                count += 1
                queue.put(number, Ask("t", 0, 90), 0.0)
        return count

    assert 9 <= served() <= 11
    monkeypatch.setattr(Counters, "join", lambda counters, key: counters._given.update({key: counters._floor}))
    assert served() > 40


# Weights


@pytest.mark.parametrize("weight", [1, 3, 10])
def test_a_tenant_of_more_weight_is_given_more(weight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as its weight says while both wait. The control weighs nobody."""

    def share() -> float:
        queue, given = FairQueue[int](Crowd(UNBOUNDED)), Counter[str]()
        for number in range(880):
            queue.put(number, Ask("tu"[number % 2], 0, 10, weight=weight if number % 2 else 1), 0.0)
        for _ in range(440):
            given[taken(queue)[1].tenant] += 1
        return given["u"] / 440

    want = weight / (weight + 1)
    assert abs(share() - want) < 0.01
    monkeypatch.setattr(Counters, "give", lambda counters, key, amount: give(counters, key, 10.0))
    assert abs(share() - 0.5) < 0.01


give = Counters.give


# Ranks


@pytest.mark.parametrize("rank", list(Rank))
def test_no_rank_starves(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all three wait each is given its weight's share, within a request of it. The control serves the highest."""

    def share() -> float:
        queue, given = FairQueue[int](Crowd(UNBOUNDED)), Counter[Rank]()
        for number in range(3 * 420):
            queue.put(number, Ask("t", 0, 10, Rank(number % 3)), 0.0)
        for _ in range(420):
            given[taken(queue)[1].rank] += 1
        return given[rank] / 420

    want = WEIGHTS[rank] / sum(WEIGHTS.values())
    assert abs(share() - want) < 0.01
    monkeypatch.setattr(Counters, "of", lambda counters, key: -key if isinstance(key, Rank) else 0.0)
    assert share() == (rank is Rank.INTERACTIVE)


# Deadlines


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.data())
def test_the_earliest_deadline_of_a_tenant_is_next(deadlines: list[float], data: st.DataObject) -> None:
    """In order of arrival where they are equal, whoever leaves in between."""
    queue = FairQueue[int](Crowd(UNBOUNDED))
    for number, deadline_s in enumerate(deadlines):
        queue.put(number, Ask("t", 0, 10), deadline_s)
    leaving = data.draw(st.sets(st.sampled_from(range(len(deadlines)))))
    for number in leaving:
        queue.discard(number)
    want = sorted(set(range(len(deadlines))) - leaving, key=lambda number: (deadlines[number], number))
    assert [taken(queue)[0] for _ in range(len(queue))] == want


def test_the_order_of_arrival_knows_no_deadline() -> None:
    """The control."""
    queue = Arrivals(Crowd(UNBOUNDED))
    queue.put(0, Ask("t", 0, 10), 9.0)
    queue.put(1, Ask("t", 0, 10), 1.0)
    assert taken(queue)[0] == 0


# Settlement


@given(st.lists(st.tuples(st.sampled_from("tu"), RANKS, TOKENS, st.integers(0, LARGEST)), max_size=40))
def test_what_was_settled_is_what_was_taken(history: list[tuple[str, Rank, int, int]]) -> None:
    """Estimates leave no trace: the counters are those of a queue that knew from the start what each would take."""
    guessing, knowing = FairQueue[int](Crowd(UNBOUNDED)), FairQueue[int](Crowd(UNBOUNDED))
    for queue in (guessing, knowing):
        for rank in Rank:
            queue._given.join(rank)
            queue._lanes[rank] = _Lane(given=Counters({"t": 0.0, "u": 0.0}))
    for tenant, rank, guess, tokens in history:
        weight = {"t": 1, "u": 3}[tenant]
        ask = Ask(tenant, 0, guess, rank, weight=weight)
        for queue, each in ((guessing, ask), (knowing, Ask(tenant, 0, tokens, rank, weight=weight))):
            queue._give(each)
        guessing.settle(ask, tokens)
    for rank in Rank:
        assert guessing._given.of(rank) == pytest.approx(knowing._given.of(rank))
        for tenant in "tu":
            assert guessing._lanes[rank].given.of(tenant) == pytest.approx(knowing._lanes[rank].given.of(tenant))


# A flood, in virtual time


def _quiet_waits(queue: FairQueue[int], slots: int, every: int) -> list[int]:
    """One tenant sends 1,000 requests at once; another one sends one in each `every` steps. A slot is held for `slots`
    steps, so one comes free in each. How many steps each of the quiet ones waited.
    """
    for number in range(1000):
        queue.put(number, Ask("loud", 0, 10), 0.0)
    sent: dict[int, int] = {}
    waits = []
    for step in range(400):
        if step % every == 0:
            sent[1000 + step] = step
            queue.put(1000 + step, Ask("quiet", 0, 10), 0.0)
        entry, _ = taken(queue)
        if entry in sent:
            waits.append(step - sent.pop(entry))
    return waits + [400 - step for step in sent.values()]


def test_a_flood_is_the_flooders() -> None:
    """Each of the quiet tenant's requests waits at most one service time; first come first served, hundreds of them."""
    assert max(_quiet_waits(FairQueue(Crowd(UNBOUNDED)), 8, 16)) <= 8
    assert min(_quiet_waits(Arrivals(Crowd(UNBOUNDED)), 8, 16)) > 8


def test_counters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tenants have been here, also while they wait."""
    monkeypatch.setattr(fair, "KEPT", 10)
    queue = FairQueue[int](Crowd(UNBOUNDED))
    for number in range(100):
        queue.put(number, Ask(f"t{number}", 0, 10), 0.0)
        assert len(queue._lanes[Rank.INTERACTIVE].given._given) <= 10
    assert sorted(taken(queue)[0] for _ in range(100)) == list(range(100))
    queue.check_integrity()


@pytest.mark.parametrize(
    ("ask", "deadline_s", "want"),
    [
        pytest.param(Ask("t", 1, 5), 10.0, 30, id="those with less time"),
        pytest.param(Ask("t", 1, 5), 2.0, 10, id="not those with as much"),
        pytest.param(Ask("t", 1, 5), 1.0, 0, id="who has the least time is next"),
        pytest.param(
            Ask("t", 1, 5, Rank.BATCH), 10.0, 1, id="not those of another rank; what has no tokens counts one"
        ),
        pytest.param(Ask("u", 1, 5), 10.0, 40, id="not another tenant's"),
        pytest.param(Ask("v", 1, 5), 10.0, 0, id="a tenant of which nobody waits"),
    ],
)
def test_what_is_certainly_served_before(ask: Ask, deadline_s: float, want: int) -> None:
    """One of tenant t has left."""
    queue = FairQueue[int](Crowd(UNBOUNDED))
    for entry, (tenant, tokens, at_s, rank) in enumerate(
        [
            ("t", 10, 1.0, Rank.INTERACTIVE), ("t", 20, 2.0, Rank.INTERACTIVE), ("t", 99, 3.0, Rank.INTERACTIVE),
            ("t", 0, 4.0, Rank.BATCH), ("u", 40, 5.0, Rank.INTERACTIVE),
        ]
    ):  # fmt: skip
        queue.put(entry, Ask(tenant, 1, tokens, rank), at_s)
    queue.discard(2)
    assert queue.tokens_before(ask, deadline_s) == want


def test_one_that_had_no_use_of_its_turn_is_first_again() -> None:
    """Before those of its tenant with the same deadline, and uncharged: else another tenant would be next."""
    queue: FairQueue[str] = FairQueue(Crowd(UNBOUNDED))
    for entry, ask in (("t1", Ask("t", 0, 100)), ("t2", Ask("t", 0, 100)), ("u1", Ask("u", 0, 100))):
        queue.put(entry, ask, 5.0)
    for _ in range(3):
        found = queue.take()
        assert found is not None
        assert found[0] == "t1"
        queue.put_first("t1", found[1], 5.0)
        queue.check_integrity()
    assert [taken[0] for taken in iter(queue.take, None)] == ["t1", "u1", "t2"]


ENTRIES = st.lists(st.tuples(st.floats(0, 100_000), st.integers(1, 100)), max_size=40)


@given(ENTRIES, st.floats(0, 100_000), st.integers(0, 40))
def test_it_is_the_sum(entries: list[tuple[float, int]], deadline_s: float, leaving: int) -> None:
    """Of those that are before by a whole sixteenth, after some have left; nothing is kept of who is gone."""
    tally = Tally()
    for at_s, tokens in entries:
        tally.add(at_s, tokens)
    for at_s, tokens in entries[:leaving]:
        tally.add(at_s, -tokens)
    stay = entries[leaving:]
    want = sum(tokens for at_s, tokens in stay if int(at_s * FINEST) < int(deadline_s * FINEST))
    assert tally.before(deadline_s) == want
    assert tally.total() == sum(tokens for _, tokens in stay)
    for at_s, tokens in stay:
        tally.add(at_s, -tokens)
    assert not any(tally._sums)
