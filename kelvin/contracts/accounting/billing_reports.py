"""A tenant's bill for a month, and the proof that nothing was lost or counted twice. Money is integer micro-units."""

from msgspec import UNSET, UnsetType

from kelvin.contracts.wire import Wire


class BillLine(Wire, frozen=True):
    """A line of a bill: `amount_micros` is `quantity` x `price_micros` / `per`, rounded half to even once per line."""

    item: str  # prompt_tokens, cached_tokens, completion_tokens, requests, device_restore, device_active, device_idle
    model: str
    device_class: str | None  # for device lines only
    since: str  # the first day on which this price applies, YYYY-MM-DD
    quantity: int
    unit: str  # token, request, device_us
    price_micros: int
    per: int  # units that `price_micros` pays for
    amount_micros: int
    # The closed month, YYYY-MM, whose late records this line charges. Its amount may be negative.
    adjusts: str | None = None


class DeviceUse(Wire, frozen=True):
    """Device time of the replicas that ended in the month."""

    device_class: str
    lifetimes: int
    restore_us: int
    active_us: int
    idle_us: int


class Imbalance(Wire, frozen=True):
    """One fault that the balance check found."""

    kind: str
    subject: str  # the record, runtime or source at fault
    detail: str


class Balance(Wire, frozen=True):
    """Result of the balance check: what was compared, and the problems found. `more` counts unlisted problems."""

    balanced: bool
    lifetimes: int
    sources: int
    problems: tuple[Imbalance, ...]
    more: int = 0


class BillingReport(Wire, frozen=True):
    """Response of `GET /admin/v1/billing/report`. Months are UTC.

    A request belongs to the month in which it ended, a replica to the month in which it died. Records that arrive after
    their month was closed become adjustment lines of a later bill, and are in none of that bill's counts.
    """

    tenant: str
    month: str  # YYYY-MM
    currency: str
    requests: dict[str, int]  # by outcome
    prompt_tokens: int  # includes the cached tokens
    cached_tokens: int
    completion_tokens: int
    device: tuple[DeviceUse, ...]
    lines: tuple[BillLine, ...]
    total_micros: int
    # Runtimes that served requests of the month and still run; their device time is billed when they end
    open_runtimes: tuple[str, ...]
    balance: Balance
    closed_at_us: int | None = None  # when the month was closed; the bill is frozen since then
    # Requests that were answered in degraded form, by degradation step. Unset in bills that were frozen before this was
    # counted, so their bytes stay the same.
    degraded: dict[str, int] | UnsetType = UNSET


class LedgerDifference(Wire, frozen=True):
    """A difference between stored data and the same data recomputed from the ledger's rows."""

    month: str  # "" for a subject that spans months
    subject: str  # the row, total or end at fault
    detail: str


class ChainReport(Wire, frozen=True):
    """A tenant's month, recomputed from its rows. The check of a month stops at the first difference."""

    month: str
    links: int  # links that are intact
    chain: str  # digest of the last intact link: store a copy elsewhere to prove later that the past was not rewritten
    closed: bool
    differences: tuple[LedgerDifference, ...]


class VerifyReport(Wire, frozen=True):
    """Response of `GET /admin/v1/billing/verify`: the chain of every month."""

    tenant: str
    sound: bool
    months: tuple[ChainReport, ...]
    replicas: tuple[LedgerDifference, ...] = ()  # the first wrong request total of a replica, over all months


class CloseMonth(Wire, frozen=True):
    """Body of `POST /admin/v1/billing/close`: the month to close."""

    month: str
    tenant: str | None = None  # None: the caller's own tenant


class ClosingReport(Wire, frozen=True):
    """Response of `POST /admin/v1/billing/close`. `chain` is the digest of the whole month with its bill and prices."""

    report: BillingReport
    chain: str


class Examining(Wire, frozen=True):
    """Response 202 of routes that read all rows: the check still runs, repeat the request later."""

    rows: int  # rows read so far
    of: int  # estimated total of rows


class Difference(Wire, frozen=True):
    """Two accounts that differ, and by how much at most: 0 if that unit is not affected, None if unknown."""

    kind: str
    subject: str  # the replica, request, source or total at fault
    detail: str
    fails: bool = True  # False: the numbers are known to be inexact, or not complete yet
    cause: str = ""  # the reason, if known
    ids: tuple[str, ...] = ()  # the first of the affected request ids
    requests: int | None = 0
    tokens: int | None = 0
    device_us: int | None = 0
    amount_micros: int | None = 0  # at the prices of that day


class Compared(Wire, frozen=True):
    """How much the usage audit compared."""

    rows: int = 0  # request and lifetime records that were read to compute totals
    replicas: int = 0
    served: int = 0  # requests, as counted by these replicas
    recorded: int = 0  # request records that name one of these replicas
    orphans: int = 0  # requests that were charged by the replica's own record
    lived_us: int = 0  # lifetimes of replicas, measured by their supervisor
    attributed_us: int = 0  # standby, restore, active and idle time, measured by the replicas
    active_us: int = 0
    used_us: int = 0  # active time that is attributed to requests
    sources: int = 0


class ReconcileReport(Wire, frozen=True):
    """Response of `GET /admin/v1/billing/reconcile`. Failing differences come first; `more` counts unlisted ones."""

    tenant: str
    months: tuple[str, ...]
    currency: str
    agrees: bool
    compared: Compared
    differences: tuple[Difference, ...]
    more: int = 0
