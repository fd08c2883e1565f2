"""A tenant's bill for a month, with the proof that nothing was lost or counted twice. Money is integer micro-units."""

from contracts.wire import Wire


class BillLine(Wire, frozen=True):
    """`amount_micros` is `quantity` x `price_micros` / `per`, rounded half to even once for this line."""

    item: str  # prompt_tokens, cached_tokens, completion_tokens, requests, device_restore, device_active, device_idle
    model: str
    device_class: str | None  # of device lines
    since: str  # the date from which this price holds, YYYY-MM-DD
    quantity: int
    unit: str  # token, request, device_us
    price_micros: int
    per: int  # units that the price buys
    amount_micros: int


class DeviceUse(Wire, frozen=True):
    """Device time of the replicas that ended in the month."""

    device_class: str
    lifetimes: int
    restore_us: int
    active_us: int
    idle_us: int


class Imbalance(Wire, frozen=True):
    """One thing that does not add up."""

    kind: str
    subject: str  # the record, runtime or source that it is about
    detail: str


class Balance(Wire, frozen=True):
    """What was compared, and what did not agree; `more` problems are not listed."""

    balanced: bool
    lifetimes: int
    sources: int
    problems: tuple[Imbalance, ...]
    more: int = 0


class BillingReport(Wire, frozen=True):
    """`GET /admin/v1/billing/report`. The month (UTC) is that of a request's end, of a replica's death."""

    tenant: str
    month: str  # YYYY-MM
    currency: str
    requests: dict[str, int]  # by outcome
    prompt_tokens: int  # includes the cached ones
    cached_tokens: int
    completion_tokens: int
    device: tuple[DeviceUse, ...]
    lines: tuple[BillLine, ...]
    total_micros: int
    open_runtimes: tuple[str, ...]  # served requests of the month; their device time comes with their death
    balance: Balance
