"""The routes of the bill: a tenant sees its own, checks it, and closes its months."""

import time
from collections.abc import Callable, Collection
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from contracts.billing import CloseMonth
from contracts.control import Principal, Scope
from contracts.errors import NotFound, Refused
from contracts.wire import encode
from controlplane.billing import billing_report
from controlplane.bodies import read
from controlplane.ledger import Ledger
from controlplane.month_end import close_month
from controlplane.policy.month import month_bounds_us
from controlplane.policy.rating import PriceBook
from controlplane.verify import verify_ledger
from service.principal import holder_of


def router(
    ledger: Ledger,
    book: PriceBook,
    *,
    live_runtimes: Callable[[], Collection[str]] | None = None,
    wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
) -> APIRouter:
    """`live_runtimes` tells who has not died: without it the loss of a source's last lifetime record goes unnoticed."""
    routes = APIRouter()

    def live() -> Collection[str] | None:
        return None if live_runtimes is None else frozenset(live_runtimes())

    @routes.get("/admin/v1/billing/report")
    async def report(
        principal: Annotated[Principal, Depends(holder_of(Scope.BILLING_READ))],
        month: Annotated[str, Query()],
        tenant: Annotated[str | None, Query()] = None,
    ) -> Response:
        whose, alive = _own(principal, tenant), live()
        month_bounds_us(month)
        return _answer(
            await ledger.database.read(
                lambda connection: billing_report(connection, book, whose, month, live=alive, now_us=wall_us())
            )
        )

    @routes.post("/admin/v1/billing/close")
    async def close(principal: Annotated[Principal, Depends(holder_of(Scope.ADMIN))], request: Request) -> Response:
        asked = await read(request, CloseMonth)
        whose, alive = _own(principal, asked.tenant), live()
        return _answer(
            await ledger.database.write(
                lambda connection: close_month(connection, book, whose, asked.month, live=alive, now_us=wall_us())
            )
        )

    @routes.get("/admin/v1/billing/verify")
    async def verify(
        principal: Annotated[Principal, Depends(holder_of(Scope.BILLING_READ))],
        month: Annotated[str | None, Query()] = None,
        tenant: Annotated[str | None, Query()] = None,
    ) -> Response:
        whose = _own(principal, tenant)
        if month is not None:
            month_bounds_us(month)
        return _answer(await ledger.database.read(lambda connection: verify_ledger(connection, whose, month)))

    return routes


def _own(principal: Principal, tenant: str | None) -> str:
    """Another's looks like one that does not exist."""
    whose = tenant or principal.tenant
    if whose != principal.tenant:
        raise Refused(NotFound("tenant", whose[:63]))
    return whose


def _answer(found: object) -> Response:
    return Response(encode(found), media_type="application/json")
