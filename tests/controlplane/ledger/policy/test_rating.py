"""Amounts are exact integers with one rounding per line, in any order and batches."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.ledger.policy.rating import (
    SECOND_US,
    Bill,
    DevicePrices,
    Item,
    PriceBook,
    Prices,
    amount_micros,
    is_billable,
)
from tests.controlplane.usage_records import request_record

DAY_US = 86_400_000_000


def prices(
    from_day: int = 0, *, per: int = 1_000_000, prompt: int = 500_000, device: dict[str, DevicePrices] | None = None
) -> Prices:
    return Prices(
        from_us=from_day * DAY_US,
        per_tokens=per,
        prompt=prompt,
        cached=50_000,
        completion=1_500_000,
        request=7,
        device={"*": DevicePrices(20, 40, 10)} if device is None else device,
    )


@pytest.mark.parametrize(
    ("quantity", "price", "per", "want"),
    [
        pytest.param(1, 500_000, 1_000_000, 0, id="half of a micro-unit goes to the even zero"),
        pytest.param(3, 500_000, 1_000_000, 2, id="one and a half goes to the even two"),
        pytest.param(5, 500_000, 1_000_000, 2, id="two and a half goes to the even two"),
        pytest.param(500_001, 1, 1_000_000, 1, id="just over a half goes up"),
        pytest.param(499_999, 1, 1_000_000, 0, id="just under a half goes down"),
        pytest.param(1_000, 3, 1_000, 3, id="exact"),
        pytest.param(0, 3, 1_000, 0, id="nothing"),
        pytest.param(10**15, 10**15, 1_000, 10**27, id="any size"),
    ],
)
def test_amount(quantity: int, price: int, per: int, want: int) -> None:
    """Halves are rounded to even."""
    assert amount_micros(quantity, price, per) == want


@given(
    st.integers(min_value=0, max_value=10**12),
    st.integers(min_value=0, max_value=10**9),
    st.sampled_from([1, 1_000, 1_000_000]),
)
def test_amount_is_the_nearest(quantity: int, price: int, per: int) -> None:
    """It equals Python's rounding of the exact fraction."""
    assert amount_micros(quantity, price, per) == round(Fraction(quantity * price, per))


def test_lines_of_a_bill() -> None:
    """Cached tokens are prompt tokens at another price. Each item of each model has a line."""
    bill = Bill()
    bill.add_requests(prices(), "m", requests=2, prompt_tokens=1_000_000, cached_tokens=400_000, completion_tokens=10)
    bill.add_device_time(prices(), "m", "cpu-2", restore_us=SECOND_US // 2, active_us=3 * SECOND_US, idle_us=0)
    got = {(line.item, line.device_class): (line.quantity, line.amount_micros) for line in bill.lines()}
    assert got == {
        (Item.PROMPT, None): (600_000, 300_000),
        (Item.CACHED, None): (400_000, 20_000),
        (Item.COMPLETION, None): (10, 15),
        (Item.REQUEST, None): (2, 14),
        (Item.RESTORE, "cpu-2"): (500_000, 10),
        (Item.ACTIVE, "cpu-2"): (3_000_000, 120),
    }
    assert {line.since for line in bill.lines()} == {"1970-01-01"}


def test_device_classes() -> None:
    """A named class has its own price. Others have the price of "*", or are free without one."""
    own = prices(device={"cpu-2": DevicePrices(1_000_000, 0, 0), "*": DevicePrices(1, 0, 0)})
    none = prices(device={})
    for of, device_class, want in ((own, "cpu-2", 1_000_000), (own, "cpu-4", 1), (none, "cpu-2", 0)):
        bill = Bill()
        bill.add_device_time(of, "m", device_class, restore_us=SECOND_US, active_us=SECOND_US, idle_us=SECOND_US)
        assert [line.amount_micros for line in bill.lines()] == [0, 0, want]


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["a", "b"])), max_size=20),
    st.data(),
)
def test_order_and_batches_do_not_matter(added: list[tuple[int, int, str]], data: st.DataObject) -> None:
    """The bill does not depend on the order of its parts."""

    def bill_of(parts: list[tuple[int, int, str]]) -> Bill:
        bill = Bill()
        for prompt, completion, model in parts:
            bill.add_requests(
                prices(), model, requests=1, prompt_tokens=prompt, cached_tokens=0, completion_tokens=completion
            )
        return bill

    assert bill_of(added).lines() == bill_of(data.draw(st.permutations(added))).lines()


def test_rounding_per_record_gives_another_bill() -> None:
    """Negative control: a thousand half micro-units on one line cost 500; rounded one by one they cost none."""
    bill = Bill()
    for _ in range(1000):
        bill.add_requests(prices(), "m", requests=0, prompt_tokens=1, cached_tokens=0, completion_tokens=0)
    assert [line.amount_micros for line in bill.lines()] == [500]
    assert 1000 * amount_micros(1, 500_000, 1_000_000) == 0


@pytest.mark.parametrize(
    ("outcome", "delivered", "want"),
    [
        pytest.param("ok", 7, True, id="successful"),
        pytest.param("ok", 0, True, id="successful without a token"),
        pytest.param("replica_lost", 1, True, id="failed after one token"),
        pytest.param("cancelled", 0, False, id="cancelled before the first token"),
        pytest.param("overloaded", 0, False, id="shed"),
    ],
)
def test_successful_or_delivered_requests_are_charged(outcome: str, delivered: int, want: bool) -> None:
    """A request that delivered tokens or succeeded is charged."""
    assert is_billable(request_record(1, outcome=outcome, completion_tokens=delivered)) is want


def test_price_of_an_instant() -> None:
    """The first entry also counts before its date. Each other entry counts from midnight UTC of its date."""
    book = PriceBook("USD", (prices(10), prices(20), prices(40)))
    at = {5: 10, 10: 10, 19: 10, 20: 20, 39: 20, 40: 40, 99: 40}
    assert {day: book.prices_at(day * DAY_US).from_us // DAY_US for day in at} == at
    assert book.prices_at(20 * DAY_US - 1).from_us // DAY_US == 10


@given(
    st.lists(st.integers(min_value=0, max_value=100), min_size=1, max_size=6, unique=True).map(sorted),
    st.integers(min_value=0, max_value=120),
)
def test_every_day_has_the_latest_entry_that_has_begun(dates: list[int], day: int) -> None:
    """A day before all entries has the first one."""
    begun = [date for date in dates if date <= day]
    book = PriceBook("USD", tuple(prices(date) for date in dates))
    assert book.prices_at(day * DAY_US).from_us == (begun[-1] if begun else dates[0]) * DAY_US


@pytest.mark.parametrize(
    "days",
    [
        pytest.param((), id="empty"),
        pytest.param((2, 1), id="not ascending"),
        pytest.param((1, 1), id="twice the same date"),
    ],
)
def test_invalid_price_book_is_refused(days: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="price book"):
        PriceBook("USD", tuple(prices(day) for day in days))


def test_a_negative_quantity_is_a_defect() -> None:
    """It must not become a credit."""
    with pytest.raises(ValueError, match="negative"):
        Bill().add_requests(prices(), "m", requests=1, prompt_tokens=1, cached_tokens=2, completion_tokens=0)


def test_an_adjustment_may_take_back() -> None:
    """It has a line of its own that names the adjusted month and is rounded like any other."""
    bill = Bill()
    bill.add_requests(prices(), "m", requests=1, prompt_tokens=5, cached_tokens=0, completion_tokens=0)
    bill.add_requests(
        prices(), "m", requests=-1, prompt_tokens=-5, cached_tokens=0, completion_tokens=0, adjusts="2026-10"
    )
    own, taken_back = (line for line in bill.lines() if line.item == "prompt_tokens")
    assert (own.adjusts, own.quantity) == (None, 5)
    assert (taken_back.adjusts, taken_back.quantity, taken_back.amount_micros) == ("2026-10", -5, -own.amount_micros)
