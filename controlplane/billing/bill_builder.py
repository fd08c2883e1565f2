"""Build a month's bill from its totals: each day at its own prices, late records of closed months as adjustments."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from controlplane.ledger.closed_months import closed_prices
from controlplane.ledger.policy.month import DAY_US, month_of
from controlplane.ledger.policy.rating import Bill, PriceBook, Prices
from kelvin.contracts.accounting.billing_reports import Balance, BillingReport, DeviceUse


class Pricing:
    """Finds the prices of a day's use: those of the price book, or for a late record those of its closed month."""

    def __init__(self, connection: Connection, book: PriceBook, tenant: str, month: str) -> None:
        self._connection = connection
        self._tenant = tenant
        self._month = month
        self._books: dict[str, PriceBook] = {month: book}
        self.currency = book.currency

    def prices_on(self, day: int) -> tuple[str, Prices]:
        """Return the closed month that is adjusted ("" for none), and the prices of the day. Raises LookupError."""
        day_month = month_of(day * DAY_US)
        book = self._books.get(day_month)
        if book is None:
            book = self._books[day_month] = closed_prices(self._connection, self._tenant, day_month)
        return "" if day_month == self._month else day_month, book.prices_at(day * DAY_US)


@dataclass(slots=True)
class BillBuilder:
    """Sums up a month's totals and builds the bill."""

    pricing: Pricing
    bill: Bill = field(default_factory=Bill)
    outcomes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    tokens: tuple[int, int, int] = (0, 0, 0)
    device: dict[str, list[int]] = field(default_factory=dict)

    def add_totals(
        self, requests: Iterable[Sequence[Any]], steps: Iterable[Sequence[Any]], devices: Iterable[Sequence[Any]]
    ) -> None:
        """Add all rows of a month's totals."""
        for total in requests:
            self.add_requests(*total)
        for total in steps:
            self.add_step(*total)
        for total in devices:
            self.add_device_time(*total)

    def add_requests(
        self, day: int, model: str, outcome: str, billable: bool, count: int, prompt: int, cached: int, completion: int
    ) -> None:
        """Add a row of request totals."""
        adjusts, prices = self.pricing.prices_on(day)
        if not adjusts:
            self.outcomes[outcome] += count
            self.tokens = (self.tokens[0] + prompt, self.tokens[1] + cached, self.tokens[2] + completion)
        if billable:
            self.bill.add_requests(
                prices,
                model,
                requests=count,
                prompt_tokens=prompt,
                cached_tokens=cached,
                completion_tokens=completion,
                adjusts=adjusts,
            )

    def add_step(self, day: int, step: str, count: int) -> None:
        """Add a row of totals by degradation step. It costs nothing: the model that answered is charged as usual."""
        adjusts, _ = self.pricing.prices_on(day)
        if not adjusts:
            self.steps[step] += count

    def add_device_time(
        self, day: int, model: str, device_class: str, lives: int, restore_us: int, active_us: int, idle_us: int
    ) -> None:
        """Add a row of device totals."""
        adjusts, prices = self.pricing.prices_on(day)
        if not adjusts:
            use = self.device.setdefault(device_class, [0, 0, 0, 0])
            added = (lives, restore_us, active_us, idle_us)
            self.device[device_class] = [a + b for a, b in zip(use, added, strict=True)]
        self.bill.add_device_time(
            prices,
            model,
            device_class,
            restore_us=restore_us,
            active_us=active_us,
            idle_us=idle_us,
            adjusts=adjusts,
        )

    def report(
        self,
        tenant: str,
        month: str,
        balance: Balance,
        open_runtimes: tuple[str, ...],
        closed_at_us: int | None = None,
    ) -> BillingReport:
        """Return the bill of the totals that were added."""
        lines = self.bill.lines()
        return BillingReport(
            tenant=tenant,
            month=month,
            currency=self.pricing.currency,
            requests={outcome: count for outcome, count in sorted(self.outcomes.items()) if count},
            prompt_tokens=self.tokens[0],
            cached_tokens=self.tokens[1],
            completion_tokens=self.tokens[2],
            device=tuple(_device_use(name, use) for name, use in sorted(self.device.items())),
            lines=lines,
            total_micros=sum(line.amount_micros for line in lines),
            open_runtimes=open_runtimes,
            balance=balance,
            closed_at_us=closed_at_us,
            degraded={step: count for step, count in sorted(self.steps.items()) if count},
        )


def _device_use(device_class: str, use: list[int]) -> DeviceUse:
    return DeviceUse(device_class=device_class, lifetimes=use[0], restore_us=use[1], active_us=use[2], idle_us=use[3])
