"""The order in which they are shed, as a table; and the quick search against one that looks at everybody."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.policy import crowd as module
from activator.policy.ask import Ask, Rank
from activator.policy.bounds import Bound, Load
from activator.policy.crowd import GRACE, Crowd, Tallest, Tier, tier_of

BOUND = Bound(4, 1000, 1000)  # too few places for any rank to keep one
LARGE = Bound(42, 4200, 4200)  # batch keeps two of them, standard eight
F, S, B = Rank.INTERACTIVE, Rank.STANDARD, Rank.BATCH


@dataclass(frozen=True, eq=False)
class Standing:
    """One who waits."""

    ask: Ask


def _one(tenant: str, rank: Rank = F, weight: int = 1, tokens: int = 1) -> Standing:
    return Standing(Ask(tenant, 1, tokens, rank, None, weight))


@pytest.mark.parametrize(
    ("waiting", "want"),
    [
        pytest.param([_one("t", B), _one("t"), _one("u", S)], (Tier.BATCH, 0), id="batch, before anything else"),
        pytest.param([*(_one("t") for _ in range(4)), _one("u", S)], (Tier.OVER, 3), id="then the hog's"),
        pytest.param(
            [*(_one("t") for _ in range(3)), _one("t", S), _one("t"), _one("u", S)], (Tier.OVER, 3),
            id="of the hog's its lowest",
        ),
        pytest.param([_one("t"), _one("u", S)], (Tier.STANDARD, 1), id="then standard"),
        pytest.param([_one("t"), _one("u")], (Tier.INTERACTIVE, 0), id="interactive last"),
        pytest.param([_one("t"), _one("t")], (Tier.INTERACTIVE, 1), id="of equals the newest"),
        pytest.param([_one("u", B), _one("t", B), _one("t", B)], (Tier.BATCH, 2), id="of who holds most"),
        pytest.param(
            [*(_one("t", weight=4) for _ in range(4)), _one("u"), _one("u", S)], (Tier.OVER, 5),
            id="four are no more than a weight of four may have",
        ),
        pytest.param([_one("t", tokens=900), _one("u"), _one("u")], (Tier.OVER, 0), id="tokens fill a queue, too"),
        pytest.param([*(_one("t") for _ in range(9))], (Tier.INTERACTIVE, 8), id="who is alone is not over its share"),
    ],
)  # fmt: skip
def test_the_order(waiting: list[Standing], want: tuple[Tier, int]) -> None:
    """Why, and the number of the one that goes first."""
    crowd = Crowd[Standing](BOUND)
    for standing in waiting:
        crowd.add(standing)
    tier, lowest = crowd.lowest("")
    assert (tier, waiting.index(lowest)) == want


def test_of_equal_tenants_the_one_that_came_last_goes() -> None:
    """So that nobody makes way for an equal; else it is the first by name."""
    crowd = Crowd[Standing](BOUND)
    for standing in (first := _one("t"), last := _one("u")):
        crowd.add(standing)
    assert crowd.lowest("u")[1] is last
    assert crowd.lowest("t")[1] is first
    assert crowd.lowest("v")[1] is first


def test_of_one_tenant_its_own_order_counts() -> None:
    """Where its own queue is full, others' are not in question."""
    crowd = Crowd[Standing](BOUND)
    first, second, third = _one("t"), _one("t", S), _one("u", B)
    for standing in (first, second, third):
        crowd.add(standing)
    assert crowd.lowest_of("t", BOUND) == (Tier.STANDARD, second)
    assert crowd.lowest_of("t", LARGE) == (Tier.INTERACTIVE, first), "it keeps its standard one"


@pytest.mark.parametrize(
    ("waiting", "want"),
    [
        pytest.param([(B, 2), (F, 40)], (Tier.INTERACTIVE, 41), id="two of batch stay"),
        pytest.param([(B, 3), (F, 39)], (Tier.BATCH, 2), id="the third goes, before anything else"),
        pytest.param([(S, 8), (F, 34)], (Tier.INTERACTIVE, 41), id="eight of standard stay"),
        pytest.param([(S, 9), (F, 33)], (Tier.STANDARD, 8), id="the ninth goes"),
        pytest.param([(B, 2), (S, 9), (F, 31)], (Tier.STANDARD, 10), id="who is next in the order goes instead"),
        pytest.param([(B, 1)], (Tier.BATCH, 0), id="where nobody else waits all of them may go"),
    ],
)
def test_what_a_lower_rank_keeps(waiting: list[tuple[Rank, int]], want: tuple[Tier, int]) -> None:
    """As large a part of the queue as it has of the slots; of many places, and of one tenant."""
    crowd, each = Crowd[Standing](LARGE), [_one("t", rank) for rank, count in waiting for _ in range(count)]
    for standing in each:
        crowd.add(standing)
    tier, lowest = crowd.lowest("")
    assert (tier, each.index(lowest)) == want
    assert crowd.lowest_of("t", LARGE) == (tier, lowest)


@pytest.mark.parametrize(
    ("tokens", "want"),
    [pytest.param(200, Tier.INTERACTIVE, id="within its part"), pytest.param(201, Tier.BATCH, id="beyond it")],
)
def test_what_is_kept_is_a_part_of_the_tokens_too(tokens: int, want: Tier) -> None:
    """One request that is as large as many keeps nothing."""
    crowd = Crowd[Standing](LARGE)
    for standing in (_one("t", B, tokens=tokens), _one("t", tokens=4000)):
        crowd.add(standing)
    assert crowd.lowest("")[0] is want


def test_a_tenant_that_is_over_its_share_keeps_what_its_ranks_keep() -> None:
    """Its own interactive ones go: else they would starve its batch."""
    crowd, each = (
        Crowd[Standing](LARGE),
        [_one("t", B), *(_one("t") for _ in range(30)), *(_one("u") for _ in range(9))],
    )
    for standing in each:
        crowd.add(standing)
    tier, lowest = crowd.lowest("")
    assert (tier, each.index(lowest)) == (Tier.OVER, 30)


def _looked_up(waiting: list[Standing], last: str, bound: Bound) -> tuple[Tier, Standing]:
    """As the order says, by a look at everybody."""
    weights = {standing.ask.tenant: standing.ask.weight for standing in waiting}
    loads = {tenant: Load() for tenant in weights}
    in_all = Load()
    for standing in waiting:
        loads[standing.ask.tenant].add(standing.ask)
        in_all.add(standing.ask)

    def filled(load: Load) -> float:
        return max(load.entries / bound.entries, load.nbytes / bound.nbytes, load.tokens / bound.tokens)

    def share(tenant: str) -> float:
        return filled(loads[tenant]) / weights[tenant]

    ranks = {rank: Load() for rank in Rank}
    for standing in waiting:
        ranks[standing.ask.rank].add(standing.ask)
    kept = {rank for rank, part in ((B, 1 / 21), (S, 4 / 21)) if filled(ranks[rank]) <= part}

    def key(number: int) -> tuple[Tier, float, bool, str, Tier, int]:
        ask = waiting[number].ask
        tier = tier_of(ask)
        over = share(ask.tenant) > GRACE * filled(in_all) / sum(weights.values())
        why = Tier.OVER if over and tier is not Tier.BATCH else tier
        return why, -share(ask.tenant), ask.tenant != last, ask.tenant, tier, -number

    may_go = [number for number, standing in enumerate(waiting) if standing.ask.rank not in kept]
    first = min(may_go or range(len(waiting)), key=key)
    return key(first)[0], waiting[first]


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from("tuv"), st.sampled_from(list(Rank)), st.integers(1, 400)),
    max_size=60,
)


def _agrees(steps: list[tuple[int, str, Rank, int]], bound: Bound = BOUND) -> bool:
    crowd, waiting = Crowd[Standing](bound), list[Standing]()
    for what, tenant, rank, number in steps:
        if what and waiting:
            gone = waiting.pop(number % len(waiting))
            crowd.remove(gone)
        else:
            standing = _one(tenant, rank, {"t": 1, "u": 1, "v": 3}[tenant], number)
            waiting.append(standing)
            crowd.add(standing)
        crowd.check_integrity()
        if waiting and crowd.lowest(tenant) != _looked_up(waiting, tenant, bound):
            return False
    return True


@given(STEPS, st.sampled_from([BOUND, LARGE]))
def test_it_is_whom_a_look_at_everybody_finds(steps: list[tuple[int, str, Rank, int]], bound: Bound) -> None:
    """After any steps: so nobody is shed while a lower one waits, but for what its rank keeps."""
    assert _agrees(steps, bound)


def test_another_one_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the oldest in place of the newest."""
    monkeypatch.setattr(module, "_newest", lambda places: next(iter(places)))
    assert not _agrees([(0, "t", F, 1), (0, "t", F, 1)])


def test_a_change_of_weight_holds_for_all_that_wait() -> None:
    """From the next request on."""
    crowd = Crowd[Standing](BOUND)
    for standing in (_one("t"), _one("t"), _one("u"), _one("t", weight=8)):
        crowd.add(standing)
        crowd.check_integrity()
    assert crowd.lowest("")[1].ask.tenant == "u"


def test_what_it_keeps_is_bounded() -> None:
    """Who comes and leaves leaves nothing behind, also where others stay."""
    tallest = Tallest()
    tallest.rise("stays", 1.0)
    for number in range(1000):
        tallest.rise(f"t{number}", 0.5)
        tallest.drop(f"t{number}")
    assert len(tallest._heap) < 30


@pytest.mark.parametrize("tenants", [100, 10_000], ids=str)
def test_a_search_looks_at_few(tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait: tenants come, are found and leave, and of most of them the share is not looked up."""
    crowd = Crowd[Standing](Bound(tenants, 1 << 40, 1 << 40))
    waiting = [_one(f"t{number}", Rank(number % 3)) for number in range(tenants)]
    for standing in waiting:
        crowd.add(standing)
    looked = 0
    share = Crowd._share

    def counted(crowd: Crowd[Standing], tenant: str) -> float:
        nonlocal looked
        looked += 1
        return share(crowd, tenant)

    monkeypatch.setattr(Crowd, "_share", counted)
    for number in range(100):
        newcomer = _one(f"u{number}")
        crowd.add(newcomer)
        crowd.remove(crowd.lowest(newcomer.ask.tenant)[1])
    assert looked <= 100 * 12


def test_a_look_at_everybody_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""

    def look(tallest: Tallest, height_of: Callable[[str], float]) -> str | None:
        return min(tallest._said, key=lambda tenant: (-height_of(tenant), tenant), default=None)

    monkeypatch.setattr(Tallest, "top", look)
    with pytest.raises(AssertionError):
        test_a_search_looks_at_few(100, monkeypatch)
