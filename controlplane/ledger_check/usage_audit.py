"""Compare a tenant's accounts with each other, and report each difference with its largest possible size.

It compares requests of replicas with those of activators, lifetimes with attributed time, written records of each
source with arrived ones, and stored totals with the rows. All comes from one snapshot; rows are streamed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import msgspec
from sqlalchemy import Connection

from controlplane.db.chained_log import OnProgress
from controlplane.db.database import UNREADABLE
from controlplane.ledger.consistency_checks import ConsistencyChecks, ExternalFacts, open_runtimes, unreadable_finding
from controlplane.ledger.policy.discrepancies import (
    Discrepancy,
    DiscrepancyKind,
    Impact,
    PriceLookup,
    TotalKind,
    device_price_micros,
    report_unshipped,
    requests_price_micros,
)
from controlplane.ledger.policy.month import DAY_US, day_of
from controlplane.ledger_check.ledger_verification import MonthVerification, list_months
from controlplane.ledger_check.recomputed_totals import RuntimeTotals
from kelvin.contracts.accounting.billing_reports import Compared, Difference, ReconcileReport

MAX_DIFFERENCES: Final = 500  # listed ones; further ones are counted
MAX_IDS: Final = 10
_KINDS_WITH_REQUEST_IDS: Final = frozenset(
    (
        DiscrepancyKind.REQUESTS_MISSING,
        DiscrepancyKind.REQUESTS_EXTRA,
        DiscrepancyKind.LIFETIME_MISSING,
        DiscrepancyKind.DEVICE_TIME_OVER,
    )
)


def reconcile(
    connection: Connection,
    tenant: str,
    month: str | None,
    external_facts: ExternalFacts,
    on_progress: OnProgress = lambda rows: None,
) -> ReconcileReport:
    """Report one month; without `month` all months, and the totals by replica."""
    months = [month] if month is not None else list_months(connection, tenant)
    found = _DiscrepancyCollector()
    accounts = ConsistencyChecks(connection, tenant, external_facts)
    for each in months:
        found.add_all(accounts.check_lifetimes(each))
        found.add_all(accounts.check_unrecorded_replicas(open_runtimes(connection, tenant, each)))
        found.add_all(accounts.check_gaps(each))
        found.add_all(accounts.check_charged_orphans(each))
        found.add_all(accounts.check_conflicts(each))
    spools = sorted(external_facts.spools.items())
    found.add_all(report_unshipped(source, each) for source, each in spools if each.last > each.acknowledged)
    runtimes = RuntimeTotals(connection, tenant) if month is None else None
    is_whole = True  # whether every row of all months was read
    for each in months:
        rows = MonthVerification(connection, tenant, each, runtimes, on_progress)
        is_whole &= found.add_all(
            _with_impact(each, finding, accounts.price_lookup) for finding in rows.totals(found.add_id)
        )
        accounts.compared["rows"] += rows.rows
    if runtimes is not None and is_whole:
        found.add_all(_with_impact("", finding, accounts.price_lookup) for finding in runtimes.findings())
    return ReconcileReport(
        tenant=tenant,
        months=tuple(months),
        currency=external_facts.book.currency,
        agrees=found.failure_count == 0,
        compared=Compared(**accounts.compared),
        differences=found.differences(),
        more=found.more,
    )


@dataclass(slots=True)
class _DiscrepancyCollector:
    """Collects findings. Failures are listed before known inexactness."""

    failure_count: int = 0
    more: int = 0
    _ids: dict[str, list[str]] = field(default_factory=dict)  # request ids by replica, for replicas with a finding
    _failures: list[Difference] = field(default_factory=list)
    _informational: list[Difference] = field(default_factory=list)

    def add_all(self, findings: Iterable[Discrepancy]) -> bool:
        """Add findings with sizes; only count those beyond MAX_DIFFERENCES. Return whether all rows were readable."""
        try:
            for finding in findings:
                self._add(finding)
        except UNREADABLE as error:
            self._add(unreadable_finding(error))
            return False
        return True

    def _add(self, finding: Discrepancy) -> None:
        kept = self._failures if finding.fails else self._informational
        if len(kept) < MAX_DIFFERENCES:
            kept.append(_difference(finding))
            if finding.kind in _KINDS_WITH_REQUEST_IDS:
                self._ids[finding.subject] = []
        else:
            self.more += 1
        self.failure_count += finding.fails

    def add_id(self, request_id: str, runtime_id: str | None) -> None:
        """Note the id of a request of that replica, if the replica has a finding."""
        ids = self._ids.get(runtime_id) if self._ids and runtime_id is not None else None
        if ids is not None and len(ids) < MAX_IDS:
            ids.append(request_id)

    def differences(self) -> tuple[Difference, ...]:
        """Return all listed differences, with the noted request ids."""
        return tuple(
            msgspec.structs.replace(each, ids=tuple(self._ids.get(each.subject, ())))
            if each.kind in _KINDS_WITH_REQUEST_IDS
            else each
            for each in chain(self._failures, self._informational)
        )


def _difference(finding: Discrepancy) -> Difference:
    impact = finding.impact()
    return Difference(
        kind=finding.kind,
        subject=finding.subject,
        detail=f"{finding.detail}; {impact.least}" if impact.least else finding.detail,
        fails=finding.fails,
        cause=finding.cause,
        ids=impact.ids,
        requests=impact.requests,
        tokens=impact.tokens,
        device_us=impact.device_us,
        amount_micros=impact.amount_micros,
    )


def _with_impact(month: str, finding: Discrepancy, price_lookup: PriceLookup) -> Discrepancy:
    """Describe a wrong total by what it sums up, and add its size."""
    total = finding.total
    assert total is not None, "only TOTAL_WRONG comes here"
    match total.total_kind:
        case TotalKind.REQUESTS:
            day, model, outcome, billable = total.key
            count, prompt, cached, completion = total.deltas
            prices = price_lookup.prices(day * DAY_US)
            # Prompt and cached tokens may be off in different directions.
            micros = requests_price_micros(prices, count, max(prompt, cached), cached, completion) if billable else 0
            subject = f"{month}: {day_of(day * DAY_US)}, {model}, {outcome}, {'charged' if billable else 'free'}"
            figures = "requests, prompt, cached and completion tokens"
            impact = Impact(count, prompt + completion, 0, micros)
        case TotalKind.STEPS:  # a count, which costs nothing
            day, step = total.key
            subject = f"{month}: {day_of(day * DAY_US)}, {step}"
            figures = "degraded requests"
            impact = Impact(total.deltas[0])
        case TotalKind.DEVICE_TIME:
            day, model, device_class = total.key
            _, *parts = total.deltas
            micros = device_price_micros(price_lookup.prices(day * DAY_US), device_class, *parts)
            subject = f"{month}: {day_of(day * DAY_US)}, {model}, {device_class}"
            figures = "replicas, restore, active and idle us"
            impact = Impact(0, 0, sum(parts), micros)
        case TotalKind.REPLICA:  # used by the balance only, so it costs nothing
            requests, _, device_us, *_ = total.deltas
            subject = finding.subject
            figures = "requests, requests with a cost, device us, first and last end"
            impact = Impact(requests, 0, device_us)
    detail = f"{figures} are {_join_figures(total.stored)}; the rows make {_join_figures(total.recomputed)}"
    return Discrepancy(DiscrepancyKind.TOTAL_WRONG, subject, detail, lambda: impact)


def _join_figures(sums: Sequence[int] | None) -> str:
    return "none" if sums is None else ", ".join(str(figure) for figure in sums)
