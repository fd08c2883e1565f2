"""Report discrepancies of a tenant's ledger: lost or duplicate records, unaccounted time, wrong totals.

A bill lists those that fail, `verify` lists those of rows and totals, `reconcile` lists all with their sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import zip_longest
from signal import Signals
from typing import Any, Final

from controlplane.ledger.policy.rating import SECOND_US, Prices, amount_micros
from controlplane.ledger.policy.sequence_ranges import Range, gaps
from kelvin.contracts.accounting.usage import ACK_TOKENS, RUNNING_REPORT_INTERVAL_S, LifetimeRecord, RequestRecord

TOLERANCE_US: Final = 100_000
TOLERANCE_PERCENT: Final = 1
RECORD_DELAY_US: Final = 60_000_000  # between a replica's death and the arrival of its record


class DiscrepancyKind(StrEnum):
    """Kinds of discrepancies: errors of the accounts, errors of rows, and known inexactness."""

    # A bill with one of these does not balance.
    SEQUENCE_HOLE = "sequence_hole"
    REQUESTS_MISSING = "requests_missing"
    REQUESTS_EXTRA = "requests_extra"
    TIME_UNACCOUNTED = "time_unaccounted"
    DEVICE_TIME_OVER = "device_time_over"
    LIFETIME_MISSING = "lifetime_missing"
    CONFLICT = "conflict"
    # Rows are changed, or stored totals and bills are not what the rows give.
    ROW_WRONG = "row_wrong"
    TOTAL_WRONG = "total_wrong"
    BILL_WRONG = "bill_wrong"
    # Known inexactness, which is no failure.
    CHARGED_BY_RECEIPT = "charged_by_receipt"
    CHARGED_SO_FAR = "charged_so_far"
    UNSHIPPED = "unshipped"


@dataclass(frozen=True, slots=True)
class Impact:
    """The largest possible size of a discrepancy. 0: this figure is right. None: unknown."""

    requests: int | None = 0
    tokens: int | None = 0
    device_us: int | None = 0
    amount_micros: int | None = 0
    least: str = ""  # a known lower bound, as text
    ids: tuple[str, ...] = ()  # request ids


class TotalKind(StrEnum):
    """Kinds of stored totals."""

    REQUESTS = "requests"
    STEPS = "steps"
    DEVICE_TIME = "device_time"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class TotalMismatch:
    """A stored total and the one recomputed from the rows. None means that there is none."""

    total_kind: TotalKind
    key: tuple[Any, ...]
    stored: Sequence[int] | None
    recomputed: Sequence[int] | None

    @property
    def deltas(self) -> list[int]:
        """The absolute difference of each figure."""
        pairs = zip_longest(self.stored or (), self.recomputed or (), fillvalue=0)
        return [abs(stored - recomputed) for stored, recomputed in pairs]


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """A discrepancy. Its impact is computed on demand, because that needs prices and a bill does not use it."""

    kind: DiscrepancyKind
    subject: str  # the replica, request, source, row or total that it is about
    detail: str
    impact: Callable[[], Impact] = Impact
    fails: bool = True
    cause: str = ""  # if known
    total: TotalMismatch | None = None  # for TOTAL_WRONG


@dataclass(frozen=True, slots=True)
class PriceLookup:
    """Functions that an impact is computed with."""

    prices: Callable[[int], Prices]  # at a time in us
    positions: Callable[[str, str | None], int | None]  # context length of a model's version; None if unknown


@dataclass(frozen=True, slots=True)
class LifetimeFacts:
    """A replica's lifetime record, with the ledger's totals of its requests in all months and of all callers."""

    runtime_id: str
    total_us: int
    standby_us: int
    restore_us: int
    active_us: int
    idle_us: int
    requests: int  # that the replica served, by its lifetime record
    recorded_requests: int  # request records that name the replica
    answered_requests: int  # of these, with device time or tokens
    recorded_device_us: int
    is_cut: bool  # its end was never reported, so its figures are those of its last report
    model: str
    version: str | None
    device_class: str
    died_at_us: int
    exit_status: int

    @property
    def parts_us(self) -> int:
        """The time that the replica itself accounts for."""
        return self.standby_us + self.restore_us + self.active_us + self.idle_us


@dataclass(frozen=True, slots=True)
class SpoolPosition:
    """Position of a spool that still exists: the last acknowledged and the last written sequence."""

    acknowledged: int
    last: int


def tolerance_us(total_us: int) -> int:
    """Return 1 % or 100 ms, whichever is more."""
    return max(TOLERANCE_US, total_us * TOLERANCE_PERCENT // 100)


def check_lifetime(life: LifetimeFacts, price_lookup: PriceLookup) -> Iterator[Discrepancy]:
    """Check a replica's lifetime record against itself and against the records of its requests.

    (1) Its four parts must sum to the supervisor's total.
    (2) Its requests must not use more device time than it was active.
    (3) Every request that it served must have a record.
    (4) No more requests may have been answered than it served.
    (5) If its end was never reported, its time after the last report is not charged.
    """
    found = partial(Discrepancy, subject=life.runtime_id, cause=_describe_exit(life.exit_status))
    allowed_us = tolerance_us(life.total_us)
    # (1)
    if abs(life.parts_us - life.total_us) > allowed_us:
        yield found(
            kind=DiscrepancyKind.TIME_UNACCOUNTED,
            detail=f"standby, restore, active and idle are {life.parts_us} us; it lived {life.total_us} us",
            impact=partial(_device_time_impact, life, abs(life.parts_us - life.total_us), price_lookup),
        )
    # (2) The impact has no amount, because the replica's life is billed, not its requests' device time.
    if life.recorded_device_us > life.active_us + allowed_us and not life.is_cut:
        yield found(
            kind=DiscrepancyKind.DEVICE_TIME_OVER,
            detail=f"its requests used {life.recorded_device_us} us of device time; "
            f"it was active for {life.active_us} us",
            impact=partial(Impact, device_us=life.recorded_device_us - life.active_us),
        )
    # (3)
    if life.recorded_requests < life.requests:
        yield found(
            kind=DiscrepancyKind.REQUESTS_MISSING,
            detail=f"it served {life.requests} requests; {life.recorded_requests} request records name it",
            impact=partial(_missing_requests_impact, life, price_lookup),
        )
    # (4) Records without cost don't count: the caller may have left before the request reached the replica.
    if life.answered_requests > life.requests and not life.is_cut:
        yield found(
            kind=DiscrepancyKind.REQUESTS_EXTRA,
            detail=f"it served {life.requests} requests; {life.answered_requests} request records have its answers",
            impact=partial(Impact, life.answered_requests - life.requests, None, life.recorded_device_us, None),
        )
    # (5)
    if life.is_cut:
        yield found(
            kind=DiscrepancyKind.CHARGED_SO_FAR,
            detail="charged up to the last report of its life",
            impact=partial(_device_time_impact, life, RUNNING_REPORT_INTERVAL_S * SECOND_US, price_lookup),
            fails=False,
            cause="its pod, or its node, ended suddenly",
        )


def check_sequence_gaps(source: str, received: Sequence[Range], waiting: SpoolPosition | None) -> Iterator[Discrepancy]:
    """Report records that `source` wrote and that never arrived. They may be any tenant's. `received` is normalized."""
    cause = "they were lost with its spool" if waiting is None else "its spool exists, but can't be read there"
    for first, last in gaps(received):
        records_text = f"record {first}" if first == last else f"records {first} to {last}"
        detail = f"{records_text} of this source never arrived; record {last + 1} did"
        impact = partial(Impact, last - first + 1, None, None, None)
        yield Discrepancy(DiscrepancyKind.SEQUENCE_HOLE, source, detail, impact, cause=cause)


def report_missing_lifetime(runtime_id: str, requests: int, device_us: int) -> Discrepancy:
    """Report a dead replica without a lifetime record. It used at least the device time of its requests."""
    return Discrepancy(
        DiscrepancyKind.LIFETIME_MISSING,
        runtime_id,
        f"{requests} request records name it; it has no lifetime record and is gone",
        partial(Impact, requests, 0, None, None, f"they used {device_us} us of device time"),
        cause="the machine lost its power, or its supervisor's spool was destroyed",
    )


def report_silent_replica(runtime_id: str) -> Discrepancy:
    """Report a replica that is silent, and may report again. An hour after its last report, that one is charged."""
    return Discrepancy(
        DiscrepancyKind.CHARGED_SO_FAR,
        runtime_id,
        "has not reported its life lately; an hour after its last report it is charged up to there",
        partial(Impact, 0, 0, RUNNING_REPORT_INTERVAL_S * SECOND_US, None),
        fails=False,
        cause="its pod ended suddenly, or can't reach the control plane",
    )


def report_unshipped(source: str, waiting: SpoolPosition) -> Discrepancy:
    """Report records that wait in a spool and will arrive."""
    count = waiting.last - waiting.acknowledged
    detail = f"{count} records wait in its spool; they may be any tenant's"
    return Discrepancy(DiscrepancyKind.UNSHIPPED, source, detail, partial(Impact, count, None, None, None), fails=False)


def report_charged_orphan(
    request_id: str, runtime_id: str, ended_at_us: int, tokens: int, price_lookup: PriceLookup
) -> Discrepancy:
    """Report a request whose activator died. Tokens after the last acknowledgement to the replica are not charged."""

    def impact() -> Impact:
        prices = price_lookup.prices(ended_at_us)
        return Impact(tokens=ACK_TOKENS, amount_micros=amount_micros(ACK_TOKENS, prices.completion, prices.per_tokens))

    detail = f"charged for the {tokens} tokens that were acknowledged to replica {runtime_id}"
    return Discrepancy(
        DiscrepancyKind.CHARGED_BY_RECEIPT, request_id, detail, impact, fails=False, cause="its activator died"
    )


def estimate_record_impact(record: RequestRecord | LifetimeRecord | None, prices: Prices) -> Impact:
    """Return what a record that was kept aside would be charged. None is an unreadable record."""
    match record:
        case RequestRecord():
            tokens = record.prompt_tokens + record.completion_tokens
            figures = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
            micros = requests_price_micros(prices, 1, *figures)
            return Impact(1, tokens, record.device_us, micros, ids=(record.request_id,))
        case LifetimeRecord():
            parts = (record.restore_us, record.active_us, record.idle_us)
            return Impact(0, 0, record.total_us, device_price_micros(prices, record.device_class, *parts))
        case None:
            return Impact(None, None, None, None)


def max_tokens_price_micros(prices: Prices, tokens: int) -> int:
    """Return the highest possible price of that many tokens."""
    return amount_micros(tokens, max(prices.prompt, prices.cached, prices.completion), prices.per_tokens)


def max_device_price_micros(prices: Prices, device_class: str, time_us: int) -> int:
    """Return the highest possible price of that much device time, whatever the replica was doing."""
    rate = prices.device_prices(device_class)
    return amount_micros(time_us, max(rate.restore, rate.active, rate.idle), SECOND_US)


def device_price_micros(prices: Prices, device_class: str, restore_us: int, active_us: int, idle_us: int) -> int:
    """Return the price of that device time."""
    rate = prices.device_prices(device_class)
    pairs = ((restore_us, rate.restore), (active_us, rate.active), (idle_us, rate.idle))
    return sum(amount_micros(time_us, price, SECOND_US) for time_us, price in pairs)


def requests_price_micros(prices: Prices, requests: int, prompt: int, cached: int, completion: int) -> int:
    """Return the price of these requests if they are charged. `prompt` includes `cached`."""
    pairs = ((prompt - cached, prices.prompt), (cached, prices.cached), (completion, prices.completion))
    tokens = sum(amount_micros(quantity, price, prices.per_tokens) for quantity, price in pairs)
    return tokens + requests * prices.request


def _device_time_impact(life: LifetimeFacts, excess_us: int, price_lookup: PriceLookup) -> Impact:
    micros = max_device_price_micros(price_lookup.prices(life.died_at_us), life.device_class, excess_us)
    return Impact(device_us=excess_us, amount_micros=micros)


def _missing_requests_impact(life: LifetimeFacts, price_lookup: PriceLookup) -> Impact:
    """Assume that each missing request used a whole context, and together all unaccounted active time."""
    count = life.requests - life.recorded_requests
    left_us = max(0, life.active_us - life.recorded_device_us)
    positions = price_lookup.positions(life.model, life.version)
    if positions is None:
        return Impact(count, None, left_us, None)
    prices, tokens = price_lookup.prices(life.died_at_us), count * positions
    return Impact(count, tokens, left_us, max_tokens_price_micros(prices, tokens) + count * prices.request)


_NAMES: Final = {number.value: number.name for number in Signals}


def _describe_exit(exit_status: int) -> str:
    """Return how a replica ended, or "" after status 0. `exit_status` is as Popen.returncode."""
    if exit_status < 0:
        return f"the replica was killed by {_NAMES.get(-exit_status, f'signal {-exit_status}')}"
    return f"the replica ended with status {exit_status}" if exit_status else ""
