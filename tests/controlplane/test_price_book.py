"""A price book is read strictly, and the shipped one is one."""

from datetime import date
from pathlib import Path

import pytest

from controlplane.policy.month import day_us
from controlplane.policy.rating import ANY_CLASS, DevicePrices
from controlplane.price_book import BadPriceBook, default_price_book, load_price_book, parse_price_book

GOOD = """
currency = "EUR"

[[prices]]
from = 2026-01-01
per_tokens = 1_000
prompt = 1
cached = 2
completion = 3
request = 4
device = { "*" = { restore = 5, active = 6, idle = 7 } }

[[prices]]
from = 2026-11-15
per_tokens = 1_000_000
prompt = 10
cached = 20
completion = 30
request = 40
[prices.device.cpu-2]
restore = 50
active = 60
idle = 70
"""


def test_a_book_of_two_entries(tmp_path: Path) -> None:
    """Every field, under its date."""
    (tmp_path / "book.toml").write_text(GOOD)
    book = load_price_book(tmp_path / "book.toml")
    first, second = book.prices
    assert book.currency == "EUR"
    assert (first.from_us, second.from_us) == (day_us(date(2026, 1, 1)), day_us(date(2026, 11, 15)))
    assert (first.per_tokens, first.prompt, first.cached, first.completion, first.request) == (1_000, 1, 2, 3, 4)
    assert first.device == {ANY_CLASS: DevicePrices(5, 6, 7)}
    assert second.device == {"cpu-2": DevicePrices(50, 60, 70)}


def test_the_shipped_book() -> None:
    """It prices tokens and every device class."""
    (prices,) = default_price_book().prices
    assert prices.prompt > prices.cached > 0
    assert ANY_CLASS in prices.device


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        pytest.param("prompt = 1\n", "", "prompt", id="a field is missing"),
        pytest.param("prompt = 1\n", "prompt = 1\nprompd = 1\n", "prompd", id="a field is unknown"),
        pytest.param("prompt = 1\n", "prompt = 0.5\n", "int", id="half a micro-unit"),
        pytest.param("prompt = 1\n", "prompt = -1\n", "prompt=-1", id="a negative price"),
        pytest.param("idle = 7", "idle = -7", "device.*.idle=-7", id="a negative device price"),
        pytest.param("per_tokens = 1_000\n", "per_tokens = 100\n", "per_tokens=100", id="an odd number of tokens"),
        pytest.param('"EUR"', '"euro"', "currency=euro", id="no currency"),
        pytest.param("2026-11-15", "2026-01-01", "ascend", id="two entries of one date"),
        pytest.param("2026-11-15", '"soon"', "date", id="no date"),
        pytest.param("[[prices]]", "[[prices", "book.toml", id="not TOML"),
    ],
)
def test_what_is_no_book(before: str, after: str, says: str) -> None:
    """Refused with the name of the file and what is wrong."""
    assert before in GOOD
    with pytest.raises(BadPriceBook) as caught:
        parse_price_book(GOOD.replace(before, after, 1), "book.toml")
    assert str(caught.value).startswith("book.toml: ")
    assert says in str(caught.value)


def test_a_book_without_entries() -> None:
    """There is always a price."""
    with pytest.raises(BadPriceBook, match="at least one"):
        parse_price_book('currency = "EUR"\nprices = []\n', "book.toml")
