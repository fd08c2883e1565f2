"""Hold the accounts of a tenant against each other, and name each difference with what it is worth at most.

Requests of replicas against those of activators, lives against the time that is attributed, what each source wrote
against what arrived, the totals that bills are made of against the rows. One snapshot; rows are streamed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import msgspec
from sqlalchemy import Connection

from contracts.billing import Compared, Difference, ReconcileReport
from controlplane.accounts import Accounts, Surroundings, open_runtimes, unreadable_finding
from controlplane.chains import Tell
from controlplane.policy.findings import (
    Finding,
    Kind,
    Rates,
    Size,
    Sums,
    life_micros,
    of_waiting,
    requests_micros,
)
from controlplane.policy.month import DAY_US, day_of
from controlplane.recount import Uses
from controlplane.store import UNREADABLE
from controlplane.verify import MonthRows, months_of

MAX_DIFFERENCES: Final = 500  # listed; the rest is counted
MAX_IDS: Final = 10
_NAMED: Final = frozenset((Kind.REQUESTS_MISSING, Kind.REQUESTS_EXTRA, Kind.LIFETIME_MISSING, Kind.DEVICE_TIME_OVER))


def reconcile(
    connection: Connection, tenant: str, month: str | None, around: Surroundings, tell: Tell = lambda rows: None
) -> ReconcileReport:
    """One month, or all that there are and the totals by replica."""
    months = [month] if month is not None else months_of(connection, tenant)
    found = _Found()
    accounts = Accounts(connection, tenant, around)
    for each in months:
        found.note_all(accounts.lives(each))
        found.note_all(accounts.ended(open_runtimes(connection, tenant, each)))
        found.note_all(accounts.gaps(each))
        found.note_all(accounts.charged_orphans(each))
        found.note_all(accounts.kept_aside(each))
    spools = sorted(around.spools.items())
    found.note_all(of_waiting(source, each) for source, each in spools if each.last > each.acknowledged)
    uses = Uses(connection, tenant) if month is None else None
    is_whole = True  # whether every row of all months was read
    for each in months:
        rows = MonthRows(connection, tenant, each, uses, tell)
        is_whole &= found.note_all(_priced(each, finding, accounts.rates) for finding in rows.totals(found.add_id))
        accounts.compared["rows"] += rows.rows
    if uses is not None and is_whole:
        found.note_all(_priced("", finding, accounts.rates) for finding in uses.findings())
    return ReconcileReport(
        tenant=tenant,
        months=tuple(months),
        currency=around.book.currency,
        agrees=found.failing == 0,
        compared=Compared(**accounts.compared),
        differences=found.differences(),
        more=found.more,
    )


@dataclass(slots=True)
class _Found:
    """Collects findings: those that fail are listed before those that are known."""

    failing: int = 0
    more: int = 0
    _ids: dict[str, list[str]] = field(default_factory=dict)  # of requests, by a replica that something is wrong with
    _wrong: list[Difference] = field(default_factory=list)
    _known: list[Difference] = field(default_factory=list)

    def note_all(self, findings: Iterable[Finding]) -> bool:
        """Keep each with its size, or count it where too many are kept. Return whether all rows could be read."""
        try:
            for finding in findings:
                self._note(finding)
        except UNREADABLE as error:
            self._note(unreadable_finding(error))
            return False
        return True

    def _note(self, finding: Finding) -> None:
        kept = self._wrong if finding.fails else self._known
        if len(kept) < MAX_DIFFERENCES:
            kept.append(_difference(finding))
            if finding.kind in _NAMED:
                self._ids[finding.subject] = []
        else:
            self.more += 1
        self.failing += finding.fails

    def add_id(self, request_id: str, runtime_id: str | None) -> None:
        """A request of that replica."""
        ids = self._ids.get(runtime_id) if self._ids and runtime_id is not None else None
        if ids is not None and len(ids) < MAX_IDS:
            ids.append(request_id)

    def differences(self) -> tuple[Difference, ...]:
        """All that are kept, with the ids that turned up."""
        return tuple(
            msgspec.structs.replace(each, ids=tuple(self._ids.get(each.subject, ()))) if each.kind in _NAMED else each
            for each in chain(self._wrong, self._known)
        )


def _difference(finding: Finding) -> Difference:
    size = finding.size()
    return Difference(
        kind=finding.kind,
        subject=finding.subject,
        detail=f"{finding.detail}; {size.least}" if size.least else finding.detail,
        fails=finding.fails,
        cause=finding.cause,
        ids=size.ids,
        requests=size.requests,
        tokens=size.tokens,
        device_us=size.device_us,
        amount_micros=size.amount_micros,
    )


def _priced(month: str, finding: Finding, rates: Rates) -> Finding:
    """A wrong total by what it sums up, with its size."""
    total = finding.total
    assert total is not None, "rows tell of totals alone"
    match total.of:
        case Sums.REQUESTS:
            day, model, outcome, billable = total.key
            count, prompt, cached, completion = total.off
            prices = rates.prices(day * DAY_US)
            # Prompt and cached tokens may be off in different directions.
            micros = requests_micros(prices, count, max(prompt, cached), cached, completion) if billable else 0
            subject = f"{month}: {day_of(day * DAY_US)}, {model}, {outcome}, {'charged' if billable else 'free'}"
            figures = "requests, prompt, cached and completion tokens"
            size = Size(count, prompt + completion, 0, micros)
        case Sums.STEPS:  # a count alone: no money
            day, step = total.key
            subject = f"{month}: {day_of(day * DAY_US)}, {step}"
            figures = "requests that a ladder gave something up for"
            size = Size(total.off[0])
        case Sums.DEVICE_TIME:
            day, model, device_class = total.key
            _, *parts = total.off
            micros = life_micros(rates.prices(day * DAY_US), device_class, *parts)
            subject = f"{month}: {day_of(day * DAY_US)}, {model}, {device_class}"
            figures = "replicas, restore, active and idle us"
            size = Size(0, 0, sum(parts), micros)
        case Sums.REPLICA:  # only the balance is made of these: no money
            requests, _, device_us, *_ = total.off
            subject = finding.subject
            figures = "requests, those that cost anything, device us, first and last end"
            size = Size(requests, 0, device_us)
    detail = f"{figures} are {_figures(total.kept)}; the rows make {_figures(total.made)}"
    return Finding(Kind.TOTAL_WRONG, subject, detail, lambda: size)


def _figures(sums: Sequence[int] | None) -> str:
    return "none" if sums is None else ", ".join(str(figure) for figure in sums)
