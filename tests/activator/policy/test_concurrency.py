"""Knative's three rules of reporting, on a clock of our own."""

from hypothesis import given
from hypothesis import strategies as st

from activator.policy.concurrency import ConcurrencyMeter, Report


def test_the_average_is_weighted_by_time() -> None:
    """Half a second of one, then of three: two."""
    meter = ConcurrencyMeter.starting(0.0)
    meter.begin(0.0)
    meter.begin(0.5)
    meter.begin(0.5)
    assert meter.report(1.0) == Report(2.0, 3)
    assert meter.report(2.0) == Report(3.0, 0)


def test_what_was_announced_is_taken_off_the_next_report() -> None:
    """The first stat is one of concurrency 1; the report of that second is less by it, its request counted once."""
    meter = ConcurrencyMeter.starting(0.0)
    meter.begin(0.0)
    meter.announce()
    meter.begin(0.0)
    assert meter.report(1.0) == Report(1.0, 1)
    assert meter.report(2.0) == Report(2.0, 0)


def test_a_report_is_never_below_nothing() -> None:
    """A short first request was announced as 1 and lasted less."""
    meter = ConcurrencyMeter.starting(0.0)
    meter.begin(0.0)
    meter.announce()
    meter.end(0.1)
    assert meter.report(1.0) == Report(0.0, 0)


def test_withdrawn_announcement_is_in_the_next_report() -> None:
    """Two announcements, one of which reached nobody: the next report is less by one."""
    meter = ConcurrencyMeter.starting(0.0)
    for _ in range(2):
        meter.begin(0.0)
        meter.announce()
    meter.withdraw()
    assert meter.report(1.0) == Report(1.0, 1)


def test_second_announcement_of_a_request_is_taken_off_too() -> None:
    """A request that waits is announced again after its report: the next report is less by one, not below nothing."""
    meter = ConcurrencyMeter.starting(0.0)
    meter.begin(0.0)
    meter.announce()
    meter.report(1.0)
    meter.announce()
    assert meter.report(2.0) == Report(0.0, 0)


def test_it_is_forgotten_after_a_second_of_nothing() -> None:
    """Not while something runs, and not in the second in which something ran."""
    meter = ConcurrencyMeter.starting(0.0)
    meter.begin(0.0)
    assert not meter.idle_since_report()
    meter.report(1.0)
    assert not meter.idle_since_report()
    meter.end(1.5)
    assert not meter.idle_since_report()
    meter.report(2.0)
    assert meter.idle_since_report()


@given(st.lists(st.tuples(st.floats(0, 0.9), st.floats(0.01, 0.9)), max_size=20))
def test_reports_add_up_to_the_time_that_requests_took(requests: list[tuple[float, float]]) -> None:
    """Nothing announced: the sum of averages times their seconds is the sum of durations."""
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
