"""Lost, double and unaccounted usage is found, without false alarms, and its largest possible size is computed."""

from dataclasses import replace
from datetime import date

import pytest

from controlplane.ledger.policy.discrepancies import (
    Discrepancy,
    DiscrepancyKind,
    Impact,
    LifetimeFacts,
    PriceLookup,
    SpoolPosition,
    check_lifetime,
    check_sequence_gaps,
    device_price_micros,
    max_device_price_micros,
    max_tokens_price_micros,
    report_charged_orphan,
    report_unshipped,
    requests_price_micros,
    tolerance_us,
)
from controlplane.ledger.policy.month import day_us
from controlplane.ledger.policy.rating import ANY_CLASS, DevicePrices, Prices
from controlplane.ledger.policy.sequence_ranges import Range
from kelvin.contracts.accounting.usage import ACK_TOKENS, RUNNING_REPORT_INTERVAL_S

PRICES = Prices(
    from_us=day_us(date(2026, 1, 1)),
    per_tokens=1_000,
    prompt=1_000,
    cached=100,
    completion=3_000,
    request=5,
    device={ANY_CLASS: DevicePrices(20, 40, 10), "cpu-9": DevicePrices(1, 2, 300)},
)
RATES = PriceLookup(lambda at_us: PRICES, lambda model, version: 100 if model == "m" else None)
GOOD = LifetimeFacts(
    runtime_id="rt-1",
    total_us=60_000_000,
    standby_us=10_000_000,
    restore_us=1_000_000,
    active_us=19_000_000,
    idle_us=30_000_000,
    requests=3,
    recorded_requests=3,
    answered_requests=3,
    recorded_device_us=18_000_000,
    is_cut=False,
    model="m",
    version="f" * 64,
    device_class="cpu-1",
    died_at_us=0,
    exit_status=0,
)


@pytest.mark.parametrize(
    ("life", "want"),
    [
        pytest.param(GOOD, [], id="all agrees"),
        pytest.param(replace(GOOD, idle_us=30_600_000), [], id="one percent over"),
        pytest.param(replace(GOOD, idle_us=29_400_000), [], id="one percent short"),
        pytest.param(
            replace(GOOD, idle_us=30_600_001), [DiscrepancyKind.TIME_UNACCOUNTED], id="more than one percent over"
        ),
        pytest.param(
            replace(GOOD, idle_us=29_399_999), [DiscrepancyKind.TIME_UNACCOUNTED], id="more than one percent short"
        ),
        pytest.param(replace(GOOD, recorded_device_us=19_600_000), [], id="requests used all of the active time"),
        pytest.param(
            replace(GOOD, recorded_device_us=19_600_001),
            [DiscrepancyKind.DEVICE_TIME_OVER],
            id="requests used more than the active time",
        ),
        pytest.param(
            replace(GOOD, recorded_requests=2), [DiscrepancyKind.REQUESTS_MISSING], id="a request record is missing"
        ),
        pytest.param(
            replace(GOOD, recorded_requests=4, answered_requests=4),
            [DiscrepancyKind.REQUESTS_EXTRA],
            id="one answered request too many",
        ),
        pytest.param(replace(GOOD, recorded_requests=4), [], id="a request that never reached the replica"),
        pytest.param(
            replace(GOOD, is_cut=True, recorded_requests=9, answered_requests=9, recorded_device_us=60_000_000),
            [DiscrepancyKind.CHARGED_SO_FAR],
            id="requests after the last report of a lost replica",
        ),
        pytest.param(
            replace(GOOD, is_cut=True, recorded_requests=2),
            [DiscrepancyKind.REQUESTS_MISSING, DiscrepancyKind.CHARGED_SO_FAR],
            id="a request before the last report is missing",
        ),
        pytest.param(
            replace(GOOD, recorded_requests=0, total_us=1),
            [DiscrepancyKind.TIME_UNACCOUNTED, DiscrepancyKind.REQUESTS_MISSING],
            id="two problems at once",
        ),
    ],
)
def test_lifetime_problems(life: LifetimeFacts, want: list[DiscrepancyKind]) -> None:
    """The parts must match the total, and the requests must match the runtime's own count."""
    found = list(check_lifetime(life, RATES))
    assert [problem.kind for problem in found] == want
    assert all(problem.subject == "rt-1" for problem in found)


@pytest.mark.parametrize(
    ("total_us", "want"),
    [
        pytest.param(0, 100_000, id="100 ms at least"),
        pytest.param(10_000_000, 100_000, id="both limits are equal"),
        pytest.param(60_000_000, 600_000, id="one percent of a long life"),
    ],
)
def test_tolerance(total_us: int, want: int) -> None:
    assert tolerance_us(total_us) == want


@pytest.mark.parametrize(
    ("life", "impact"),
    [
        pytest.param(replace(GOOD, total_us=62_000_000), Impact(0, 0, 2_000_000, 80), id="it lived longer"),
        pytest.param(replace(GOOD, total_us=58_000_000), Impact(0, 0, 2_000_000, 80), id="it lived less"),
        pytest.param(
            replace(GOOD, recorded_device_us=21_000_000), Impact(0, 0, 2_000_000, 0), id="over its active time"
        ),
        pytest.param(replace(GOOD, recorded_requests=0), Impact(3, 300, 1_000_000, 900 + 15), id="three missing"),
        pytest.param(
            replace(GOOD, recorded_requests=0, model="gone"), Impact(3, None, 1_000_000, None), id="unknown version"
        ),
        pytest.param(
            replace(GOOD, recorded_requests=0, recorded_device_us=19_500_000),
            Impact(3, 300, 0, 900 + 15),
            id="no device time is left",
        ),
        pytest.param(
            replace(GOOD, answered_requests=5, recorded_requests=5), Impact(2, None, 18_000_000, None), id="two extra"
        ),
        pytest.param(
            replace(GOOD, is_cut=True),
            Impact(0, 0, RUNNING_REPORT_INTERVAL_S * 1_000_000, RUNNING_REPORT_INTERVAL_S * 40),
            id="time since the last report",
        ),
    ],
)
def test_impact_of_lifetime_discrepancies(life: LifetimeFacts, impact: Impact) -> None:
    """The impact has requests, tokens, device time and money. None means unknown."""
    (found,) = check_lifetime(life, RATES)
    assert found.impact() == impact
    assert found.fails is not life.is_cut


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        pytest.param(0, "", id="a normal exit"),
        pytest.param(-9, "the replica was killed by SIGKILL", id="killed"),
        pytest.param(-99, "the replica was killed by signal 99", id="a signal without a name"),
        pytest.param(3, "the replica ended with status 3", id="a failure"),
    ],
)
def test_cause_says_how_a_replica_ended(status: int, cause: str) -> None:
    """The status is Popen's returncode."""
    (found,) = check_lifetime(replace(GOOD, recorded_requests=2, exit_status=status), RATES)
    assert found.cause == cause


def test_impact_is_computed_on_request_only() -> None:
    """The checks of a bill need neither prices nor the registry."""

    def refuse(*_: object) -> Prices:
        raise AssertionError("it was looked up")

    rates = PriceLookup(refuse, lambda *_: refuse().request)
    lives = [replace(GOOD, total_us=1), replace(GOOD, recorded_requests=0), replace(GOOD, is_cut=True)]
    findings: list[Discrepancy] = [found for life in lives for found in check_lifetime(life, rates)]
    assert len(findings) == 3
    with pytest.raises(AssertionError, match="looked up"):
        findings[0].impact()


@pytest.mark.parametrize(
    ("received", "want"),
    [
        pytest.param([], [], id="a source that sent nothing"),
        pytest.param([(1, 9)], [], id="no gap"),
        pytest.param([(2, 9)], ["record 1 of this source never arrived; record 2 did"], id="the first is lost"),
        pytest.param(
            [(1, 3), (7, 7), (9, 12)],
            [
                "records 4 to 6 of this source never arrived; record 7 did",
                "record 8 of this source never arrived; record 9 did",
            ],
            id="two holes",
        ),
    ],
)
def test_sequence_gaps_are_named(received: list[Range], want: list[str]) -> None:
    found = list(check_sequence_gaps("activator-1", received, None))
    assert [each.detail for each in found] == want
    assert {(each.kind, each.subject) for each in found} <= {(DiscrepancyKind.SEQUENCE_HOLE, "activator-1")}


def test_sequence_gap_has_no_known_price() -> None:
    """The cause says whether the source's spool still exists."""
    (found,) = check_sequence_gaps("a-1", [(1, 2), (5, 6)], None)
    assert found.impact() == Impact(2, None, None, None)
    assert "lost with its spool" in found.cause
    (found,) = check_sequence_gaps("a-1", [(2, 6)], SpoolPosition(6, 6))
    assert "gone" not in found.cause


def test_informational_discrepancies_do_not_fail() -> None:
    """Tokens since the last acknowledgement have the completion price. Unshipped records are still on their way."""
    short = report_charged_orphan("req", "rt", 0, 128, RATES)
    assert (short.fails, short.impact()) == (False, Impact(0, ACK_TOKENS, 0, ACK_TOKENS * 3))
    waiting = report_unshipped("a-1", SpoolPosition(3, 10))
    assert (waiting.fails, waiting.impact()) == (False, Impact(7, None, None, None))


def test_money() -> None:
    """If the use is unknown, the highest price applies. Otherwise each part has its own."""
    assert max_tokens_price_micros(PRICES, 1_000) == 3_000
    assert max_device_price_micros(PRICES, "cpu-1", 1_000_000) == 40
    assert max_device_price_micros(PRICES, "cpu-9", 1_000_000) == 300
    assert device_price_micros(PRICES, "cpu-1", 1_000_000, 2_000_000, 3_000_000) == 20 + 80 + 30
    assert requests_price_micros(PRICES, 2, 1_000, 400, 100) == 600 + 40 + 300 + 10
