"""A tenant's month out of the ledger: quantities, money, and what does not balance. One snapshot, bounded memory.

Sums are the database's, so that a month of any size gives a few rows; prices are `rating`'s, checks `balance`'s.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Final

from sqlalchemy import Connection, case, func, or_, select

from contracts.billing import Balance, BillingReport, DeviceUse, Imbalance
from controlplane.ledger_schema import conflicts, lifetime_records, received, request_records, sources
from controlplane.policy.balance import (
    SETTLE_US,
    LifetimeFacts,
    Range,
    conflict,
    holes,
    lifetime_problems,
    missing_lifetime,
)
from controlplane.policy.month import month_bounds_us
from controlplane.policy.rating import Bill, PriceBook

MAX_PROBLEMS: Final = 200  # listed; the rest is counted
MAX_OPEN: Final = 100
_ROWS: Final = 500  # fetched at a time


def billing_report(
    connection: Connection,
    book: PriceBook,
    tenant: str,
    month: str,
    *,
    live: Collection[str] | None,
    now_us: int,
) -> BillingReport:
    """`live` are the runtimes that have not died, None where nobody knows; `now_us` is wall clock.

    Raises Refused(InvalidRequest) for a month that is none.
    """
    begin_us, end_us = month_bounds_us(month)
    bill, outcomes, tokens = Bill(), defaultdict[str, int](int), [0, 0, 0]
    device: dict[str, list[int]] = {}
    for since_us, until_us, prices in book.periods(begin_us, end_us):
        for sums in _request_sums(connection, tenant, since_us, until_us):
            model, outcome, billable, count, prompt, cached, completion = sums
            outcomes[outcome] += count
            tokens = [tokens[0] + prompt, tokens[1] + cached, tokens[2] + completion]
            if billable:
                bill.add_requests(
                    prices,
                    model,
                    requests=count,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    completion_tokens=completion,
                )
        for times in _device_sums(connection, tenant, since_us, until_us):
            of_model, device_class, count, restore_us, active_us, idle_us = times
            use = device.setdefault(device_class, [0, 0, 0, 0])
            device[device_class] = [a + b for a, b in zip(use, (count, restore_us, active_us, idle_us), strict=True)]
            bill.add_device_time(
                prices, of_model or "", device_class, restore_us=restore_us, active_us=active_us, idle_us=idle_us
            )
    lines = bill.lines()
    open_runtimes = dict(_open_runtimes(connection, tenant, begin_us, end_us))
    return BillingReport(
        tenant=tenant,
        month=month,
        currency=book.currency,
        requests=dict(sorted(outcomes.items())),
        prompt_tokens=tokens[0],
        cached_tokens=tokens[1],
        completion_tokens=tokens[2],
        device=tuple(_device_use(name, use) for name, use in sorted(device.items())),
        lines=lines,
        total_micros=sum(line.amount_micros for line in lines),
        open_runtimes=tuple(islice(open_runtimes, MAX_OPEN)),
        balance=_balance(connection, tenant, begin_us, end_us, _gone(open_runtimes, live, now_us)),
    )


def _device_use(device_class: str, use: list[int]) -> DeviceUse:
    return DeviceUse(device_class=device_class, lifetimes=use[0], restore_us=use[1], active_us=use[2], idle_us=use[3])


def _request_sums(
    connection: Connection, tenant: str, since_us: int, until_us: int
) -> list[tuple[str, str, bool, int, int, int, int]]:
    c = request_records.c
    sums = (func.count(), func.sum(c.prompt_tokens), func.sum(c.cached_tokens), func.sum(c.completion_tokens))
    query = (
        select(c.model, c.outcome, c.billable, *sums)
        .where(c.tenant == tenant, c.stands.is_(True), c.ended_at_us >= since_us, c.ended_at_us < until_us)
        .group_by(c.model, c.outcome, c.billable)
    )
    return [tuple(row) for row in connection.execute(query)]


def _device_sums(
    connection: Connection, tenant: str, since_us: int, until_us: int
) -> list[tuple[str | None, str, int, int, int, int]]:
    c = lifetime_records.c
    sums = (func.count(), func.sum(c.restore_us), func.sum(c.active_us), func.sum(c.idle_us))
    query = (
        select(c.model, c.device_class, *sums)
        .where(c.tenant == tenant, c.died_at_us >= since_us, c.died_at_us < until_us)
        .group_by(c.model, c.device_class)
    )
    return [tuple(row) for row in connection.execute(query)]


def _open_runtimes(
    connection: Connection, tenant: str, begin_us: int, end_us: int
) -> list[tuple[str, tuple[int, int]]]:
    """Runtimes that served requests of the month and have no lifetime record: (requests, end of the last)."""
    c, died = request_records.c, lifetime_records.c
    query = (
        select(c.runtime_id, func.count(), func.max(c.ended_at_us))
        .where(c.tenant == tenant, c.ended_at_us >= begin_us, c.ended_at_us < end_us, c.runtime_id.is_not(None))
        .where(~select(died.runtime_id).where(died.runtime_id == c.runtime_id).exists())
        .group_by(c.runtime_id)
        .order_by(c.runtime_id)
    )
    return [(runtime_id, (count, last_us)) for runtime_id, count, last_us in connection.execute(query)]


def _gone(open_runtimes: dict[str, tuple[int, int]], live: Collection[str] | None, now_us: int) -> Iterator[Imbalance]:
    """Of the open ones, those that are dead for long enough that their record should be here."""
    if live is None:
        return
    for runtime_id, (requests, last_us) in open_runtimes.items():
        if runtime_id not in live and last_us + SETTLE_US < now_us:
            yield missing_lifetime(runtime_id, requests)


def _balance(connection: Connection, tenant: str, begin_us: int, end_us: int, gone: Iterator[Imbalance]) -> Balance:
    listed: list[Imbalance] = []
    lifetimes = source_count = found = 0

    def note(problems: Iterator[Imbalance]) -> None:
        nonlocal found
        for problem in problems:
            found += 1
            if len(listed) < MAX_PROBLEMS:
                listed.append(problem)

    for source, ranges in _received(connection, begin_us, end_us):
        source_count += 1
        note(holes(source, ranges))
    for facts in _lifetimes(connection, tenant, begin_us, end_us):
        lifetimes += 1
        note(lifetime_problems(facts))
    note(gone)
    note(_conflicts(connection, tenant, begin_us, end_us))
    return Balance(
        balanced=found == 0,
        lifetimes=lifetimes,
        sources=source_count,
        problems=tuple(listed),
        more=found - len(listed),
    )


def _received(connection: Connection, begin_us: int, end_us: int) -> Iterator[tuple[str, list[Range]]]:
    """What arrived of each source that recorded anything in the month: a lost record may have been anybody's."""
    query = (
        select(received.c.source, received.c.first, received.c.last)
        .join(sources, sources.c.source == received.c.source)
        .where(sources.c.first_at_us < end_us, sources.c.last_at_us >= begin_us)
        .order_by(received.c.source, received.c.first)
        .execution_options(yield_per=_ROWS)
    )
    name, ranges = None, list[Range]()
    for source, first, last in connection.execute(query):
        if source != name:
            if name is not None:
                yield name, ranges
            name, ranges = source, []
        ranges.append((first, last))
    if name is not None:
        yield name, ranges


def _lifetimes(connection: Connection, tenant: str, begin_us: int, end_us: int) -> Iterator[LifetimeFacts]:
    """Each replica that died in the month, beside all request records that name it, whenever they ended."""
    c, died = request_records.c, lifetime_records.c
    query = (
        select(
            died.runtime_id,
            died.total_us,
            died.standby_us,
            died.restore_us,
            died.active_us,
            died.idle_us,
            died.requests,
        )
        .where(died.tenant == tenant, died.died_at_us >= begin_us, died.died_at_us < end_us)
        .order_by(died.runtime_id)
        .execution_options(yield_per=_ROWS)
    )
    for row in connection.execute(query):
        # A request may have an orphan's record and an activator's: it is one request of this runtime.
        each = (
            select(func.max(c.device_us).label("device_us"), func.max(c.completion_tokens).label("tokens"))
            .where(c.runtime_id == row.runtime_id, c.tenant == tenant)
            .group_by(c.request_id)
            .subquery()
        )
        cost = case((or_(each.c.device_us > 0, each.c.tokens > 0), 1), else_=0)
        sums = select(
            func.count(), func.coalesce(func.sum(cost), 0), func.coalesce(func.sum(each.c.device_us), 0)
        ).select_from(each)
        recorded, answered, device_us = connection.execute(sums).one()
        yield LifetimeFacts(
            runtime_id=row.runtime_id,
            total_us=row.total_us,
            standby_us=row.standby_us,
            restore_us=row.restore_us,
            active_us=row.active_us,
            idle_us=row.idle_us,
            requests=row.requests,
            recorded_requests=recorded,
            answered_requests=answered,
            recorded_device_us=device_us,
        )


def _conflicts(connection: Connection, tenant: str, begin_us: int, end_us: int) -> Iterator[Imbalance]:
    c = conflicts.c
    query = (
        select(c.subject, c.reason)
        .where(c.tenant == tenant, c.at_us >= begin_us, c.at_us < end_us)
        .order_by(c.at_us, c.digest)
        .execution_options(yield_per=_ROWS)
    )
    for subject, reason in connection.execute(query):
        yield conflict(subject, reason)
