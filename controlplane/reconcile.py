"""Hold the accounts of a tenant against each other, and name each difference with what it is worth at most.

Requests of replicas against those of activators, lives against the time that is attributed, what each source wrote
against what arrived, the totals that bills are made of against the rows. One snapshot; rows are streamed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, select

from contracts.billing import Compared, Difference, ReconcileReport
from contracts.usage import SO_FAR_S, LifetimeRecord, RequestRecord
from contracts.wire import BadJson, decoder
from controlplane.accounts import OpenRuntime, charged_orphans, kept_aside, lives, open_runtimes, received_ranges
from controlplane.closings import frozen_book
from controlplane.ledger_schema import LIFETIME_VALUES, lifetime_records, owned_by, request_records
from controlplane.policy.balance import SETTLE_US, Kind, lifetime_problems, missing_lifetime
from controlplane.policy.differences import (
    Ending,
    Waiting,
    charged_by_receipt,
    charged_so_far,
    gone,
    life_micros,
    of_conflict,
    of_hole,
    of_life,
    requests_micros,
    silent,
    unshipped,
    wrong_total,
)
from controlplane.policy.month import DAY_US, day_of, month_bounds_us, month_of
from controlplane.policy.rating import PriceBook, Prices
from controlplane.recount import COUNTED, Differing, Recount, Uses
from controlplane.schema import versions
from controlplane.store import streamed
from controlplane.verify import Tell, months_of

MAX_DIFFERENCES: Final = 500  # listed; the rest is counted
MAX_IDS: Final = 10
QUIET_US: Final = 2 * SO_FAR_S * 1_000_000  # one word may be lost
_ROWS: Final = 2_000
_REQUESTS: Final = decoder(RequestRecord)
_LIVES: Final = decoder(LifetimeRecord)
_NAMED: Final = frozenset((Kind.REQUESTS_MISSING, Kind.REQUESTS_EXTRA, Kind.LIFETIME_MISSING, Kind.DEVICE_TIME_OVER))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the ledger does not hold."""

    book: PriceBook
    live: Collection[str] | None  # runtimes that have not died; None where nobody knows
    now_us: int  # wall clock
    spools: Mapping[str, Waiting]  # sources whose spool is there


def reconcile(
    connection: Connection, tenant: str, month: str | None, around: Surroundings, tell: Tell = lambda rows: None
) -> ReconcileReport:
    """One month, or all that there are and the totals by replica."""
    months = [month] if month is not None else months_of(connection, tenant)
    found = _Found()
    uses = Uses(connection, tenant) if month is None else None
    for each in months:
        _Month(connection, tenant, each, around, found).compare()
    for source, waiting in sorted(around.spools.items()):
        if waiting.last > waiting.acknowledged:
            found.note(unshipped(source, waiting))
    for each in months:
        found.note_all(_wrong_totals(connection, tenant, each, around, found, uses, tell))
    if uses is not None:
        found.note_all(_wrong_replica(differing) for differing in uses.differing())
    return ReconcileReport(
        tenant=tenant,
        months=tuple(months),
        currency=around.book.currency,
        agrees=found.failing == 0,
        compared=Compared(**found.compared | {"sources": len(found.sources)}),
        differences=found.differences(),
        more=found.more,
    )


@dataclass(slots=True)
class _Found:
    """Collects differences: those that fail are listed before those that are known."""

    compared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Compared.__struct_fields__, 0))
    failing: int = 0
    more: int = 0
    ids: dict[str, list[str]] = field(default_factory=dict)  # of requests, by a replica that something is wrong with
    sources: set[str] = field(default_factory=set)  # that were compared: one may have recorded in several months
    dead: set[str] = field(default_factory=set)  # replicas without a lifetime, likewise
    _wrong: list[Difference] = field(default_factory=list)
    _known: list[Difference] = field(default_factory=list)

    def note(self, difference: Difference) -> None:
        """Keep it, or count it where too many are kept."""
        self.failing += difference.fails
        kept = self._wrong if difference.fails else self._known
        if len(kept) >= MAX_DIFFERENCES:
            self.more += 1
            return
        kept.append(difference)
        if difference.kind in _NAMED:
            self.ids[difference.subject] = []

    def note_all(self, differences: Iterable[Difference]) -> None:
        """Each of them."""
        for difference in differences:
            self.note(difference)

    def differences(self) -> tuple[Difference, ...]:
        """All that are kept, with the ids that turned up."""
        return tuple(
            msgspec.structs.replace(each, ids=tuple(self.ids.get(each.subject, ()))) if each.kind in _NAMED else each
            for each in chain(self._wrong, self._known)
        )


class _Month:
    """What is kept by replica, by source and by record."""

    def __init__(self, connection: Connection, tenant: str, month: str, around: Surroundings, found: _Found) -> None:
        self._connection = connection
        self._tenant = tenant
        self._month = month
        self._around = around
        self._found = found
        self._prices = _prices_of(connection, tenant, around.book)

    def compare(self) -> None:
        """All but the totals."""
        begin_us, end_us = month_bounds_us(self._month)
        compared = self._found.compared
        for life in lives(self._connection, self._tenant, self._month):
            facts = life.facts
            compared["replicas"] += 1
            compared["served"] += facts.requests
            compared["recorded"] += facts.recorded_requests
            compared["lived_us"] += facts.total_us
            compared["attributed_us"] += facts.standby_us + facts.restore_us + facts.active_us + facts.idle_us
            compared["active_us"] += facts.active_us
            compared["used_us"] += facts.recorded_device_us
            for problem in lifetime_problems(facts):
                ending = Ending(life.device_class, life.exit_status, self._positions(life.model, life.version))
                self._found.note(of_life(problem, facts, ending, self._prices(life.died_at_us)))
            if facts.is_cut:
                self._found.note(charged_so_far(facts.runtime_id, life.device_class, self._prices(life.died_at_us)))
        for runtime in open_runtimes(self._connection, self._tenant, begin_us, end_us):
            if runtime.told_us is not None:
                if runtime.told_us + QUIET_US < self._around.now_us and runtime.runtime_id not in self._found.dead:
                    self._found.dead.add(runtime.runtime_id)
                    self._found.note(silent(runtime.runtime_id))
            elif self._is_dead(runtime) and runtime.runtime_id not in self._found.dead:
                self._found.dead.add(runtime.runtime_id)
                problem = missing_lifetime(runtime.runtime_id, runtime.requests)
                self._found.note(gone(problem, runtime.requests, runtime.device_us))
        for source, ranges in received_ranges(self._connection, begin_us, end_us):
            if source not in self._found.sources:
                self._found.sources.add(source)
                self._found.note_all(of_hole(source, ranges, self._around.spools.get(source)))
        for orphan in charged_orphans(self._connection, self._tenant, self._month):
            compared["orphans"] += 1
            prices = self._prices(orphan.ended_at_us)
            self._found.note(charged_by_receipt(orphan.request_id, orphan.runtime_id, orphan.completion_tokens, prices))
        for aside in kept_aside(self._connection, self._tenant, self._month):
            record = _record_of(aside.record)
            self._found.note(of_conflict(aside.subject, aside.reason, record, self._prices(aside.at_us)))

    def _is_dead(self, runtime: OpenRuntime) -> bool:
        """And for so long that its lifetime should be here."""
        live = self._around.live
        return live is not None and runtime.runtime_id not in live and runtime.last_us + SETTLE_US < self._around.now_us

    def _positions(self, model: str, version: str | None) -> int | None:
        """Tokens that a request of the version can have."""
        c = versions.c
        query = select(c.max_positions).where(c.tenant == self._tenant, c.model == model, c.version == (version or ""))
        return self._connection.execute(query).scalar()


def _prices_of(connection: Connection, tenant: str, book: PriceBook) -> Callable[[int], Prices]:
    """Prices of an instant: of a closed month, those that were frozen with it."""
    books: dict[str, PriceBook] = {}

    def at(at_us: int) -> Prices:
        month = month_of(at_us)
        if month not in books:
            books[month] = frozen_book(connection, tenant, month) or book
        return books[month].at(at_us)

    return at


def _record_of(raw: str) -> RequestRecord | LifetimeRecord | None:
    for kind in (_REQUESTS, _LIVES):
        with suppress(BadJson):
            return kind.decode(raw)
    return None


def _wrong_totals(
    connection: Connection,
    tenant: str,
    month: str,
    around: Surroundings,
    found: _Found,
    uses: Uses | None,
    tell: Tell,
) -> Iterator[Difference]:
    """Each total of the month that is not what its rows make."""
    recount = Recount(connection, tenant, month, uses)
    table = request_records
    rows = select(*(table.c[name] for name in COUNTED)).where(table.c.tenant == tenant, table.c.month == month)
    for number, row in enumerate(streamed(connection, rows.order_by(table.c.link), _ROWS), 1):
        recount.add_request(*row)
        ids = found.ids.get(row.runtime_id) if found.ids else None
        if ids is not None and len(ids) < MAX_IDS:
            ids.append(row.request_id)
        found.compared["rows"] += 1
        if number % _ROWS == 0:
            tell(_ROWS)
    lived = select(*LIFETIME_VALUES).where(owned_by(lifetime_records, tenant), lifetime_records.c.month == month)
    for row in streamed(connection, lived, _ROWS):
        recount.add_lifetime(LifetimeRecord(**row._mapping))
        found.compared["rows"] += 1
    prices = _prices_of(connection, tenant, around.book)
    for differing in recount.differing_requests():
        yield _wrong_requests(month, differing, prices)
    for differing in recount.differing_steps():
        yield _wrong_step(month, differing)
    for differing in recount.differing_devices():
        yield _wrong_device_time(month, differing, prices)


def _wrong_requests(month: str, differing: Differing, prices: Callable[[int], Prices]) -> Difference:
    day, model, outcome, billable = differing.key
    count, prompt, cached, completion = (abs(figure) for figure in differing.off)
    # Prompt and cached tokens may be off in different directions.
    micros = requests_micros(prices(day * DAY_US), count, max(prompt, cached), cached, completion) if billable else 0
    return wrong_total(
        f"{month}: {day_of(day * DAY_US)}, {model}, {outcome}, {'charged' if billable else 'free'}",
        _beside("requests, prompt, cached and completion tokens", differing),
        (count, prompt + completion, 0, micros),
    )


def _wrong_step(month: str, differing: Differing) -> Difference:
    """A count alone: no money."""
    day, step = differing.key
    what = _beside("requests that a ladder gave something up for", differing)
    return wrong_total(f"{month}: {day_of(day * DAY_US)}, {step}", what, (abs(differing.off[0]), 0, 0, 0))


def _wrong_device_time(month: str, differing: Differing, prices: Callable[[int], Prices]) -> Difference:
    day, model, device_class = differing.key
    _, restore_us, active_us, idle_us = (abs(figure) for figure in differing.off)
    micros = life_micros(prices(day * DAY_US), device_class, restore_us, active_us, idle_us)
    return wrong_total(
        f"{month}: {day_of(day * DAY_US)}, {model}, {device_class}",
        _beside("replicas, restore, active and idle us", differing),
        (0, 0, restore_us + active_us + idle_us, micros),
    )


def _wrong_replica(differing: Differing) -> Difference:
    """Only the balance is made of these: no money."""
    requests, _, device_us, *_ = (abs(figure) for figure in differing.off)
    what = "requests, those that cost anything, device us, first and last end"
    return wrong_total(f"replica {differing.key[0]}", _beside(what, differing), (requests, 0, device_us, 0))


def _beside(what: str, differing: Differing) -> str:
    return f"{what} are {_figures(differing.kept)}; the rows make {_figures(differing.made)}"


def _figures(sums: Any) -> str:
    return "none" if sums is None else ", ".join(str(figure) for figure in sums)
