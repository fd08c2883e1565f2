"""The route of the bill: a tenant sees its own."""

import time
from collections.abc import Callable, Collection
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from contracts.control import Principal, Scope
from contracts.errors import NotFound, Refused
from contracts.wire import encode
from controlplane.billing import billing_report
from controlplane.ledger import Ledger
from controlplane.policy.month import month_bounds_us
from controlplane.policy.rating import PriceBook
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

    @routes.get("/admin/v1/billing/report")
    async def report(
        principal: Annotated[Principal, Depends(holder_of(Scope.BILLING_READ))],
        month: Annotated[str, Query()],
        tenant: Annotated[str | None, Query()] = None,
    ) -> Response:
        whose = tenant or principal.tenant
        if whose != principal.tenant:  # another's looks like one that does not exist
            raise Refused(NotFound("tenant", whose[:63]))
        month_bounds_us(month)
        live = None if live_runtimes is None else frozenset(live_runtimes())
        found = await ledger.database.read(
            lambda connection: billing_report(connection, book, whose, month, live=live, now_us=wall_us())
        )
        return Response(encode(found), media_type="application/json")

    return routes
