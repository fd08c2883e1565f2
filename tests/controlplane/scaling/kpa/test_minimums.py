"""Minimums reserve idle slots. While other tenants wait, a tenant's minimums keep no more than its share."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.device_share import cap_minimums, tenant_share
from kelvin.contracts.accounting.spending import SpendingRow, TokenPrices
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Feed, TenantLimits, TenantRow
from tests.controlplane.scaling.autoscaler_fixture import FAST, AutoscalerScenario, replace_scale, running_autoscaler

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000), min_size=1)


def tenants(w: AutoscalerScenario, **weights: int) -> None:
    rows = (TenantRow(tenant=name, suspended=False, limits=TenantLimits(weight=each)) for name, each in weights.items())
    w.feed.publish(Feed(tenants=tuple(rows)))


def serving(w: AutoscalerScenario, model: str, tenant: str, count: int, **scale: float) -> VersionKey:
    """Add a model with `count` idle replicas."""
    which = w.catalogue.add(model, replace_scale(FAST, max=8, **scale), tenant=tenant)
    w.actuator.serving[which] = count
    return which


async def finish_moves(w: AutoscalerScenario) -> None:
    """Let every starting replica become ready and every draining one end."""
    for each in [which for which, count in w.actuator.draining.items() for _ in range(count)]:
        w.actuator.drained(each)
    for each in [which for which, count in w.actuator.starting.items() for _ in range(count)]:
        w.actuator.become_ready(each)


async def send_requests(w: AutoscalerScenario, pass_seconds: int, *which: VersionKey) -> None:
    """Send requests for these versions, once per second."""
    for _ in range(pass_seconds):
        for each in which:
            w.report(each, 1.0, 1 if w.actuator.live_count(each) == 0 else 0)
        await w.clock.advance(1.0)
        await finish_moves(w)
        w.scaler.check_integrity()


@pytest.mark.parametrize(
    ("weights", "kept"),
    [
        pytest.param({"a": 1, "b": 1}, 4, id="equal weights: half each"),
        pytest.param({"a": 3, "b": 1}, 6, id="the heavier tenant keeps more"),
        pytest.param({"a": 1, "b": 7}, 1, id="the lighter tenant keeps less"),
    ],
)
async def test_minimum_gives_way_to_other_tenants_up_to_its_share(weights: dict[str, int], kept: int) -> None:
    """One tenant reserves all eight slots. Requests for eight models of another tenant get the slots beyond its
    share.
    """
    async with running_autoscaler(slots=8) as w:
        tenants(w, **weights)
        pinned = serving(w, "pinned", "a", 8, min=8)
        others = [w.catalogue.add(f"m{number}", FAST, tenant="b") for number in range(8)]
        await w.pass_seconds(5)
        await send_requests(w, 40, *others)
        assert w.actuator.live_count(pinned) == kept
        assert sum(w.actuator.live_count(each) for each in others) == 8 - kept


async def test_minimum_is_whole_again_when_nobody_else_waits() -> None:
    """The other tenant's model scales to zero by itself, and the minimum gets the slot back."""
    async with running_autoscaler(slots=2) as w:
        tenants(w, a=1, b=1)
        pinned, other = serving(w, "pinned", "a", 2, min=2), w.catalogue.add("m", FAST, tenant="b")
        await w.pass_seconds(5)
        await send_requests(w, 5, other)
        assert (w.actuator.live_count(pinned), w.actuator.live_count(other)) == (1, 1)
        for _ in range(30):
            await w.clock.advance(1.0)
            await finish_moves(w)
        assert (w.actuator.live_count(pinned), w.actuator.live_count(other)) == (2, 0)


async def test_minimum_does_not_retake_a_slot_at_once() -> None:
    """Beside another tenant the share of one slot is zero. The other tenant's replica stays for its window and
    grace.
    """
    async with running_autoscaler(slots=1) as w:
        tenants(w, a=1, b=1)
        pinned, other = serving(w, "pinned", "a", 1, min=1), w.catalogue.add("m", FAST, tenant="b")
        await w.pass_seconds(5)
        await send_requests(w, 4, other)
        assert (w.actuator.live_count(pinned), w.actuator.live_count(other)) == (0, 1)
        await w.pass_seconds(5)
        assert (w.actuator.live_count(pinned), w.actuator.live_count(other)) == (0, 1)
        await w.pass_seconds(10)
        await finish_moves(w)
        assert (w.actuator.live_count(pinned), w.actuator.live_count(other)) == (1, 0)


async def test_minimums_of_two_tenants_take_no_slot_in_turns() -> None:
    """One slot, two minimums, no requests: the slot stays with its holder."""
    async with running_autoscaler(slots=1) as w:
        tenants(w, a=1, b=1)
        first = serving(w, "m", "a", 1, min=1)
        w.catalogue.add("n", replace_scale(FAST, min=1), tenant="b")
        for _ in range(60):
            await w.clock.advance(1.0)
            await finish_moves(w)
        assert w.actuator.starts == []
        assert w.actuator.ready_count(first) == 1


async def test_minimum_beyond_the_share_is_refused_when_it_is_set() -> None:
    """The error has the numbers. An existing minimum above the share may stay or be lowered."""
    async with running_autoscaler(slots=8) as w:
        tenants(w, a=1, b=1)
        serving(w, "m", "a", 1, min=2)
        serving(w, "n", "a", 1)
        serving(w, "o", "b", 1)
        model = w.catalogue.known["a", "n"]
        with pytest.raises(Refused) as refused:
            w.scaler.check_scale(model, replace_scale(model.scale, min=3, max=8))
        message = refused.value.failure.message
        assert "must be 2 or less: your tenant's share of 8 device slots is 4 at this moment" in message
        assert "minimums of your other models take 2" in message
        w.scaler.check_scale(model, replace_scale(model.scale, min=2, max=8))
        old = replace(model, scale=replace_scale(model.scale, min=8, max=8))
        w.scaler.check_scale(old, replace_scale(model.scale, min=8, max=9))
        w.scaler.check_scale(old, replace_scale(model.scale, min=7, max=8))


async def test_one_tenant_may_have_all_slots_while_it_is_alone() -> None:
    """The share counts only tenants that have models."""
    async with running_autoscaler(slots=4) as w:
        tenants(w, a=1, b=100)
        which = serving(w, "m", "a", 1)
        model = w.catalogue.known["a", "m"]
        w.scaler.check_scale(model, replace_scale(model.scale, min=4, max=8))
        with pytest.raises(Refused, match="must be 4 or less"):
            w.scaler.check_scale(model, replace_scale(model.scale, min=5, max=8))
        assert w.actuator.live_count(which) == 1


async def test_spent_budget_ends_replicas_after_their_streams() -> None:
    """A spent budget ends idle replicas despite a minimum. Running streams finish first. Another tenant's replica
    stays.
    """
    async with running_autoscaler() as w:
        pinned, warm = serving(w, "m", "a", 2, min=2), w.catalogue.add("w", replace_scale(FAST, idle="warm"))
        busy = serving(w, "b", "a", 1, min=1)
        w.actuator.serving[warm] = 1
        await w.pass_seconds(5, busy, 1.0)
        spend(w, "a", spent=99, budget=100)
        await w.pass_seconds(5, busy, 1.0)
        assert w.actuator.live_count(pinned) == 2, "the control: there is budget"
        spend(w, "a", spent=100, budget=100)
        await w.pass_seconds(5, busy, 1.0)
        assert (w.actuator.live_count(pinned), w.actuator.live_count(busy)) == (0, 1)
        assert w.actuator.live_count(warm) == 1, "another tenant's"
        await w.pass_seconds(5)
        assert w.actuator.live_count(busy) == 0, "its stream has ended"
        spend(w, "a", spent=0, budget=100)
        await w.pass_seconds(5)
        assert (w.actuator.live_count(pinned), w.actuator.live_count(busy)) == (2, 1), "after the new month began"


async def test_versions_of_spent_tenant_are_not_evaluated() -> None:
    """Its versions are forgotten like unused ones, although the month has weeks left."""
    async with running_autoscaler() as w:
        serving(w, "m", "a", 1)
        spend(w, "a", spent=100, budget=100)
        for _ in range(20):
            await w.clock.advance(1.0)
            await finish_moves(w)
        assert repr(w.scaler) == "<Autoscaler versions=0 awaiting_room=0>"


def spend(w: AutoscalerScenario, tenant: str, *, spent: int, budget: int) -> None:
    prices = TokenPrices(per_tokens=1, prompt=1, cached=1, completion=1, request=1)
    row = SpendingRow(tenant=tenant, month="2023-11", ends_at_us=1, prices=prices, seen={}, spent_micros=spent)
    limits = TenantLimits(budget_micros=budget)
    w.feed.publish(Feed(tenants=(TenantRow(tenant=tenant, suspended=False, limits=limits),), spending=(row,)))


@given(st.integers(0, 64), WEIGHTS)
def test_tenant_shares_fit_the_slots(slots: int, weights: dict[str, int]) -> None:
    """Shares are rounded down, so their sum fits."""
    parts = [tenant_share(slots, weights, tenant) for tenant in weights]
    assert min(parts) >= 0
    assert sum(parts) <= slots


@given(st.integers(0, 20), st.lists(st.tuples(st.integers(), st.integers(0, 9)), unique_by=lambda each: each[0]))
def test_capped_minimums_keep_at_most_the_share(slots: int, minimums: list[tuple[int, int]]) -> None:
    """No minimum is raised or negative, and all are kept whole if they fit."""
    kept = cap_minimums(slots, minimums)
    assert all(0 <= kept[key] <= minimum for key, minimum in minimums)
    assert sum(kept.values()) == min(slots, sum(minimum for _, minimum in minimums))
