"""ShedOrder: in which order queued requests are shed, and that the heap search agrees with a full scan."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.queue.policy import shed_order as module
from activator.queue.policy.queue_bounds import QueueLimit, QueueUsage
from activator.queue.policy.queued_request import PriorityClass, QueuedRequest
from activator.queue.policy.shed_order import GRACE, LazyMaxHeap, ShedClass, ShedOrder, shed_class_of

BOUND = QueueLimit(4, 1000, 1000)  # too few places for any priority class to reserve one
LARGE = QueueLimit(42, 4200, 4200)  # batch reserves two places, standard eight
F, S, B = PriorityClass.INTERACTIVE, PriorityClass.STANDARD, PriorityClass.BATCH


@dataclass(frozen=True, eq=False)
class FakeQueueEntry:
    """A queued request."""

    queued_request: QueuedRequest


def _one(tenant: str, priority_class: PriorityClass = F, weight: int = 1, tokens: int = 1) -> FakeQueueEntry:
    return FakeQueueEntry(QueuedRequest(tenant, 1, tokens, priority_class, None, weight))


@pytest.mark.parametrize(
    ("waiting", "want"),
    [
        pytest.param([_one("t", B), _one("t"), _one("u", S)], (ShedClass.BATCH, 0), id="batch is shed first"),
        pytest.param([*(_one("t") for _ in range(4)), _one("u", S)], (ShedClass.OVER, 3), id="a tenant over its share"),
        pytest.param(
            [*(_one("t") for _ in range(3)), _one("t", S), _one("t"), _one("u", S)], (ShedClass.OVER, 3),
            id="of that tenant its lowest class",
        ),
        pytest.param([_one("t"), _one("u", S)], (ShedClass.STANDARD, 1), id="standard before interactive"),
        pytest.param([_one("t"), _one("u")], (ShedClass.INTERACTIVE, 0), id="interactive last"),
        pytest.param([_one("t"), _one("t")], (ShedClass.INTERACTIVE, 1), id="the newest among equals"),
        pytest.param([_one("u", B), _one("t", B), _one("t", B)], (ShedClass.BATCH, 2), id="of the largest tenant"),
        pytest.param(
            [*(_one("t", weight=4) for _ in range(4)), _one("u"), _one("u", S)], (ShedClass.OVER, 5),
            id="a weight of four allows four requests",
        ),
        pytest.param([_one("t", tokens=900), _one("u"), _one("u")], (ShedClass.OVER, 0), id="tokens count as well"),
        pytest.param(
            [*(_one("t") for _ in range(9))], (ShedClass.INTERACTIVE, 8), id="a single tenant is never over its share"
        ),
    ],
)  # fmt: skip
def test_shed_order_is_by_class_then_share(waiting: list[FakeQueueEntry], want: tuple[ShedClass, int]) -> None:
    """Expected are the reason and the index of the first request to shed."""
    shed_order = ShedOrder[FakeQueueEntry](BOUND)
    for waiter in waiting:
        shed_order.add(waiter)
    shed_class, next_to_shed = shed_order.next_to_shed("")
    assert (shed_class, waiting.index(next_to_shed)) == want


def test_newest_of_equal_tenants_is_shed() -> None:
    """The newcomer's tenant counts as the first among equals, so no equal request makes way. Otherwise the first by
    name goes.
    """
    shed_order = ShedOrder[FakeQueueEntry](BOUND)
    for waiter in (first := _one("t"), last := _one("u")):
        shed_order.add(waiter)
    assert shed_order.next_to_shed("u")[1] is last
    assert shed_order.next_to_shed("t")[1] is first
    assert shed_order.next_to_shed("v")[1] is first


def test_full_tenant_queue_sheds_by_the_tenants_own_order() -> None:
    """Other tenants' requests don't matter if the tenant's own queue is full."""
    shed_order = ShedOrder[FakeQueueEntry](BOUND)
    first, second, third = _one("t"), _one("t", S), _one("u", B)
    for waiter in (first, second, third):
        shed_order.add(waiter)
    assert shed_order.next_to_shed_of_tenant("t", BOUND) == (ShedClass.STANDARD, second)
    assert shed_order.next_to_shed_of_tenant("t", LARGE) == (ShedClass.INTERACTIVE, first), (
        "its standard request is reserved"
    )


@pytest.mark.parametrize(
    ("waiting", "want"),
    [
        pytest.param([(B, 2), (F, 40)], (ShedClass.INTERACTIVE, 41), id="two batch requests stay"),
        pytest.param([(B, 3), (F, 39)], (ShedClass.BATCH, 2), id="the third batch request is shed"),
        pytest.param([(S, 8), (F, 34)], (ShedClass.INTERACTIVE, 41), id="eight standard requests stay"),
        pytest.param([(S, 9), (F, 33)], (ShedClass.STANDARD, 8), id="the ninth standard request is shed"),
        pytest.param([(B, 2), (S, 9), (F, 31)], (ShedClass.STANDARD, 10), id="reserved batch stays, standard is shed"),
        pytest.param([(B, 1)], (ShedClass.BATCH, 0), id="a single class reserves nothing"),
    ],
)
def test_lower_priority_class_keeps_its_reserved_share(
    waiting: list[tuple[PriorityClass, int]], want: tuple[ShedClass, int]
) -> None:
    """The reserve is the class's part of the slots. It holds for the whole queue and within one tenant."""
    shed_order, each = (
        ShedOrder[FakeQueueEntry](LARGE),
        [_one("t", priority_class) for priority_class, count in waiting for _ in range(count)],
    )
    for waiter in each:
        shed_order.add(waiter)
    shed_class, next_to_shed = shed_order.next_to_shed("")
    assert (shed_class, each.index(next_to_shed)) == want
    assert shed_order.next_to_shed_of_tenant("t", LARGE) == (shed_class, next_to_shed)


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        pytest.param(200, ShedClass.INTERACTIVE, id="within the reserve"),
        pytest.param(201, ShedClass.BATCH, id="beyond the reserve"),
    ],
)
def test_reserved_share_applies_to_tokens(tokens: int, want: ShedClass) -> None:
    """One request as large as many is not protected."""
    shed_order = ShedOrder[FakeQueueEntry](LARGE)
    for waiter in (_one("t", B, tokens=tokens), _one("t", tokens=4000)):
        shed_order.add(waiter)
    assert shed_order.next_to_shed("")[0] is want


def test_tenant_over_its_share_keeps_its_class_reserves() -> None:
    """Its own interactive requests are shed, so that they don't starve its batch requests."""
    shed_order, each = (
        ShedOrder[FakeQueueEntry](LARGE),
        [_one("t", B), *(_one("t") for _ in range(30)), *(_one("u") for _ in range(9))],
    )
    for waiter in each:
        shed_order.add(waiter)
    shed_class, next_to_shed = shed_order.next_to_shed("")
    assert (shed_class, each.index(next_to_shed)) == (ShedClass.OVER, 30)


def _scan_all(waiting: list[FakeQueueEntry], last: str, bound: QueueLimit) -> tuple[ShedClass, FakeQueueEntry]:
    """Return the first request to shed by scanning all."""
    weights = {waiter.queued_request.tenant: waiter.queued_request.weight for waiter in waiting}
    loads = {tenant: QueueUsage() for tenant in weights}
    total = QueueUsage()
    for waiter in waiting:
        loads[waiter.queued_request.tenant].add(waiter.queued_request)
        total.add(waiter.queued_request)

    def filled(load: QueueUsage) -> float:
        return max(load.entries / bound.entries, load.nbytes / bound.nbytes, load.tokens / bound.tokens)

    def share(tenant: str) -> float:
        return filled(loads[tenant]) / weights[tenant]

    class_usage = {priority_class: QueueUsage() for priority_class in PriorityClass}
    for waiter in waiting:
        class_usage[waiter.queued_request.priority_class].add(waiter.queued_request)
    kept = {
        priority_class
        for priority_class, part in ((B, 1 / 21), (S, 4 / 21))
        if filled(class_usage[priority_class]) <= part
    }

    def key(number: int) -> tuple[ShedClass, float, bool, str, ShedClass, int]:
        queued_request = waiting[number].queued_request
        shed_class = shed_class_of(queued_request)
        over = share(queued_request.tenant) > GRACE * filled(total) / sum(weights.values())
        why = ShedClass.OVER if over and shed_class is not ShedClass.BATCH else shed_class
        return (
            why,
            -share(queued_request.tenant),
            queued_request.tenant != last,
            queued_request.tenant,
            shed_class,
            -number,
        )

    may_go = [number for number, waiter in enumerate(waiting) if waiter.queued_request.priority_class not in kept]
    first = min(may_go or range(len(waiting)), key=key)
    return key(first)[0], waiting[first]


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from("tuv"), st.sampled_from(list(PriorityClass)), st.integers(1, 400)),
    max_size=60,
)


def _agrees(steps: list[tuple[int, str, PriorityClass, int]], bound: QueueLimit = BOUND) -> bool:
    shed_order, waiting = ShedOrder[FakeQueueEntry](bound), list[FakeQueueEntry]()
    for what, tenant, priority_class, number in steps:
        if what and waiting:
            gone = waiting.pop(number % len(waiting))
            shed_order.remove(gone)
        else:
            waiter = _one(tenant, priority_class, {"t": 1, "u": 1, "v": 3}[tenant], number)
            waiting.append(waiter)
            shed_order.add(waiter)
        shed_order.check_integrity()
        if waiting and shed_order.next_to_shed(tenant) != _scan_all(waiting, tenant, bound):
            return False
    return True


@given(STEPS, st.sampled_from([BOUND, LARGE]))
def test_next_to_shed_matches_a_full_scan(steps: list[tuple[int, str, PriorityClass, int]], bound: QueueLimit) -> None:
    """This holds after any steps. So no request is shed while a lower one waits, except for the reserve
    of its class.
    """
    assert _agrees(steps, bound)


def test_control_shedding_the_oldest_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: shed the oldest instead of the newest."""
    monkeypatch.setattr(module, "_newest", lambda places: next(iter(places)))
    assert not _agrees([(0, "t", F, 1), (0, "t", F, 1)])


def test_changed_weight_applies_to_all_queued_requests() -> None:
    """The new weight applies from the next request on."""
    shed_order = ShedOrder[FakeQueueEntry](BOUND)
    for waiter in (_one("t"), _one("t"), _one("u"), _one("t", weight=8)):
        shed_order.add(waiter)
        shed_order.check_integrity()
    assert shed_order.next_to_shed("")[1].queued_request.tenant == "u"


def test_shed_order_memory_is_bounded() -> None:
    """Tenants that come and leave use no memory, even if another one stays."""
    heap = LazyMaxHeap()
    heap.raise_to("stays", 1.0)
    for number in range(1000):
        heap.raise_to(f"t{number}", 0.5)
        heap.drop(f"t{number}")
    assert len(heap._heap) < 30


@pytest.mark.parametrize("tenants", [100, 10_000], ids=str)
def test_search_recomputes_few_shares(tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tenants wait, few shares are computed per search."""
    shed_order = ShedOrder[FakeQueueEntry](QueueLimit(tenants, 1 << 40, 1 << 40))
    waiting = [_one(f"t{number}", PriorityClass(number % 3)) for number in range(tenants)]
    for waiter in waiting:
        shed_order.add(waiter)
    computed_shares = 0
    share = ShedOrder._share

    def counted(shed_order: ShedOrder[FakeQueueEntry], tenant: str) -> float:
        nonlocal computed_shares
        computed_shares += 1
        return share(shed_order, tenant)

    monkeypatch.setattr(ShedOrder, "_share", counted)
    for number in range(100):
        newcomer = _one(f"u{number}")
        shed_order.add(newcomer)
        shed_order.remove(shed_order.next_to_shed(newcomer.queued_request.tenant)[1])
    assert computed_shares <= 100 * 12


def test_control_full_scan_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def look(heap: LazyMaxHeap, height_of: Callable[[str], float]) -> str | None:
        return min(heap._upper_bounds, key=lambda tenant: (-height_of(tenant), tenant), default=None)

    monkeypatch.setattr(LazyMaxHeap, "top", look)
    with pytest.raises(AssertionError):
        test_search_recomputes_few_shares(100, monkeypatch)
