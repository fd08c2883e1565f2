"""The order in which they are shed, as a table; and the quick search against one that looks at everybody."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.queue.policy import shed_order as module
from activator.queue.policy.queue_bounds import QueueLimit, QueueUsage
from activator.queue.policy.queued_request import PriorityClass, QueuedRequest
from activator.queue.policy.shed_order import GRACE, LazyMaxHeap, ShedClass, ShedOrder, shed_class_of

BOUND = QueueLimit(4, 1000, 1000)  # too few places for any rank to keep one
LARGE = QueueLimit(42, 4200, 4200)  # batch keeps two of them, standard eight
F, S, B = PriorityClass.INTERACTIVE, PriorityClass.STANDARD, PriorityClass.BATCH


@dataclass(frozen=True, eq=False)
class FakeQueueEntry:
    """One who waits."""

    queued_request: QueuedRequest


def _one(tenant: str, priority_class: PriorityClass = F, weight: int = 1, tokens: int = 1) -> FakeQueueEntry:
    return FakeQueueEntry(QueuedRequest(tenant, 1, tokens, priority_class, None, weight))


@pytest.mark.parametrize(
    ("waiting", "want"),
    [
        pytest.param([_one("t", B), _one("t"), _one("u", S)], (ShedClass.BATCH, 0), id="batch, before anything else"),
        pytest.param([*(_one("t") for _ in range(4)), _one("u", S)], (ShedClass.OVER, 3), id="then the hog's"),
        pytest.param(
            [*(_one("t") for _ in range(3)), _one("t", S), _one("t"), _one("u", S)], (ShedClass.OVER, 3),
            id="of the hog's its lowest",
        ),
        pytest.param([_one("t"), _one("u", S)], (ShedClass.STANDARD, 1), id="then standard"),
        pytest.param([_one("t"), _one("u")], (ShedClass.INTERACTIVE, 0), id="interactive last"),
        pytest.param([_one("t"), _one("t")], (ShedClass.INTERACTIVE, 1), id="of equals the newest"),
        pytest.param([_one("u", B), _one("t", B), _one("t", B)], (ShedClass.BATCH, 2), id="of who holds most"),
        pytest.param(
            [*(_one("t", weight=4) for _ in range(4)), _one("u"), _one("u", S)], (ShedClass.OVER, 5),
            id="four are no more than a weight of four may have",
        ),
        pytest.param([_one("t", tokens=900), _one("u"), _one("u")], (ShedClass.OVER, 0), id="tokens fill a queue, too"),
        pytest.param(
            [*(_one("t") for _ in range(9))], (ShedClass.INTERACTIVE, 8), id="who is alone is not over its share"
        ),
    ],
)  # fmt: skip
def test_shed_order_is_by_class_then_share(waiting: list[FakeQueueEntry], want: tuple[ShedClass, int]) -> None:
    """Why, and the number of the one that goes first."""
    crowd = ShedOrder[FakeQueueEntry](BOUND)
    for standing in waiting:
        crowd.add(standing)
    shed_class, next_to_shed = crowd.next_to_shed("")
    assert (shed_class, waiting.index(next_to_shed)) == want


def test_newest_of_equal_tenants_is_shed() -> None:
    """So that nobody makes way for an equal; else it is the first by name."""
    crowd = ShedOrder[FakeQueueEntry](BOUND)
    for standing in (first := _one("t"), last := _one("u")):
        crowd.add(standing)
    assert crowd.next_to_shed("u")[1] is last
    assert crowd.next_to_shed("t")[1] is first
    assert crowd.next_to_shed("v")[1] is first


def test_full_tenant_queue_sheds_by_the_tenants_own_order() -> None:
    """Where its own queue is full, others' are not in question."""
    crowd = ShedOrder[FakeQueueEntry](BOUND)
    first, second, third = _one("t"), _one("t", S), _one("u", B)
    for standing in (first, second, third):
        crowd.add(standing)
    assert crowd.next_to_shed_of_tenant("t", BOUND) == (ShedClass.STANDARD, second)
    assert crowd.next_to_shed_of_tenant("t", LARGE) == (ShedClass.INTERACTIVE, first), "it keeps its standard one"


@pytest.mark.parametrize(
    ("waiting", "want"),
    [
        pytest.param([(B, 2), (F, 40)], (ShedClass.INTERACTIVE, 41), id="two of batch stay"),
        pytest.param([(B, 3), (F, 39)], (ShedClass.BATCH, 2), id="the third goes, before anything else"),
        pytest.param([(S, 8), (F, 34)], (ShedClass.INTERACTIVE, 41), id="eight of standard stay"),
        pytest.param([(S, 9), (F, 33)], (ShedClass.STANDARD, 8), id="the ninth goes"),
        pytest.param([(B, 2), (S, 9), (F, 31)], (ShedClass.STANDARD, 10), id="who is next in the order goes instead"),
        pytest.param([(B, 1)], (ShedClass.BATCH, 0), id="where nobody else waits all of them may go"),
    ],
)
def test_lower_priority_class_keeps_its_reserved_share(
    waiting: list[tuple[PriorityClass, int]], want: tuple[ShedClass, int]
) -> None:
    """As large a part of the queue as it has of the slots; of many places, and of one tenant."""
    crowd, each = (
        ShedOrder[FakeQueueEntry](LARGE),
        [_one("t", priority_class) for priority_class, count in waiting for _ in range(count)],
    )
    for standing in each:
        crowd.add(standing)
    shed_class, next_to_shed = crowd.next_to_shed("")
    assert (shed_class, each.index(next_to_shed)) == want
    assert crowd.next_to_shed_of_tenant("t", LARGE) == (shed_class, next_to_shed)


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        pytest.param(200, ShedClass.INTERACTIVE, id="within its part"),
        pytest.param(201, ShedClass.BATCH, id="beyond it"),
    ],
)
def test_reserved_share_applies_to_tokens(tokens: int, want: ShedClass) -> None:
    """One request that is as large as many keeps nothing."""
    crowd = ShedOrder[FakeQueueEntry](LARGE)
    for standing in (_one("t", B, tokens=tokens), _one("t", tokens=4000)):
        crowd.add(standing)
    assert crowd.next_to_shed("")[0] is want


def test_a_tenant_that_is_over_its_share_keeps_what_its_ranks_keep() -> None:
    """Its own interactive ones go: else they would starve its batch."""
    crowd, each = (
        ShedOrder[FakeQueueEntry](LARGE),
        [_one("t", B), *(_one("t") for _ in range(30)), *(_one("u") for _ in range(9))],
    )
    for standing in each:
        crowd.add(standing)
    shed_class, next_to_shed = crowd.next_to_shed("")
    assert (shed_class, each.index(next_to_shed)) == (ShedClass.OVER, 30)


def _looked_up(waiting: list[FakeQueueEntry], last: str, bound: QueueLimit) -> tuple[ShedClass, FakeQueueEntry]:
    """As the order says, by a look at everybody."""
    weights = {standing.queued_request.tenant: standing.queued_request.weight for standing in waiting}
    loads = {tenant: QueueUsage() for tenant in weights}
    in_all = QueueUsage()
    for standing in waiting:
        loads[standing.queued_request.tenant].add(standing.queued_request)
        in_all.add(standing.queued_request)

    def filled(load: QueueUsage) -> float:
        return max(load.entries / bound.entries, load.nbytes / bound.nbytes, load.tokens / bound.tokens)

    def share(tenant: str) -> float:
        return filled(loads[tenant]) / weights[tenant]

    ranks = {priority_class: QueueUsage() for priority_class in PriorityClass}
    for standing in waiting:
        ranks[standing.queued_request.priority_class].add(standing.queued_request)
    kept = {
        priority_class for priority_class, part in ((B, 1 / 21), (S, 4 / 21)) if filled(ranks[priority_class]) <= part
    }

    def key(number: int) -> tuple[ShedClass, float, bool, str, ShedClass, int]:
        queued_request = waiting[number].queued_request
        shed_class = shed_class_of(queued_request)
        over = share(queued_request.tenant) > GRACE * filled(in_all) / sum(weights.values())
        why = ShedClass.OVER if over and shed_class is not ShedClass.BATCH else shed_class
        return (
            why,
            -share(queued_request.tenant),
            queued_request.tenant != last,
            queued_request.tenant,
            shed_class,
            -number,
        )

    may_go = [number for number, standing in enumerate(waiting) if standing.queued_request.priority_class not in kept]
    first = min(may_go or range(len(waiting)), key=key)
    return key(first)[0], waiting[first]


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from("tuv"), st.sampled_from(list(PriorityClass)), st.integers(1, 400)),
    max_size=60,
)


def _agrees(steps: list[tuple[int, str, PriorityClass, int]], bound: QueueLimit = BOUND) -> bool:
    crowd, waiting = ShedOrder[FakeQueueEntry](bound), list[FakeQueueEntry]()
    for what, tenant, priority_class, number in steps:
        if what and waiting:
            gone = waiting.pop(number % len(waiting))
            crowd.remove(gone)
        else:
            standing = _one(tenant, priority_class, {"t": 1, "u": 1, "v": 3}[tenant], number)
            waiting.append(standing)
            crowd.add(standing)
        crowd.check_integrity()
        if waiting and crowd.next_to_shed(tenant) != _looked_up(waiting, tenant, bound):
            return False
    return True


@given(STEPS, st.sampled_from([BOUND, LARGE]))
def test_next_to_shed_matches_a_full_scan(steps: list[tuple[int, str, PriorityClass, int]], bound: QueueLimit) -> None:
    """After any steps: so nobody is shed while a lower one waits, but for what its rank keeps."""
    assert _agrees(steps, bound)


def test_control_shedding_the_oldest_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the oldest in place of the newest."""
    monkeypatch.setattr(module, "_newest", lambda places: next(iter(places)))
    assert not _agrees([(0, "t", F, 1), (0, "t", F, 1)])


def test_changed_weight_applies_to_all_queued_requests() -> None:
    """From the next request on."""
    crowd = ShedOrder[FakeQueueEntry](BOUND)
    for standing in (_one("t"), _one("t"), _one("u"), _one("t", weight=8)):
        crowd.add(standing)
        crowd.check_integrity()
    assert crowd.next_to_shed("")[1].queued_request.tenant == "u"


def test_shed_order_memory_is_bounded() -> None:
    """Who comes and leaves leaves nothing behind, also where others stay."""
    tallest = LazyMaxHeap()
    tallest.raise_to("stays", 1.0)
    for number in range(1000):
        tallest.raise_to(f"t{number}", 0.5)
        tallest.drop(f"t{number}")
    assert len(tallest._heap) < 30


@pytest.mark.parametrize("tenants", [100, 10_000], ids=str)
def test_search_recomputes_few_shares(tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait: tenants come, are found and leave, and of most of them the share is not looked up."""
    crowd = ShedOrder[FakeQueueEntry](QueueLimit(tenants, 1 << 40, 1 << 40))
    waiting = [_one(f"t{number}", PriorityClass(number % 3)) for number in range(tenants)]
    for standing in waiting:
        crowd.add(standing)
    looked = 0
    share = ShedOrder._share

    def counted(crowd: ShedOrder[FakeQueueEntry], tenant: str) -> float:
        nonlocal looked
        looked += 1
        return share(crowd, tenant)

    monkeypatch.setattr(ShedOrder, "_share", counted)
    for number in range(100):
        newcomer = _one(f"u{number}")
        crowd.add(newcomer)
        crowd.remove(crowd.next_to_shed(newcomer.queued_request.tenant)[1])
    assert looked <= 100 * 12


def test_control_full_scan_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""

    def look(tallest: LazyMaxHeap, height_of: Callable[[str], float]) -> str | None:
        return min(tallest._upper_bounds, key=lambda tenant: (-height_of(tenant), tenant), default=None)

    monkeypatch.setattr(LazyMaxHeap, "top", look)
    with pytest.raises(AssertionError):
        test_search_recomputes_few_shares(100, monkeypatch)
