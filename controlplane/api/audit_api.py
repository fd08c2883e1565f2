"""Serve the audit log. An admin reads the own tenant's; an operator any, and the installation's as `?tenant=`."""

import time
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Request, Response

from controlplane.audit.audit_entry_policy import AuditAction
from controlplane.audit.audit_log import AuditLog
from controlplane.audit.audit_rows import ALL_TENANTS, Actor, Event, RequireActor
from controlplane.db.nul_characters import read_json
from controlplane.ledger.policy.rating import PriceBook
from controlplane.ledger_check.check_program import CheckRequest
from controlplane.ledger_check.check_runner import CheckRunner
from controlplane.registry.policy.access import target_tenant
from kelvin.contracts.accounting.audit_reports import AuditReport, AuditWindows, Expired, SetWindows
from kelvin.contracts.accounting.billing_reports import Examining
from kelvin.contracts.errors import Conflict, NotFound
from kelvin.contracts.serving.control_messages import Principal, Scope
from kelvin.contracts.wire import Wire
from kelvin.ipc.http_bodies import json_response
from kelvin.ipc.openapi import route_docs
from kelvin.ipc.principal import require_admin, require_scope

MAX_EVENTS: Final = 1000
MAX_SEQUENCE: Final = (1 << 63) - 1  # the largest BIGINT
Operator = Annotated[Actor, Depends(RequireActor(Scope.OPERATOR))]
TenantQuery = Annotated[str | None, Query(alias="tenant")]
_operator_of: Final = require_scope(Scope.OPERATOR)


class Audit(Wire, frozen=True):
    """Answer of `GET /admin/v1/audit`."""

    events: tuple[Event, ...]


def router(audit_log: AuditLog, check_runner: CheckRunner, book: PriceBook) -> APIRouter:
    """Return the routes under `/admin/v1/audit`. Only operators may change how long entries are kept."""
    routes = APIRouter(prefix="/admin/v1/audit")

    @routes.get("", **route_docs(Audit, NotFound, Conflict))
    async def listed(
        actor: Annotated[Actor, Depends(RequireActor(Scope.ADMIN))],
        tenant: TenantQuery = None,
        limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100,
        before: Annotated[int | None, Query(ge=1, le=MAX_SEQUENCE)] = None,
    ) -> Response:
        owner = target_tenant(actor, tenant)
        found = await audit_log.events(owner, actor, limit, before)
        await audit_log.record_access(actor, owner, AuditAction.ACCESS_AUDIT)
        return json_response(Audit(events=tuple(found)))

    @routes.get("/verify", **route_docs(AuditReport, NotFound, extra_responses={202: Examining}))
    async def verify(
        request: Request,
        actor: Annotated[Principal, Depends(require_admin)],
        tenant: TenantQuery = None,
        every: Annotated[bool, Query(alias="all")] = False,
    ) -> Response:
        if every:
            _operator_of(request)
        owner = ALL_TENANTS if every else target_tenant(actor, tenant)
        now_us = time.time_ns() // 1000
        found = await check_runner.answer(
            CheckRequest(kind="audit", tenant=owner, month=None, live=None, now_us=now_us, book=book)
        )
        if isinstance(found, Examining):
            return json_response(found, 202)
        return Response(found, media_type="application/json")

    @routes.get("/windows", **route_docs(AuditWindows, NotFound))
    async def windows(actor: Annotated[Principal, Depends(require_admin)], tenant: TenantQuery = None) -> Response:
        return json_response(await audit_log.windows(target_tenant(actor, tenant)))

    @routes.put("/windows", **route_docs(AuditWindows, NotFound, request_body=SetWindows, scope=Scope.OPERATOR))
    async def keep(actor: Operator, request: Request, tenant: TenantQuery = None) -> Response:
        body = await read_json(request, SetWindows)
        return json_response(await audit_log.set_windows(actor, target_tenant(actor, tenant), body.days))

    @routes.post("/expire", **route_docs(Expired, NotFound, scope=Scope.OPERATOR))
    async def expire(actor: Operator, tenant: TenantQuery = None) -> Response:
        return json_response(Expired(entries=await audit_log.expire(actor, tenant)))

    return routes
