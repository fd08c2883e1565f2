"""Book the records of a request: which one is charged, in which month, and what it adds to which total.

1. One record of a request is charged, the best one. The others charge nothing.
2. A closed month never changes. A better record that comes later is booked in an open month and *replaces* the closed
   month's record: it takes back what that charged.
3. Requests with the same idempotency key (`once`) that began within a day of the first are one request for the bill.
   One of them is charged: a successful answer before a failed one, then the one that delivered most.
4. If a closed month has charged one of them, that charge stays and no other is charged, unless a later record took it
   back.

The result depends on the set of records and on when months were closed, not on the order of arrival.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from controlplane.ledger.policy.month import DAY_US
from controlplane.ledger.policy.rating import is_billable
from controlplane.ledger.policy.record_precedence import choose_charged_record
from kelvin.contracts.accounting.usage import OK, LifetimeRecord, RecordOrigin, RequestRecord
from kelvin.contracts.serving.degradation_steps import step_of_record

IDEMPOTENCY_WINDOW_US: Final = DAY_US  # from the start of the first request with a key

RowKey = tuple[str, str]  # origin, and for an orphan the runtime that wrote it, else ""


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """A record as it is stored in the ledger."""

    record: RequestRecord
    month: str  # in which it is booked: that of its end, or a later one if that was closed when the record came
    stands: bool = False  # charged
    replaces: RowKey | None = None  # the record of a closed month whose charge it takes back


@dataclass(frozen=True, slots=True, order=True)
class SumKey:
    """Key of a sum of requests within a tenant's month: requests that have all these fields in common."""

    tenant: str
    month: str
    day: int  # of their end, since 1970; outside of `month` for an adjustment
    model: str
    outcome: str
    billable: bool


@dataclass(frozen=True, slots=True, order=True)
class DeviceKey:
    """Key of a sum of device time within a tenant's month. `day` is the day on which the replicas died."""

    tenant: str
    month: str
    day: int
    model: str
    device_class: str


@dataclass(frozen=True, slots=True, order=True)
class StepKey:
    """Key of a count of degraded requests within a tenant's month, by degradation step."""

    tenant: str
    month: str
    day: int
    step: str


# Requests and prompt, cached, completion tokens; or lives and restore, active, idle us.
TotalFigures = tuple[int, int, int, int]
RuntimeUsage = tuple[int, int, int]  # requests, requests that used device time or delivered tokens, device us


def row_key(record: RequestRecord) -> RowKey:
    """Return what distinguishes the record from others of its request."""
    return record.origin.value, (record.runtime_id or "") if record.origin is RecordOrigin.ORPHAN else ""


def encode_row_key(key: RowKey) -> str:
    """Return the key as it is stored beside the record that replaces it."""
    return ":".join(key)


def decode_row_key(text: str) -> RowKey:
    """Return the key that `encode_row_key` wrote."""
    origin, _, orphan_of = text.partition(":")
    return origin, orphan_of


def mark_charged(group: Sequence[LedgerRecord], closed: Collection[str]) -> list[LedgerRecord]:
    """Return all records of one request, with the charged one marked. Records of closed months are unchanged."""
    if len(group) == 1 and group[0].month not in closed:  # the usual case
        return [LedgerRecord(group[0].record, group[0].month, stands=True)]
    best = choose_charged_record([booked.record for booked in group])
    taken_back = {booked.replaces for booked in group if booked.month in closed and booked.stands}
    frozen = [b for b in group if b.month in closed and b.stands and row_key(b.record) not in taken_back]
    charged = row_key(frozen[0].record) if frozen else None
    return [
        booked
        if booked.month in closed
        else replace(booked, stands=True, replaces=charged)
        if booked.record is best
        else replace(booked, stands=False, replaces=None)
        for booked in group
    ]


@dataclass(frozen=True, slots=True)
class _Request:
    """A request with its best record. `kept`: a closed month charged it, and the charge still holds."""

    request_id: str
    record: RequestRecord
    kept: bool


def mark_charged_by_key(
    groups: Mapping[str, Sequence[LedgerRecord]], closed: Collection[str]
) -> dict[str, list[LedgerRecord]]:
    """Mark the charged records of one tenant's requests, by request id. `groups` must have all requests that share an
    idempotency key with one of them.
    """
    booked = {request_id: mark_charged(group, closed) for request_id, group in groups.items()}
    by_idempotency_key: defaultdict[str, list[_Request]] = defaultdict(list)
    for request_id, group in booked.items():
        record = choose_charged_record([each.record for each in group])
        if once := record.once:
            by_idempotency_key[once].append(_Request(request_id, record, _has_permanent_charge(group, closed)))
    for key_requests in by_idempotency_key.values():
        for window in _idempotency_windows(key_requests):
            chosen = [request for request in window if request.kept] or [max(window, key=_charge_order)]
            for request in window:
                if request not in chosen:
                    booked[request.request_id] = _without_charge(booked[request.request_id], closed)
    return booked


def _idempotency_windows(key_requests: Sequence[_Request]) -> Iterator[list[_Request]]:
    """Yield windows of requests: each holds the requests that began within IDEMPOTENCY_WINDOW_US of its first one."""
    window: list[_Request] = []
    for request in sorted(key_requests, key=lambda each: (each.record.started_at_us, each.request_id)):
        if window and request.record.started_at_us >= window[0].record.started_at_us + IDEMPOTENCY_WINDOW_US:
            yield window
            window = []
        window.append(request)
    if window:
        yield window


def _charge_order(request: _Request) -> tuple[bool, int, int, str]:
    record = request.record
    return record.outcome == OK, record.completion_tokens, -record.started_at_us, request.request_id


def _has_permanent_charge(group: Sequence[LedgerRecord], closed: Collection[str]) -> bool:
    taken_back = {each.replaces for each in group if each.stands}
    charged = [each for each in group if each.stands and is_billable(each.record)]
    return any(each.month in closed for each in charged) and any(
        row_key(each.record) not in taken_back for each in charged
    )


def _without_charge(group: Sequence[LedgerRecord], closed: Collection[str]) -> list[LedgerRecord]:
    """Return the records without charges. A record that only takes back a closed month's charge keeps that mark."""
    return [
        each
        if each.month in closed or (each.replaces is not None and not is_billable(each.record))
        else replace(each, stands=False, replaces=None)
        for each in group
    ]


def request_sums(group: Sequence[LedgerRecord]) -> dict[SumKey, TotalFigures]:
    """Return what the records of one request add to the sums."""
    sums: defaultdict[SumKey, TotalFigures] = defaultdict(lambda: (0, 0, 0, 0))
    for month, record, sign in _charges(group):
        _add(sums, month, record, sign)
    return dict(sums)


def step_sums(group: Sequence[LedgerRecord]) -> dict[StepKey, int]:
    """Return what the records of one request add to the counts of degraded requests."""
    sums: defaultdict[StepKey, int] = defaultdict(int)
    for month, record, sign in _charges(group):
        if record.degraded:
            sums[StepKey(record.tenant, month, record.ended_at_us // DAY_US, step_of_record(record.degraded))] += sign
    return dict(sums)


def _charges(group: Sequence[LedgerRecord]) -> Iterator[tuple[str, RequestRecord, int]]:
    """Yield month and record of each charge with 1, and of each charge that is taken back with -1."""
    for booked in group:
        if booked.stands:
            yield booked.month, booked.record, 1
            if booked.replaces is not None:
                (taken_back,) = (other.record for other in group if row_key(other.record) == booked.replaces)
                yield booked.month, taken_back, -1


def device_sums(record: LifetimeRecord, month: str) -> dict[DeviceKey, TotalFigures]:
    """Return what a replica's life adds to the sums. A standby that died unused adds nothing: it has no tenant."""
    if record.tenant is None:
        return {}
    day = record.died_at_us // DAY_US
    key = DeviceKey(record.tenant, month, day, record.model or "", record.device_class)
    return {key: (1, record.restore_us, record.active_us, record.idle_us)}


def runtime_uses(records: Iterable[RequestRecord]) -> dict[str, RuntimeUsage]:
    """Return what the records of one request add to each runtime. Orphan and activator records are one request."""
    uses: dict[str, RuntimeUsage] = {}
    for record in records:
        if record.runtime_id is not None:
            _, answered, device_us = uses.get(record.runtime_id, (1, 0, 0))
            cost = int(record.device_us > 0 or record.completion_tokens > 0)
            uses[record.runtime_id] = (1, max(answered, cost), max(device_us, record.device_us))
    return uses


def _add(sums: defaultdict[SumKey, TotalFigures], month: str, record: RequestRecord, sign: int) -> None:
    key = SumKey(record.tenant, month, record.ended_at_us // DAY_US, record.model, record.outcome, is_billable(record))
    figures = (1, record.prompt_tokens, record.cached_tokens, record.completion_tokens)
    old = sums[key]
    sums[key] = (
        old[0] + sign * figures[0], old[1] + sign * figures[1], old[2] + sign * figures[2], old[3] + sign * figures[3]
    )  # fmt: skip
