"""Blocks taken from a shared bucket: members never use more than it had, even if messages are lost."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.limits.policy.gcra import MINUTE_S
from activator.limits.policy.token_block import LEASE_S, QUIET_S, RefillRequest, TokenBlock, block_size

LIMIT = 600


@dataclass
class SharedBucket:
    """A model of the script in `redis_rate_counter.py`."""

    full_at_s: float = 0.0

    def take(self, asked: RefillRequest, now_s: float) -> tuple[int, float]:
        """Return the granted units, and the seconds until the bucket is full."""
        per = MINUTE_S / LIMIT
        full = max(max(self.full_at_s, now_s) - asked.give * per, now_s)
        room = int(LIMIT - (full - now_s) / per + 1e-6)
        granted = max(0, min(room, asked.want)) if asked.want and room >= asked.need else 0
        self.full_at_s = full + granted * per
        return granted, self.full_at_s - now_s


@dataclass
class Members:
    """Several members over one bucket. Requests or answers between them may be lost."""

    blocks: list[TokenBlock]
    bucket: SharedBucket = field(default_factory=SharedBucket)
    now_s: float = 0.0
    running: list[tuple[TokenBlock, int]] = field(default_factory=list)
    used: list[tuple[float, int, int]] = field(default_factory=list)  # when, how much, all stocks before it

    def hold(self, block: TokenBlock, units: int, fate: str) -> bool:
        """Return whether a request was admitted."""
        if not block.try_hold(units, self.now_s):
            if block.refill_pause_s(units, self.now_s) is not None:
                return False
            self.send(block, block.build_refill_request(LIMIT, units, units, self.now_s), fate)
            if not block.try_hold(units, self.now_s):
                return False
        self.running.append((block, units))
        return True

    def send(self, block: TokenBlock, asked: RefillRequest, fate: str) -> None:
        """Send the request to the bucket. `fate`: heard, unheard (request lost) or unanswered (answer lost)."""
        if fate != "unheard":
            granted, full_in_s = self.bucket.take(asked, self.now_s)
        if fate == "heard":
            block.record_refill(asked, granted, full_in_s, self.now_s)
        else:
            block.record_unanswered(asked)

    def settle(self, used: int) -> None:
        """End the oldest request."""
        if self.running:
            block, held = self.running.pop(0)
            stocks = sum(max(0, each.stock) for each in self.blocks)
            self.used.append((self.now_s, min(used, held), stocks))
            block.settle(held, min(used, held), self.now_s)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "hold", "hold", "settle", "tend"]),
        st.integers(0, 2),
        st.integers(1, 120),
        st.floats(0, 3),
        st.sampled_from(["heard", "heard", "heard", "heard", "unheard", "unanswered"]),
    ),
    max_size=150,
)


@given(STEPS)
def test_members_never_use_more(steps: list[tuple[str, int, int, float, str]]) -> None:
    """Usage in any interval is at most the refill, one minute's worth, and the stocks taken before it."""
    members = Members([TokenBlock() for _ in range(3)])
    for what, which, units, gap_s, fate in steps:
        members.now_s += gap_s
        block = members.blocks[which]
        if what == "hold":
            members.hold(block, units, fate)
        elif what == "settle":
            members.settle(units)
        elif (asked := block.build_return_request(LIMIT, members.now_s)) is not None:
            members.send(block, asked, fate)
        assert all(each.held >= 0 for each in members.blocks)
        assert block.stock - block.held <= LIMIT
    for first, (since_s, _, stocks) in enumerate(members.used):
        total = 0
        for until_s, units, _ in members.used[first:]:
            total += units
            assert total <= LIMIT * ((until_s - since_s) / MINUTE_S + 1) + stocks + 1e-3


def test_a_block_is_used_until_its_time_is_over() -> None:
    """After its time, the rest of the block is returned with the next request to the bucket."""
    block = TokenBlock()
    asked = block.build_refill_request(LIMIT, 1, 1, 0.0)
    assert (asked.give, asked.need, asked.want) == (0, 1, 1 + block_size(LIMIT))
    block.record_refill(asked, 31, 3.1, 0.0)
    assert block.try_hold(31, LEASE_S - 0.1)
    assert not block.try_hold(1, LEASE_S - 0.1)
    block.settle(31, 10, LEASE_S - 0.1)
    assert block.build_return_request(LIMIT, LEASE_S - 0.1) is None
    assert not block.try_hold(1, LEASE_S)
    back = block.build_return_request(LIMIT, LEASE_S)
    assert back is not None
    assert (back.give, back.want) == (21, 0)
    block.record_refill(back, 0, 1.0, LEASE_S)
    assert block.build_return_request(LIMIT, LEASE_S) is None
    assert block.is_idle(LEASE_S + QUIET_S)


@pytest.mark.parametrize(
    ("granted", "asks", "want"),
    [
        pytest.param(31, 1, None, id="all of it: no pause"),
        pytest.param(5, 1, QUIET_S, id="less than wanted: a pause"),
        pytest.param(0, 1, QUIET_S, id="nothing: a pause"),
    ],
)
def test_depleted_bucket_is_not_asked_often(granted: int, asks: int, want: float | None) -> None:
    """A tenant at its limit does not query the bucket with each request."""
    block = TokenBlock()
    block.record_refill(block.build_refill_request(LIMIT, 1, 1, 0.0), granted, 60.0, 0.0)
    assert block.refill_pause_s(asks, 0.0) == want
    assert block.refill_pause_s(asks, QUIET_S) is None


def test_smaller_request_may_ask_after_a_refusal() -> None:
    """A refusal says nothing about smaller requests."""
    block = TokenBlock()
    block.record_refill(block.build_refill_request(LIMIT, 100, 100, 0.0), 0, 60.0, 0.0)
    assert block.refill_pause_s(100, 0.0) == QUIET_S
    assert block.refill_pause_s(99, 0.0) is None


def test_local_use_is_repaid_after_an_outage() -> None:
    """The local share begins with one block. Units used locally, minus the refill since, are owed to the bucket."""
    block, share = TokenBlock(), 60
    assert block.hold_locally(share, 4, 0.0).wait_s == pytest.approx(1.0)
    for _ in range(3):
        assert block.hold_locally(share, 1, 0.0).wait_s is None
        block.settle(1, 1, 0.0)
    assert block.hold_locally(share, 1, 0.0).wait_s == pytest.approx(1.0)
    asked = block.build_refill_request(LIMIT, 1, 1, 0.0)
    assert asked.give == -3
    block.record_unanswered(asked)
    assert block.hold_locally(share, 1, 0.5).wait_s == pytest.approx(0.5)  # as before
    asked = block.build_refill_request(LIMIT, 1, 1, 0.5)
    assert asked.give == -3
    block.record_refill(asked, 10, 5.0, 0.5)
    assert block.build_refill_request(LIMIT, 1, 1, 0.5).give == 10


def test_debt_is_reported_until_acknowledged() -> None:
    """Units used beyond the held ones are owed at once, and again if the bucket may not have heard."""
    block = TokenBlock()
    block.record_refill(block.build_refill_request(LIMIT, 1, 1, 0.0), 31, 3.1, 0.0)
    assert block.try_hold(31, 0.0)
    block.settle(31, 100, 0.0)
    for _ in range(2):
        asked = block.build_return_request(LIMIT, 0.0)
        assert asked is not None
        assert asked.give == -69
        block.record_unanswered(asked)
    asked = block.build_return_request(LIMIT, 0.0)
    assert asked is not None
    block.record_refill(asked, 0, 10.0, 0.0)
    assert block.build_return_request(LIMIT, 0.0) is None


def test_request_larger_than_the_share_is_admitted_in_time() -> None:
    """Without the bucket it is admitted once the whole share is available. The next one waits for the debt."""
    block = TokenBlock()
    wait_s = block.hold_locally(100, 300, 0.0).wait_s
    assert wait_s is not None
    assert block.hold_locally(100, 300, wait_s).wait_s is None
    block.settle(300, 300, wait_s)
    assert block.hold_locally(100, 300, wait_s).wait_s == MINUTE_S  # the longest wait that is reported
    assert block.hold_locally(100, 300, wait_s + 3 * MINUTE_S).wait_s is None


@pytest.mark.parametrize(("before", "after"), [(100, 1000), (1000, 100)])
def test_limit_changed_while_the_bucket_is_away_counts(before: int, after: int) -> None:
    """Used units count as units; the rest follows the new limit."""
    block = TokenBlock()
    assert block.hold_locally(before, 1, 0.0).wait_s is None
    block.settle(1, 1, 0.0)
    taken = 0
    while block.hold_locally(after, 1, MINUTE_S).wait_s is None:
        block.settle(1, 1, MINUTE_S)
        taken += 1
    assert taken == after
