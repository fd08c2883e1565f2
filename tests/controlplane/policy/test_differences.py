"""How much a difference is, at most."""

from collections.abc import Sequence
from datetime import date

import pytest

from contracts.billing import Imbalance
from contracts.usage import ACK_TOKENS
from controlplane.policy.balance import Kind, LifetimeFacts, Range
from controlplane.policy.differences import (
    Ending,
    Size,
    Waiting,
    charged_by_receipt,
    device_micros,
    gaps,
    life_micros,
    of_hole,
    of_life,
    requests_micros,
    tokens_micros,
    unshipped,
)
from controlplane.policy.month import day_us
from controlplane.policy.rating import ANY_CLASS, DevicePrices, Prices

PRICES = Prices(
    from_us=day_us(date(2026, 1, 1)),
    per_tokens=1_000,
    prompt=1_000,
    cached=100,
    completion=3_000,
    request=5,
    device={ANY_CLASS: DevicePrices(20, 40, 10), "cpu-9": DevicePrices(1, 2, 300)},
)
LIFE = LifetimeFacts("rt", 10_000_000, 1_000_000, 1_000_000, 5_000_000, 3_000_000, 4, 4, 4, 4_000_000)


def changed(**figures: int) -> LifetimeFacts:
    """The life with other figures."""
    return LifetimeFacts(**{name: getattr(LIFE, name) for name in LifetimeFacts.__slots__} | figures)


@pytest.mark.parametrize(
    ("kind", "facts", "positions", "size"),
    [
        pytest.param(
            Kind.TIME_UNACCOUNTED, changed(total_us=12_000_000), 100, (0, 0, 2_000_000, 80), id="lived longer"
        ),
        pytest.param(Kind.TIME_UNACCOUNTED, changed(total_us=8_000_000), 100, (0, 0, 2_000_000, 80), id="lived less"),
        pytest.param(
            Kind.DEVICE_TIME_OVER, changed(recorded_device_us=7_000_000), 100, (0, 0, 2_000_000, 0), id="over"
        ),
        pytest.param(
            Kind.REQUESTS_MISSING, changed(recorded_requests=1), 100, (3, 300, 1_000_000, 900 + 15), id="three"
        ),
        pytest.param(
            Kind.REQUESTS_MISSING, changed(recorded_requests=1), None, (3, None, 1_000_000, None), id="unknown"
        ),
        pytest.param(
            Kind.REQUESTS_MISSING,
            changed(recorded_requests=1, recorded_device_us=9_000_000),
            100,
            (3, 300, 0, 900 + 15),
            id="no time is left for them",
        ),
        pytest.param(
            Kind.REQUESTS_EXTRA, changed(answered_requests=6), 100, (2, None, 4_000_000, None), id="two extra"
        ),
    ],
)
def test_of_a_life(kind: Kind, facts: LifetimeFacts, positions: int | None, size: Size) -> None:
    """Requests, tokens, device time, money; None is what nobody knows."""
    problem = Imbalance(kind=kind, subject="rt", detail="so it is")
    found = of_life(problem, facts, Ending("cpu-1", -9, positions), PRICES)
    assert (found.kind, found.subject, found.detail, found.fails) == (kind, "rt", "so it is", True)
    assert (found.requests, found.tokens, found.device_us, found.amount_micros) == size


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        pytest.param(0, "", id="it ended well"),
        pytest.param(-9, "the replica was killed by SIGKILL", id="killed"),
        pytest.param(-99, "the replica was killed by signal 99", id="a signal without a name"),
        pytest.param(3, "the replica ended with status 3", id="it failed"),
    ],
)
def test_how_a_replica_ended_is_said(status: int, cause: str) -> None:
    """As Popen.returncode."""
    problem = Imbalance(kind=Kind.REQUESTS_MISSING, subject="rt", detail="")
    assert of_life(problem, LIFE, Ending("cpu-1", status, 1), PRICES).cause == cause


def test_other_kinds_say_nothing_of_a_life() -> None:
    """A defect, and no difference."""
    with pytest.raises(ValueError, match="conflict"):
        of_life(Imbalance(kind=Kind.CONFLICT, subject="", detail=""), LIFE, Ending("cpu-1", 0, 1), PRICES)


@pytest.mark.parametrize(
    ("received", "want"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([(1, 5)], [], id="all of it"),
        pytest.param([(2, 5)], [(1, 1)], id="not the first"),
        pytest.param([(1, 2), (5, 6), (9, 9)], [(3, 4), (7, 8)], id="two gaps"),
    ],
)
def test_gaps(received: Sequence[Range], want: Sequence[Range]) -> None:
    """What is not there before the last that is."""
    assert list(gaps(received)) == want


def test_a_hole_has_its_number_and_nobody_s_money() -> None:
    """And whether the source's spool could still tell."""
    (found,) = of_hole("a-1", [(1, 2), (5, 6)], None)
    assert (found.detail, found.requests) == ("records 3 to 4 of this source never arrived; record 5 did", 2)
    assert (found.tokens, found.device_us, found.amount_micros) == (None, None, None)
    assert "gone" in found.cause
    (found,) = of_hole("a-1", [(2, 6)], Waiting(6, 6))
    assert found.detail.startswith("record 1 of this source")
    assert "gone" not in found.cause


def test_what_is_known_is_no_failure() -> None:
    """Tokens after the last acknowledgement at the price of completions; records on their way."""
    short = charged_by_receipt("req", "rt", 128, PRICES)
    assert (short.fails, short.tokens, short.amount_micros) == (False, ACK_TOKENS, ACK_TOKENS * 3)
    waiting = unshipped("a-1", Waiting(3, 10))
    assert (waiting.fails, waiting.requests, waiting.amount_micros) == (False, 7, None)


def test_money() -> None:
    """The dearest where it isn't known what was used; each part at its price where it is."""
    assert tokens_micros(PRICES, 1_000) == 3_000
    assert device_micros(PRICES, "cpu-1", 1_000_000) == 40
    assert device_micros(PRICES, "cpu-9", 1_000_000) == 300
    assert life_micros(PRICES, "cpu-1", 1_000_000, 2_000_000, 3_000_000) == 20 + 80 + 30
    assert requests_micros(PRICES, 2, 1_000, 400, 100) == 600 + 40 + 300 + 10
