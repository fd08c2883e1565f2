"""The routes of the bill: a tenant sees its own, checks it, and closes its months."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import Connection

from controlplane.audit.audit_entry_policy import AuditAction, made
from controlplane.audit.audit_rows import Actor, ActorOf, record
from controlplane.billing.billing_report import billing_report, close_month
from controlplane.db.database import refuse_unreadable
from controlplane.db.nul_characters import read
from controlplane.ledger.closed_months import closed_report
from controlplane.ledger.policy.month import month_bounds_us
from controlplane.ledger.policy.rating import PriceBook
from controlplane.ledger.usage_ledger import Ledger
from controlplane.ledger_check.check_program import CheckRequest
from controlplane.ledger_check.check_runner import CheckRunner
from kelvin.contracts.accounting.billing_reports import (
    BillingReport,
    CloseMonth,
    ClosingReport,
    Examining,
    ReconcileReport,
    VerifyReport,
)
from kelvin.contracts.errors import Conflict, NotFound, Refused
from kelvin.contracts.serving.control_messages import Principal, Scope
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.ipc.http_bodies import answer
from kelvin.ipc.openapi import route_docs
from kelvin.ipc.principal import require_scope

MAX_WAITING_REPORTS: Final = 64  # reports of one tenant


class _ReportLocks:
    """Lets each tenant read one report at a time. A report may take seconds, and the database has few readers."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting = Counter[str]()

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Wait for the tenant's turn, and keep it until the block ends. Raises Refused(Overloaded)."""
        if self._waiting[tenant] >= MAX_WAITING_REPORTS:
            raise Refused(Overloaded("the line of this tenant's reports", MAX_WAITING_REPORTS, 1.0))
        self._waiting[tenant] += 1
        try:
            async with self._locks.setdefault(tenant, asyncio.Lock()):
                yield
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant], self._locks[tenant]


def router(
    ledger: Ledger,
    book: PriceBook,
    examiner: CheckRunner,
    *,
    live_runtimes: Callable[[], Collection[str]] | None = None,
    wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
) -> APIRouter:
    """`live_runtimes` tells who has not died: without it the loss of a source's last lifetime record goes unnoticed."""
    routes = APIRouter()
    locks = _ReportLocks()

    def live() -> Collection[str] | None:
        return None if live_runtimes is None else frozenset(live_runtimes())

    @routes.get("/admin/v1/billing/report", **route_docs(BillingReport, NotFound, Conflict, scope=Scope.BILLING_READ))
    async def report(
        principal: Annotated[Principal, Depends(require_scope(Scope.BILLING_READ))],
        month: Annotated[str, Query()],
        tenant: Annotated[str | None, Query()] = None,
    ) -> Response:
        whose, alive = _own_tenant(principal, tenant), live()
        month_bounds_us(month)
        async with locks.of(whose):  # until it is read: who leaves meanwhile does not make room for another
            found = await ledger.database.read(
                lambda connection: billing_report(connection, book, whose, month, live=alive, now_us=wall_us())
            )
        return answer(found)

    @routes.post("/admin/v1/billing/close", **route_docs(ClosingReport, NotFound, Conflict, request_body=CloseMonth))
    async def close(by: Annotated[Actor, Depends(ActorOf(Scope.ADMIN))], request: Request) -> Response:
        asked = await read(request, CloseMonth)
        whose, alive, now_us = _own_tenant(by, asked.tenant), live(), wall_us()

        def closed(connection: Connection) -> ClosingReport:
            with refuse_unreadable(f"month {asked.month}", "kelvin billing verify"):
                was_open = closed_report(connection, whose, asked.month) is None
                closing = close_month(connection, book, whose, asked.month, live=alive, now_us=now_us)
            if was_open:
                changed = made(total_micros=closing.report.total_micros, chain=closing.chain)
                record(
                    connection, by, now_us // 1_000_000, whose, AuditAction.MONTH_CLOSED, asked.month, changed=changed
                )
            return closing

        return answer(await ledger.close_month(closed))

    async def examined(
        kind: Literal["verify", "reconcile"], principal: Principal, tenant: str | None, month: str | None
    ) -> Response:
        """The report, or 202 and how far it is."""
        whose, alive = _own_tenant(principal, tenant), live()
        if month is not None:
            month_bounds_us(month)
        living = None if alive is None else tuple(sorted(alive))
        order = CheckRequest(kind=kind, tenant=whose, month=month, live=living, now_us=wall_us(), book=book)
        found = await examiner.answer(order)
        if isinstance(found, Examining):
            return answer(found, 202)
        return Response(found, media_type="application/json")

    @routes.get(
        "/admin/v1/billing/verify",
        **route_docs(VerifyReport, NotFound, extra_responses={202: Examining}, scope=Scope.BILLING_READ),
    )
    async def verify(
        principal: Annotated[Principal, Depends(require_scope(Scope.BILLING_READ))],
        month: Annotated[str | None, Query()] = None,
        tenant: Annotated[str | None, Query()] = None,
    ) -> Response:
        return await examined("verify", principal, tenant, month)

    @routes.get(
        "/admin/v1/billing/reconcile",
        **route_docs(ReconcileReport, NotFound, extra_responses={202: Examining}, scope=Scope.BILLING_READ),
    )
    async def reconcile(
        principal: Annotated[Principal, Depends(require_scope(Scope.BILLING_READ))],
        month: Annotated[str | None, Query()] = None,
        tenant: Annotated[str | None, Query()] = None,
    ) -> Response:
        return await examined("reconcile", principal, tenant, month)

    return routes


def _own_tenant(principal: Principal, tenant: str | None) -> str:
    """Another's looks like one that does not exist."""
    whose = tenant or principal.tenant
    if whose != principal.tenant:
        raise Refused(NotFound("tenant", whose[:63]))
    return whose
