"""The routes of the audit. An admin reads the own tenant's; an operator any, the installation's own as `?tenant=`."""

import time
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request, Response

from contracts.audit import AuditReport, AuditWindows, Expired, SetWindows
from contracts.billing import Examining
from contracts.control import Principal, Scope
from contracts.errors import Conflict, NotFound
from contracts.wire import Wire
from controlplane.audit import ALL, Actor, ActorOf, Event
from controlplane.examine import Order
from controlplane.examiner import Examiner
from controlplane.nul import read
from controlplane.policy.access import whose
from controlplane.policy.rating import PriceBook
from controlplane.policy.trail import Action
from controlplane.trail import Trail
from service.bodies import answer
from service.openapi import described
from service.principal import admin_of, holder_of

MAX_EVENTS: Final = 1000
MAX_SEQUENCE: Final = (1 << 63) - 1  # what a column holds
Operator = Annotated[Actor, Depends(ActorOf(Scope.OPERATOR))]
Named = Annotated[str | None, Query(alias="tenant")]
_operator_of: Final = holder_of(Scope.OPERATOR)


class Audit(Wire, frozen=True):
    """`GET /admin/v1/audit`."""

    events: tuple[Event, ...]


def router(trail: Trail, examiner: Examiner, book: PriceBook) -> APIRouter:
    """Routes under `/admin/v1/audit`. How long entries are kept is the operators' to say."""
    routes = APIRouter(prefix="/admin/v1/audit")

    @routes.get("", **described(Audit, NotFound, Conflict))
    async def listed(
        by: Annotated[Actor, Depends(ActorOf(Scope.ADMIN))],
        tenant: Named = None,
        limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100,
        before: Annotated[int | None, Query(ge=1, le=MAX_SEQUENCE)] = None,
    ) -> Response:
        owner = whose(by, tenant)
        found = await trail.events(owner, by, limit, before)
        await trail.looked(by, owner, Action.ACCESS_AUDIT)
        return answer(Audit(events=tuple(found)))

    @routes.get("/verify", **described(AuditReport, NotFound, also={202: Examining}))
    async def verify(
        request: Request,
        by: Annotated[Principal, Depends(admin_of)],
        tenant: Named = None,
        every: Annotated[bool, Query(alias="all")] = False,
    ) -> Response:
        if every:
            _operator_of(request)
        owner = ALL if every else whose(by, tenant)
        now_us = time.time_ns() // 1000
        found = await examiner.answer(
            Order(kind="audit", tenant=owner, month=None, live=None, now_us=now_us, book=book)
        )
        if isinstance(found, Examining):
            return answer(found, 202)
        return Response(found, media_type="application/json")

    @routes.get("/windows", **described(AuditWindows, NotFound))
    async def windows(by: Annotated[Principal, Depends(admin_of)], tenant: Named = None) -> Response:
        return answer(await trail.windows(whose(by, tenant)))

    @routes.put("/windows", **described(AuditWindows, NotFound, takes=SetWindows, scope=Scope.OPERATOR))
    async def keep(by: Operator, request: Request, tenant: Named = None) -> Response:
        wanted = await read(request, SetWindows)
        return answer(await trail.keep(by, whose(by, tenant), wanted.days))

    @routes.post("/expire", **described(Expired, NotFound, scope=Scope.OPERATOR))
    async def expire(by: Operator, tenant: Named = None) -> Response:
        return answer(Expired(entries=await trail.expire(by, tenant)))

    return routes
