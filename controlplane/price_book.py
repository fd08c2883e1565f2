"""Reads a price book from TOML, strictly: an unknown or missing field, or a fraction of a micro-unit, is refused."""

import tomllib
from datetime import date
from importlib.resources import files
from pathlib import Path

import msgspec

from controlplane.policy.month import day_us
from controlplane.policy.rating import DevicePrices, PriceBook, Prices

MAX_MICROS = 10**15  # a billion per unit


class BadPriceBook(ValueError):
    """The file is not a price book; the text says where and why."""


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _Device(_Strict):
    restore: int
    active: int
    idle: int


class _Entry(_Strict):
    since: date = msgspec.field(name="from")
    per_tokens: int
    prompt: int
    cached: int
    completion: int
    request: int
    device: dict[str, _Device]


class _Book(_Strict):
    currency: str
    prices: list[_Entry]


def default_price_book() -> PriceBook:
    """The book that is shipped."""
    return parse_price_book(files("controlplane").joinpath("price_book.toml").read_text(), "price_book.toml")


def load_price_book(path: Path) -> PriceBook:
    """Raises OSError, BadPriceBook."""
    return parse_price_book(path.read_text(), path.name)


def parse_price_book(text: str, name: str) -> PriceBook:
    """Raises BadPriceBook naming `name`, the field and the rule."""
    try:
        book = msgspec.convert(tomllib.loads(text), _Book)
        return PriceBook(_currency(book.currency), tuple(_prices(entry) for entry in book.prices))
    except (tomllib.TOMLDecodeError, ValueError) as error:  # msgspec's are ValueErrors
        raise BadPriceBook(f"{name}: {error}") from error


def _currency(text: str) -> str:
    if len(text) != 3 or not text.isascii() or not text.isupper():
        raise ValueError(f"currency={text}: must be three capital letters (ISO 4217)")
    return text


def _prices(entry: _Entry) -> Prices:
    if entry.per_tokens not in (1_000, 1_000_000):
        raise ValueError(f"per_tokens={entry.per_tokens}: must be 1000 or 1000000")
    return Prices(
        from_us=day_us(entry.since),
        per_tokens=entry.per_tokens,
        prompt=_micros("prompt", entry.prompt),
        cached=_micros("cached", entry.cached),
        completion=_micros("completion", entry.completion),
        request=_micros("request", entry.request),
        device={
            name: DevicePrices(
                restore=_micros(f"device.{name}.restore", device.restore),
                active=_micros(f"device.{name}.active", device.active),
                idle=_micros(f"device.{name}.idle", device.idle),
            )
            for name, device in entry.device.items()
        },
    )


def _micros(field: str, value: int) -> int:
    if not 0 <= value <= MAX_MICROS:
        raise ValueError(f"{field}={value}: must be whole micro-units from 0 to {MAX_MICROS}")
    return value
