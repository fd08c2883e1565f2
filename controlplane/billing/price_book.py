"""Reads a price book from TOML, strictly: each error names the field, its value and the rule that it breaks."""

import tomllib
from collections.abc import Sequence
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

from controlplane.ledger.policy.month import day_us
from controlplane.ledger.policy.rating import ANY_CLASS, DevicePrices, PriceBook, Prices
from kelvin.contracts.names import DEVICE_CLASS_RULE, is_device_class
from kelvin.contracts.setting_parser import BadSetting

MAX_MICROS = 10**15  # a billion per unit
MAX_FAULT_CHARS = 400  # characters of what is wrong: a value may be long


class BadPriceBook(ValueError):
    """The file is not a price book; the text says where and why."""


def default_price_book() -> PriceBook:
    """The book that is shipped."""
    return parse_price_book(files("controlplane").joinpath("price_book.toml").read_text(), "price_book.toml")


def load_price_book(path: Path) -> PriceBook:
    """Raises BadPriceBook."""
    try:
        return parse_price_book(path.read_text(encoding="utf-8"), path.name)
    except OSError as error:
        raise BadPriceBook(f"{path.name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadPriceBook(f"{path.name}: is not UTF-8 (byte {error.start})") from error


def read_price_book(path: Path | None) -> PriceBook:
    """Return the prices of a file, or those that are shipped. Raises BadSetting."""
    if path is None:
        return default_price_book()
    try:
        return load_price_book(path)
    except BadPriceBook as bad:
        raise BadSetting("KELVIN_PRICE_BOOK", str(path), str(bad)) from bad


def parse_price_book(text: str, name: str) -> PriceBook:
    """Raises BadPriceBook naming `name`, the field, its value and the rule."""
    try:
        raw = tomllib.loads(text)
    except RecursionError:
        raise BadPriceBook(f"{name}: it is nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError is one, and what int() says of thousands of digits
        raise BadPriceBook(f"{name}: {str(error)[:MAX_FAULT_CHARS]}") from error
    try:
        return _book(raw)
    except ValueError as error:
        raise BadPriceBook(f"{name}: {str(error)[:MAX_FAULT_CHARS]}") from error


def _book(raw: dict[str, Any]) -> PriceBook:
    _fields("", raw, ("currency", "prices"))
    entries = raw["prices"]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"prices={entries!r}: must have at least one entry")
    prices: list[Prices] = []
    for number, entry in enumerate(entries):
        at = f"prices[{number}]"
        prices.append(_prices(f"{at}.", _table(at, entry)))
        if number and prices[-1].from_us <= prices[-2].from_us:
            before = entries[number - 1]["from"]
            raise ValueError(f"{at}.from={entry['from']}: must be later than that of the entry before, {before}")
    return PriceBook(_currency(raw["currency"]), tuple(prices))


def _prices(at: str, entry: dict[str, Any]) -> Prices:
    _fields(at, entry, ("from", "per_tokens", "prompt", "cached", "completion", "request", "device"))
    since, per_tokens, device = entry["from"], entry["per_tokens"], _table(f"{at}device", entry["device"])
    if type(since) is not date:
        raise ValueError(f"{at}from={since!r}: must be a date, as 2026-01-31")
    if type(per_tokens) is not int or per_tokens not in (1_000, 1_000_000):
        raise ValueError(f"{at}per_tokens={per_tokens!r}: must be 1000 or 1000000")
    if ANY_CLASS not in device:
        named = ", ".join(sorted(device)) or "none"
        raise ValueError(f'{at}device={named}: must have the class "{ANY_CLASS}", for those that are not named')
    for name in device:
        if not is_device_class(name):  # no replica can have it: seconds that are meant would cost what "*" does
            raise ValueError(f"{at}device={name!r}: a class {DEVICE_CLASS_RULE}")
    return Prices(
        from_us=day_us(since),
        per_tokens=per_tokens,
        prompt=_micros(f"{at}prompt", entry["prompt"]),
        cached=_micros(f"{at}cached", entry["cached"]),
        completion=_micros(f"{at}completion", entry["completion"]),
        request=_micros(f"{at}request", entry["request"]),
        device={name: _device(f"{at}device.{name}", prices) for name, prices in device.items()},
    )


def _device(at: str, raw: object) -> DevicePrices:
    prices = _table(at, raw)
    _fields(f"{at}.", prices, ("restore", "active", "idle"))
    return DevicePrices(
        restore=_micros(f"{at}.restore", prices["restore"]),
        active=_micros(f"{at}.active", prices["active"]),
        idle=_micros(f"{at}.idle", prices["idle"]),
    )


def _table(at: str, raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{at}={raw!r}: must be a table")
    return raw


def _fields(at: str, raw: dict[str, Any], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in raw:
            raise ValueError(f"{at}{name}: is required")
    for name, value in raw.items():
        if name not in wanted:
            raise ValueError(f"{at}{name}={value!r}: is no field; there are {', '.join(wanted)}")


def _currency(text: object) -> str:
    if not isinstance(text, str) or len(text) != 3 or not text.isascii() or not text.isalpha() or not text.isupper():
        raise ValueError(f"currency={text!r}: must be three capital letters (ISO 4217)")
    return text


def _micros(field: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_MICROS:
        raise ValueError(f"{field}={value!r}: must be whole micro-units from 0 to {MAX_MICROS}")
    return value
