"""A tenant's bill for a month, with the proof that nothing was lost or counted twice. Money is integer micro-units."""

from msgspec import UNSET, UnsetType

from kelvin.contracts.wire import Wire


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
    adjusts: str | None = None  # the closed month, YYYY-MM, whose late arrivals this is: it may be negative


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
    """`GET /admin/v1/billing/report`. The month (UTC) is that of a request's end, of a replica's death.

    What came after that month was closed is in the lines of another one, as an adjustment, and in none of its counts.
    """

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
    closed_at_us: int | None = None  # since then nothing of it changes
    # Of the requests, those for which a ladder gave something up, by its step. Not set in a bill that was frozen before
    # these were counted: its bytes stay what they were.
    degraded: dict[str, int] | UnsetType = UNSET


class LedgerDifference(Wire, frozen=True):
    """Something that is not what the ledger's rows make of it."""

    month: str  # "" for what spans months
    subject: str  # the row, total or end that it is about
    detail: str


class ChainReport(Wire, frozen=True):
    """A tenant's month, recomputed from its rows. After the first difference nothing is looked at."""

    month: str
    links: int  # that hold
    chain: str  # the digest up to there: note it elsewhere, and nobody can make another past
    closed: bool
    differences: tuple[LedgerDifference, ...]


class VerifyReport(Wire, frozen=True):
    """`GET /admin/v1/billing/verify`."""

    tenant: str
    sound: bool
    months: tuple[ChainReport, ...]
    replicas: tuple[LedgerDifference, ...] = ()  # the first total of a replica's requests that is wrong; of all months


class CloseMonth(Wire, frozen=True):
    """Body of `POST /admin/v1/billing/close`."""

    month: str
    tenant: str | None = None  # the caller's


class ClosingReport(Wire, frozen=True):
    """Its answer: `chain` is the digest of all of the month, its bill and prices included."""

    report: BillingReport
    chain: str


class Examining(Wire, frozen=True):
    """202 of the routes that read all rows: they are being read; ask again."""

    rows: int  # read
    of: int  # about


class Difference(Wire, frozen=True):
    """Two accounts that differ. How much that is at most: 0 where there is nothing of it, None where nobody knows."""

    kind: str
    subject: str  # the replica, request, source or total that it is about
    detail: str
    fails: bool = True  # False: known not to be exact, or not there yet
    cause: str = ""  # where it is known
    ids: tuple[str, ...] = ()  # of requests; the first ones
    requests: int | None = 0
    tokens: int | None = 0
    device_us: int | None = 0
    amount_micros: int | None = 0  # at the prices of its day


class Compared(Wire, frozen=True):
    """What was held against each other."""

    rows: int = 0  # request and lifetime records that were read, for the totals
    replicas: int = 0
    served: int = 0  # requests, as these replicas counted them
    recorded: int = 0  # requests, of whose records some name them
    orphans: int = 0  # charged by a replica's record
    lived_us: int = 0  # replicas' lives, by their supervisor
    attributed_us: int = 0  # standby, restore, active and idle, by themselves
    active_us: int = 0
    used_us: int = 0  # of the active time, what is attributed to requests
    sources: int = 0


class ReconcileReport(Wire, frozen=True):
    """`GET /admin/v1/billing/reconcile`. Differences that fail come first; `more` are not listed."""

    tenant: str
    months: tuple[str, ...]
    currency: str
    agrees: bool
    compared: Compared
    differences: tuple[Difference, ...]
    more: int = 0
