"""Price usage. Integers only: money is micro-units of the book's currency, time is microseconds.

Rounding: a bill line collects the whole quantity that one price applies to, and is rounded once, half to even, on the
exact quotient. So neither the order of records nor their batches can change a bill.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from controlplane.ledger.policy.month import day_of
from kelvin.contracts.accounting.billing_reports import BillLine
from kelvin.contracts.accounting.usage import RequestRecord, is_charged

ANY_CLASS: Final = "*"
SECOND_US: Final = 1_000_000


class Item(StrEnum):
    """Items that have a price."""

    PROMPT = "prompt_tokens"  # without cached ones
    CACHED = "cached_tokens"
    COMPLETION = "completion_tokens"
    REQUEST = "requests"
    RESTORE = "device_restore"
    ACTIVE = "device_active"
    IDLE = "device_idle"


@dataclass(frozen=True, slots=True)
class DevicePrices:
    """Micro-units per device-second, by what the replica is doing."""

    restore: int
    active: int
    idle: int


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices from `from_us` (midnight UTC) on. Token prices are per `per_tokens` tokens."""

    from_us: int
    per_tokens: int  # 1_000 or 1_000_000
    prompt: int
    cached: int
    completion: int
    request: int
    device: dict[str, DevicePrices]  # by device class; ANY_CLASS for those not named

    def device_prices(self, device_class: str) -> DevicePrices:
        """Return the prices of a device of that class. A class that no price names is free."""
        return self.device.get(device_class) or self.device.get(ANY_CLASS) or DevicePrices(0, 0, 0)


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Prices in the order of their dates. The first entry also holds for all earlier times, so nothing is unpriced."""

    currency: str
    prices: tuple[Prices, ...]

    def __post_init__(self) -> None:
        dates = [prices.from_us for prices in self.prices]
        if not dates or dates != sorted(set(dates)):
            raise ValueError("a price book has at least one entry, and their dates ascend")

    def prices_at(self, at_us: int) -> Prices:
        """Return the prices at a time."""
        return next((prices for prices in reversed(self.prices) if prices.from_us <= at_us), self.prices[0])


def is_billable(record: RequestRecord) -> bool:
    """Return whether the request is charged."""
    return is_charged(record.outcome, record.completion_tokens)


def amount_micros(quantity: int, price_micros: int, per: int) -> int:
    """Return `quantity` x `price_micros` / `per`, exact, rounded half to even."""
    whole, rest = divmod(quantity * price_micros, per)
    return whole + (1 if 2 * rest > per or (2 * rest == per and whole % 2) else 0)


@dataclass(frozen=True, slots=True, order=True)
class _Key:
    adjusts: str  # a closed month, or ""
    model: str
    item: Item
    device_class: str
    from_us: int
    price: int
    per: int


class Bill:
    """Collects quantities by price. Its size is models times prices, however many records there are."""

    def __init__(self) -> None:
        self._quantities: defaultdict[_Key, int] = defaultdict(int)

    def __repr__(self) -> str:
        return f"<Bill {len(self._quantities)} lines>"

    def add_requests(
        self,
        prices: Prices,
        model: str,
        *,
        requests: int,
        prompt_tokens: int,
        cached_tokens: int,
        completion_tokens: int,
        adjusts: str = "",
    ) -> None:
        """Add billable requests that ended while `prices` held. `prompt_tokens` includes `cached_tokens`.

        `adjusts` is the closed month that the requests are too late for. Its lines may take back charges of that month.
        """
        for item, quantity, price, per in (
            (Item.PROMPT, prompt_tokens - cached_tokens, prices.prompt, prices.per_tokens),
            (Item.CACHED, cached_tokens, prices.cached, prices.per_tokens),
            (Item.COMPLETION, completion_tokens, prices.completion, prices.per_tokens),
            (Item.REQUEST, requests, prices.request, 1),
        ):
            self._add(_Key(adjusts, model, item, "", prices.from_us, price, per), quantity)

    def add_device_time(
        self,
        prices: Prices,
        model: str,
        device_class: str,
        *,
        restore_us: int,
        active_us: int,
        idle_us: int,
        adjusts: str = "",
    ) -> None:
        """Add time of replicas that died while `prices` held."""
        rate = prices.device_prices(device_class)
        for item, quantity, price in (
            (Item.RESTORE, restore_us, rate.restore),
            (Item.ACTIVE, active_us, rate.active),
            (Item.IDLE, idle_us, rate.idle),
        ):
            self._add(_Key(adjusts, model, item, device_class, prices.from_us, price, SECOND_US), quantity)

    def lines(self) -> tuple[BillLine, ...]:
        """Return the lines by adjusted month (none first), model, item, device class and date, except those of 0."""
        return tuple(_line(key, quantity) for key, quantity in sorted(self._quantities.items()) if quantity)

    def _add(self, key: _Key, quantity: int) -> None:
        if quantity < 0 and not key.adjusts:
            raise ValueError(f"{key.item} of {key.model}: negative quantity {quantity}")
        self._quantities[key] += quantity


def _line(key: _Key, quantity: int) -> BillLine:
    unit = {Item.REQUEST: "request", Item.PROMPT: "token", Item.CACHED: "token", Item.COMPLETION: "token"}
    return BillLine(
        item=key.item,
        model=key.model,
        device_class=key.device_class or None,
        since=day_of(key.from_us),
        quantity=quantity,
        unit=unit.get(key.item, "device_us"),
        price_micros=key.price,
        per=key.per,
        amount_micros=amount_micros(quantity, key.price, key.per),
        adjusts=key.adjusts or None,
    )
