"""Read a price book from TOML, strictly. Each error names the field, its value and the rule that it breaks."""

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
MAX_FAULT_CHARS = 400  # of an error message, because a value may be long


class BadPriceBook(ValueError):
    """The file is not a valid price book. The text names the place and the reason."""


def default_price_book() -> PriceBook:
    """Return the price book that Kelvin ships with."""
    return parse_price_book(files("controlplane").joinpath("price_book.toml").read_text(), "price_book.toml")


def load_price_book(path: Path) -> PriceBook:
    """Read a price book from a file. Raises BadPriceBook."""
    try:
        return parse_price_book(path.read_text(encoding="utf-8"), path.name)
    except OSError as error:
        raise BadPriceBook(f"{path.name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadPriceBook(f"{path.name}: is not UTF-8 (byte {error.start})") from error


def read_price_book(path: Path | None) -> PriceBook:
    """Return the prices of a file, or without one the shipped prices. Raises BadSetting."""
    if path is None:
        return default_price_book()
    try:
        return load_price_book(path)
    except BadPriceBook as bad:
        raise BadSetting("KELVIN_PRICE_BOOK", str(path), str(bad)) from bad


def parse_price_book(text: str, name: str) -> PriceBook:
    """Parse a price book. Raises BadPriceBook with `name`, the field, its value and the rule."""
    try:
        raw = tomllib.loads(text)
    except RecursionError:
        raise BadPriceBook(f"{name}: it is nested too deeply") from None
    except ValueError as error:  # a TOMLDecodeError, or int()'s error for thousands of digits
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
        field = f"prices[{number}]"
        prices.append(_prices(f"{field}.", _table(field, entry)))
        if number and prices[-1].from_us <= prices[-2].from_us:
            before = entries[number - 1]["from"]
            raise ValueError(f"{field}.from={entry['from']}: must be later than that of the entry before, {before}")
    return PriceBook(_currency(raw["currency"]), tuple(prices))


def _prices(prefix: str, entry: dict[str, Any]) -> Prices:
    _fields(prefix, entry, ("from", "per_tokens", "prompt", "cached", "completion", "request", "device"))
    since, per_tokens, device = entry["from"], entry["per_tokens"], _table(f"{prefix}device", entry["device"])
    if type(since) is not date:
        raise ValueError(f"{prefix}from={since!r}: must be a date, as 2026-01-31")
    if type(per_tokens) is not int or per_tokens not in (1_000, 1_000_000):
        raise ValueError(f"{prefix}per_tokens={per_tokens!r}: must be 1000 or 1000000")
    if ANY_CLASS not in device:
        named = ", ".join(sorted(device)) or "none"
        raise ValueError(f'{prefix}device={named}: must have the class "{ANY_CLASS}", for classes that are not named')
    for name in device:
        if not is_device_class(name):  # no replica can have this class, so the "*" prices would be charged instead
            raise ValueError(f"{prefix}device={name!r}: a class {DEVICE_CLASS_RULE}")
    return Prices(
        from_us=day_us(since),
        per_tokens=per_tokens,
        prompt=_micros(f"{prefix}prompt", entry["prompt"]),
        cached=_micros(f"{prefix}cached", entry["cached"]),
        completion=_micros(f"{prefix}completion", entry["completion"]),
        request=_micros(f"{prefix}request", entry["request"]),
        device={name: _device(f"{prefix}device.{name}", prices) for name, prices in device.items()},
    )


def _device(field: str, raw: object) -> DevicePrices:
    prices = _table(field, raw)
    _fields(f"{field}.", prices, ("restore", "active", "idle"))
    return DevicePrices(
        restore=_micros(f"{field}.restore", prices["restore"]),
        active=_micros(f"{field}.active", prices["active"]),
        idle=_micros(f"{field}.idle", prices["idle"]),
    )


def _table(field: str, raw: object) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{field}={raw!r}: must be a table")
    return raw


def _fields(prefix: str, raw: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if name not in raw:
            raise ValueError(f"{prefix}{name}: is required")
    for name, value in raw.items():
        if name not in names:
            raise ValueError(f"{prefix}{name}={value!r}: is no field; there are {', '.join(names)}")


def _currency(text: object) -> str:
    if not isinstance(text, str) or len(text) != 3 or not text.isascii() or not text.isalpha() or not text.isupper():
        raise ValueError(f"currency={text!r}: must be three capital letters (ISO 4217)")
    return text


def _micros(field: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_MICROS:
        raise ValueError(f"{field}={value!r}: must be whole micro-units from 0 to {MAX_MICROS}")
    return value
