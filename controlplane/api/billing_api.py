"""Serve the routes of bills: a tenant reads its own bill, checks it, and closes its months."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import Connection

from controlplane.audit.audit_entry_policy import AuditAction, created_fields
from controlplane.audit.audit_rows import Actor, RequireActor, record
from controlplane.billing.billing_report import billing_report, close_month
from controlplane.db.database import refuse_unreadable
from controlplane.db.nul_characters import read_json
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
from kelvin.ipc.http_bodies import json_response
from kelvin.ipc.openapi import route_docs
from kelvin.ipc.principal import require_scope

MAX_WAITING_REPORTS: Final = 64  # per tenant


class _ReportLocks:
    """Lets each tenant read one report at a time. A report may take seconds, and the database has few readers."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting = Counter[str]()

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """Hold the tenant's lock until the block ends. Raises Refused(Overloaded) if too many reports wait for it."""
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
    check_runner: CheckRunner,
    *,
    live_runtimes: Callable[[], Collection[str]] | None = None,
    wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
) -> APIRouter:
    """Return the routes. Without `live_runtimes`, which returns those alive, a lost last lifetime record goes
    unnoticed.
    """
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
        owner, alive = _own_tenant(principal, tenant), live()
        month_bounds_us(month)
        async with locks.hold(owner):  # held until the read ends, even if the caller disconnects meanwhile
            found = await ledger.database.read(
                lambda connection: billing_report(connection, book, owner, month, live=alive, now_us=wall_us())
            )
        return json_response(found)

    @routes.post("/admin/v1/billing/close", **route_docs(ClosingReport, NotFound, Conflict, request_body=CloseMonth))
    async def close(actor: Annotated[Actor, Depends(RequireActor(Scope.ADMIN))], request: Request) -> Response:
        body = await read_json(request, CloseMonth)
        owner, alive, now_us = _own_tenant(actor, body.tenant), live(), wall_us()

        def close_and_record(connection: Connection) -> ClosingReport:
            with refuse_unreadable(f"month {body.month}", "kelvin billing verify"):
                was_open = closed_report(connection, owner, body.month) is None
                closing = close_month(connection, book, owner, body.month, live=alive, now_us=now_us)
            if was_open:
                changed = created_fields(total_micros=closing.report.total_micros, chain=closing.chain)
                record(
                    connection, actor, now_us // 1_000_000, owner, AuditAction.MONTH_CLOSED, body.month, changed=changed
                )
            return closing

        return json_response(await ledger.write_closing(close_and_record))

    _add_check_routes(routes, book, check_runner, live, wall_us)
    return routes


def _add_check_routes(
    routes: APIRouter,
    book: PriceBook,
    check_runner: CheckRunner,
    live: Callable[[], Collection[str] | None],
    wall_us: Callable[[], int],
) -> None:
    """Add the routes whose reports read every row. They answer with 202 and the progress until the report is ready."""

    async def run_check(
        kind: Literal["verify", "reconcile"], principal: Principal, tenant: str | None, month: str | None
    ) -> Response:
        owner, alive = _own_tenant(principal, tenant), live()
        if month is not None:
            month_bounds_us(month)
        living = None if alive is None else tuple(sorted(alive))
        check = CheckRequest(kind=kind, tenant=owner, month=month, live=living, now_us=wall_us(), book=book)
        answer = await check_runner.answer(check)
        if isinstance(answer, Examining):
            return json_response(answer, 202)
        return Response(answer, media_type="application/json")

    @routes.get(
        "/admin/v1/billing/verify",
        **route_docs(VerifyReport, NotFound, extra_responses={202: Examining}, scope=Scope.BILLING_READ),
    )
    async def verify(
        principal: Annotated[Principal, Depends(require_scope(Scope.BILLING_READ))],
        month: Annotated[str | None, Query()] = None,
        tenant: Annotated[str | None, Query()] = None,
    ) -> Response:
        return await run_check("verify", principal, tenant, month)

    @routes.get(
        "/admin/v1/billing/reconcile",
        **route_docs(ReconcileReport, NotFound, extra_responses={202: Examining}, scope=Scope.BILLING_READ),
    )
    async def reconcile(
        principal: Annotated[Principal, Depends(require_scope(Scope.BILLING_READ))],
        month: Annotated[str | None, Query()] = None,
        tenant: Annotated[str | None, Query()] = None,
    ) -> Response:
        return await run_check("reconcile", principal, tenant, month)


def _own_tenant(principal: Principal, tenant: str | None) -> str:
    """Return the tenant's name. Raises Refused(NotFound) for another tenant, so that it looks like a missing one."""
    owner = tenant or principal.tenant
    if owner != principal.tenant:
        raise Refused(NotFound("tenant", owner[:63]))
    return owner
