"""A price book is read strictly, and the default one is valid."""

import asyncio
from datetime import date
from pathlib import Path

import pytest

from controlplane.app.app import run
from controlplane.billing.billing_report import CLOSING_DELAY_US, close_month
from controlplane.billing.price_book import BadPriceBook, default_price_book, load_price_book, parse_price_book
from controlplane.db.database import Database, sqlite_engine
from controlplane.ledger.closed_months import currencies
from controlplane.ledger.policy.month import day_us
from controlplane.ledger.policy.rating import ANY_CLASS, DevicePrices
from kelvin.contracts.setting_parser import BadSetting
from tests.controlplane.control_plane_server import settings
from tests.controlplane.usage_records import END_US, MONTH

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
[prices.device."*"]
restore = 0
active = 0
idle = 0
"""


def test_price_book_fields_are_read_by_entry(tmp_path: Path) -> None:
    """Every field is read, with the date of its entry."""
    (tmp_path / "book.toml").write_text(GOOD)
    book = load_price_book(tmp_path / "book.toml")
    first, second = book.prices
    assert book.currency == "EUR"
    assert (first.from_us, second.from_us) == (day_us(date(2026, 1, 1)), day_us(date(2026, 11, 15)))
    assert (first.per_tokens, first.prompt, first.cached, first.completion, first.request) == (1_000, 1, 2, 3, 4)
    assert first.device == {ANY_CLASS: DevicePrices(5, 6, 7)}
    assert second.device == {"cpu-2": DevicePrices(50, 60, 70), ANY_CLASS: DevicePrices(0, 0, 0)}


def test_default_price_book_prices_everything() -> None:
    """It has prices for tokens and for every device class."""
    (prices,) = default_price_book().prices
    assert prices.prompt > prices.cached > 0
    assert ANY_CLASS in prices.device


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        pytest.param("prompt = 1\n", "", "prices[0].prompt: is required", id="a field is missing"),
        pytest.param("prompt = 1\n", "prompt = 1\nprompd = 1\n", "prices[0].prompd=1: is no field", id="unknown"),
        pytest.param("currency", "monney = 1\ncurrency", "monney=1: is no field", id="an unknown field of the book"),
        pytest.param("prompt = 1\n", "prompt = 0.5\n", "prices[0].prompt=0.5: must be whole", id="half a micro-unit"),
        pytest.param("prompt = 1\n", "prompt = true\n", "prices[0].prompt=True: must be whole", id="not a number"),
        pytest.param("prompt = 1\n", "prompt = -1\n", "prices[0].prompt=-1: must be", id="a negative price"),
        pytest.param("request = 40", "request = 10000000000000000", "prices[1].request=1", id="a price over the limit"),
        pytest.param("idle = 7 ", "idle = -7 ", "prices[0].device.*.idle=-7: must be", id="a negative device price"),
        pytest.param("idle = 70\n", "", "prices[1].device.cpu-2.idle: is required", id="a phase without a price"),
        pytest.param("idle = 70\n", "idle = 70\nrest = 1\n", "prices[1].device.cpu-2.rest=1: is no", id="a bad phase"),
        pytest.param('"*"]', '"cpu-4"]', '[1].device=cpu-2, cpu-4: must have the class "*"', id="a missing class"),
        pytest.param("device.cpu-2]", f"device.{'h' * 65}]", "1 to 64 printable", id="a class of 65 letters"),
        pytest.param('device = { "*" = { restore = 5, active = 6, idle = 7 } }', "device = 1", "[0].device=1: must",
                     id="not a table of classes"),
        pytest.param("1_000\n", "100\n", "prices[0].per_tokens=100: must be 1000 or", id="tokens not allowed"),
        pytest.param('"EUR"', '"euro"', "currency='euro': must be three capital", id="not a currency"),
        pytest.param("2026-11-15", "2026-01-01", "prices[1].from=2026-01-01: must be later", id="two of one date"),
        pytest.param("2026-11-15", "2025-11-15", "prices[1].from=2025-11-15: must be later", id="periods that overlap"),
        pytest.param("2026-11-15", '"soon"', "prices[1].from='soon': must be a date", id="not a date"),
        pytest.param("2026-11-15", "2026-11-15T00:00:00Z", "must be a date", id="an instant"),
        pytest.param("[[prices]]", "[[prices", "book.toml", id="not TOML"),
    ],
)  # fmt: skip
def test_malformed_price_book_is_refused(before: str, after: str, says: str) -> None:
    """The error names the file and the problem."""
    assert before in GOOD
    with pytest.raises(BadPriceBook) as caught:
        parse_price_book(GOOD.replace(before, after, 1), "book.toml")
    assert str(caught.value).startswith("book.toml: ")
    assert says in str(caught.value)


def test_empty_price_book_is_refused() -> None:
    """At least one entry is required."""
    with pytest.raises(BadPriceBook, match="at least one"):
        parse_price_book('currency = "EUR"\nprices = []\n', "book.toml")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(None, "No such file", id="no file"),
        pytest.param(b"\xff", "is not UTF-8", id="not text"),
        pytest.param(b"currency = 1", "book.toml: prices: is required", id="not a price book"),
    ],
)
async def test_a_control_plane_refuses_to_start_without_its_book(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    """The error names the variable, the value and the rule."""
    book = tmp_path / "book.toml"
    if content is not None:
        book.write_bytes(content)
    with pytest.raises(BadSetting, match=rf"KELVIN_PRICE_BOOK={book}: .*{says}"):
        await run(settings(tmp_path, price_book=str(book)), asyncio.Event())


async def test_the_currency_of_closed_months_is_that_of_the_book(tmp_path: Path) -> None:
    """Late records of a closed month are charged on an open month's bill, and one bill has one currency."""
    database = Database(sqlite_engine(tmp_path / "kelvin.db"))
    with database.engine.begin() as connection:
        euros = parse_price_book(GOOD, "book.toml")
        close_month(connection, euros, "default", MONTH, live=None, now_us=END_US + CLOSING_DELAY_US)
        assert currencies(connection) == {"EUR"}
    database.close()
    with pytest.raises(BadSetting, match=r"its currency is USD, and there are closed months in EUR"):
        await run(settings(tmp_path), asyncio.Event())
