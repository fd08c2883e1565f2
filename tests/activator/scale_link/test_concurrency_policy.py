"""Knative's three rules for reporting concurrency, on a manual clock, and concurrency weighted by tokens."""

from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.queue.policy.wait_estimate import MeasuredThroughput
from activator.scale_link.concurrency_policy import (
    MAX_CONCURRENCY,
    ConcurrencyMeter,
    ConcurrencyReport,
    RequestProgress,
    concurrency_by_tokens,
    remaining_tokens,
)


def test_the_average_is_weighted_by_time() -> None:
    """Half a second of one request and half a second of three average to two."""
    meter = ConcurrencyMeter.starting(0.0)
    meter.begin(0.0)
    meter.begin(0.5)
    meter.begin(0.5)
    assert meter.report(1.0) == ConcurrencyReport(2.0, 3)
    assert meter.report(2.0) == ConcurrencyReport(3.0, 0)


def test_what_was_announced_is_taken_off_the_next_report() -> None:
    """The announcement is a stat of concurrency 1. The report of that second is less by it and by its request."""
    meter = ConcurrencyMeter.starting(0.0)
    meter.begin(0.0)
    meter.announce()
    meter.begin(0.0)
    assert meter.report(1.0) == ConcurrencyReport(1.0, 1)
    assert meter.report(2.0) == ConcurrencyReport(2.0, 0)


def test_a_report_is_never_below_nothing() -> None:
    """A short first request was announced as 1 and lasted less."""
    meter = ConcurrencyMeter.starting(0.0)
    meter.begin(0.0)
    meter.announce()
    meter.end(0.1)
    assert meter.report(1.0) == ConcurrencyReport(0.0, 0)


def test_withdrawn_announcement_is_in_the_next_report() -> None:
    """One of two announcements was not delivered, so the next report is less by one."""
    meter = ConcurrencyMeter.starting(0.0)
    for _ in range(2):
        meter.begin(0.0)
        meter.announce()
    meter.withdraw_announcement()
    assert meter.report(1.0) == ConcurrencyReport(1.0, 1)


def test_second_announcement_of_a_request_is_taken_off_too() -> None:
    """A waiting request is announced again after its report. The next report is less by one, and not negative."""
    meter = ConcurrencyMeter.starting(0.0)
    meter.begin(0.0)
    meter.announce()
    meter.report(1.0)
    meter.announce()
    assert meter.report(2.0) == ConcurrencyReport(0.0, 0)


def test_idle_meter_is_forgotten_after_one_report() -> None:
    """The meter is kept while a request runs, and in the second in which one ran."""
    meter = ConcurrencyMeter.starting(0.0)
    meter.begin(0.0)
    assert not meter.was_idle_since_report()
    meter.report(1.0)
    assert not meter.was_idle_since_report()
    meter.end(1.5)
    assert not meter.was_idle_since_report()
    meter.report(2.0)
    assert meter.was_idle_since_report()


@given(st.lists(st.tuples(st.floats(0, 0.9), st.floats(0.01, 0.9)), max_size=20))
def test_reports_add_up_to_the_time_that_requests_took(requests: list[tuple[float, float]]) -> None:
    """Without announcements the averages times their seconds add up to the durations."""
    events = sorted([(at, 1) for at, _ in requests] + [(at + took, -1) for at, took in requests])
    meter = ConcurrencyMeter.starting(0.0)
    total, reported_at = 0.0, 0.0
    for at, step in events:
        while at >= reported_at + 0.25:
            reported_at += 0.25
            total += meter.report(reported_at).concurrency * 0.25
        (meter.begin if step > 0 else meter.end)(at)
    total += meter.report(3.0).concurrency * (3.0 - reported_at)
    assert abs(total - sum(took for _, took in requests)) < 1e-6


TEN = MeasuredThroughput(10.0, 1.0)  # tokens per second of a slot; all estimated tokens are computed
HALF = MeasuredThroughput(10.0, 0.5)


@pytest.mark.parametrize(
    ("each", "share", "want"),
    [
        pytest.param(RequestProgress(100, 0), 1.0, 100, id="all estimated tokens"),
        pytest.param(RequestProgress(100, 30), 1.0, 70, id="tokens not computed yet"),
        pytest.param(RequestProgress(100, 30), 0.5, 20, id="scaled by the usual share of the estimate"),
        pytest.param(RequestProgress(100, 80), 0.5, 0, id="a request beyond its expected tokens"),
    ],
)
def test_remaining_tokens_are_never_negative(each: RequestProgress, share: float, want: float) -> None:
    assert remaining_tokens(each, share) == want


@pytest.mark.parametrize(
    ("concurrency", "inside", "waiting", "measured", "backlog_s", "want"),
    [
        pytest.param(2.0, [RequestProgress(9000, 0)] * 2, 0, TEN, 0, 2.0, id="by requests: off"),
        pytest.param(2.0, [RequestProgress(9000, 0)] * 2, 2, None, 10, 2.0, id="by requests: nothing was measured"),
        pytest.param(2.0, [RequestProgress(100, 0)] * 2, 0, TEN, 10, 2.0, id="each is one backlog unit"),
        pytest.param(2.0, [RequestProgress(200, 0)] * 2, 0, TEN, 10, 4.0, id="each is two backlog units"),
        pytest.param(2.0, [RequestProgress(200, 100)] * 2, 0, TEN, 10, 2.0, id="half of each is computed"),
        pytest.param(2.0, [RequestProgress(200, 0)] * 2, 0, HALF, 10, 2.0, id="half of the estimate is never computed"),
        pytest.param(20.0, [RequestProgress(10, 0)] * 20, 0, TEN, 10, 20.0, id="short requests count as one each"),
        pytest.param(
            2.0,
            [RequestProgress(20_000, 0), RequestProgress(20, 0)],
            0,
            TEN,
            10,
            200.2,
            id="a long and a short request",
        ),
        pytest.param(0.3, [RequestProgress(10, 0)], 1, TEN, 10, 1.0, id="a new request that waits"),
        pytest.param(0.3, [RequestProgress(10, 0)], 0, TEN, 10, 0.3, id="a new request that runs"),
        pytest.param(0.3, [], 1, TEN, 10, 1.0, id="a waiting request without progress"),
        pytest.param(0.0, [], 0, TEN, 10, 0.0, id="no request"),
        pytest.param(1.0, [RequestProgress(1 << 40, 0)], 1, TEN, 0.001, MAX_CONCURRENCY, id="the result has a maximum"),
    ],
)
def test_concurrency_is_weighted_by_tokens(
    concurrency: float,
    inside: list[RequestProgress],
    waiting: int,
    measured: MeasuredThroughput | None,
    backlog_s: float,
    want: float,
) -> None:
    """Ten tokens per second of a slot, and a backlog of so many seconds counts as one request."""
    assert concurrency_by_tokens(concurrency, inside, waiting, measured, backlog_s) == pytest.approx(want)


_SOME = st.builds(RequestProgress, st.integers(1, 1 << 40), st.integers(0, 1 << 40))
_MEASURED = st.builds(MeasuredThroughput, st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))


@given(
    concurrency=st.floats(0, 1e6), inside=st.lists(_SOME, max_size=20), waiting=st.integers(0, 3),
    measured=st.none() | _MEASURED, backlog_s=st.just(0.0) | st.floats(1e-6, 3600), more=_SOME,
)  # fmt: skip
def test_weighted_concurrency_is_finite_and_monotonic(
    concurrency: float,
    inside: list[RequestProgress],
    waiting: int,
    measured: MeasuredThroughput | None,
    backlog_s: float,
    more: RequestProgress,
) -> None:
    """The result is finite and at least the concurrency, and at least 1 while a request waits. More work never reports
    less. Without a setting or a measurement it is the concurrency itself.
    """
    found = concurrency_by_tokens(concurrency, inside, waiting, measured, backlog_s)
    if measured is None or backlog_s == 0:
        assert found == concurrency
        return
    assert isfinite(found)
    assert max(concurrency, 1.0 if waiting else 0.0) <= found <= max(concurrency, MAX_CONCURRENCY, 1.0)
    assert concurrency_by_tokens(concurrency, [*inside, more], waiting, measured, backlog_s) >= found
    longer = [RequestProgress(each.estimated + more.estimated, each.computed) for each in inside]
    assert concurrency_by_tokens(concurrency, longer, waiting, measured, backlog_s) >= found
    further = [RequestProgress(each.estimated, each.computed + more.computed) for each in inside]
    assert concurrency_by_tokens(concurrency, further, waiting, measured, backlog_s) <= found
    assert concurrency_by_tokens(concurrency, inside, waiting, measured, backlog_s / 2) >= found, (
        "a shorter backlog asks for more"
    )


@given(target=st.integers(1, 1000), speed=st.floats(0.1, 1000), backlog_s=st.floats(0.1, 1000), share=st.floats(0.1, 1))
def test_work_of_target_slots_is_reported_as_target(target: int, speed: float, backlog_s: float, share: float) -> None:
    """Work that `target` slots compute in `backlog_s` is reported as `target`, as Knative expects of one replica."""
    tokens = target * speed * backlog_s
    inside = [RequestProgress(1_000_000, 0)] * int(tokens // (1_000_000 * share))
    rest = tokens - len(inside) * 1_000_000 * share
    by = concurrency_by_tokens(
        0.0, [*inside, RequestProgress(round(rest / share), 0)], 0, MeasuredThroughput(speed, share), backlog_s
    )
    assert by == pytest.approx(target, abs=1 / (speed * backlog_s) + 1e-6)
