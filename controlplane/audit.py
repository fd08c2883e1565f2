"""The audit: who changed which tenant or key, granted or deleted which model, and when.

Rows are added in the change's own transaction, and stay.
"""

from enum import StrEnum

from sqlalchemy import Connection, func, insert, select

from contracts.control import Principal
from contracts.wire import Wire
from controlplane import schema

INSTALLATION = Principal(key_id="", tenant="", scopes=())  # what no key asked for


class Action(StrEnum):
    """What was done."""

    TENANT_CREATED = "tenant.created"
    TENANT_SUSPENDED = "tenant.suspended"
    TENANT_RESUMED = "tenant.resumed"
    TENANT_LIMITED = "tenant.limited"
    TENANT_DELETED = "tenant.deleted"
    MODEL_DELETED = "model.deleted"
    MODEL_GRANTED = "model.granted"
    MODEL_REVOKED = "model.revoked"
    KEY_CREATED = "key.created"
    KEY_ROTATED = "key.rotated"
    KEY_REVOKED = "key.revoked"


class Event(Wire, frozen=True):
    """One row, as it is told. `actor` is the id of the key that asked, or what that is to the reader."""

    sequence: int
    at_s: int
    tenant: str
    actor: str
    action: str
    subject: str  # a key's id, the tenant, or a model
    detail: str


def record(
    connection: Connection, by: Principal, now_s: int, tenant: str, action: Action, subject: str, detail: str = ""
) -> None:
    """Add a row; it stands or falls with the transaction."""
    table = schema.audit
    last = connection.execute(select(func.coalesce(func.max(table.c.sequence), 0))).scalar_one()
    connection.execute(
        insert(table).values(
            sequence=last + 1,
            at_s=now_s,
            tenant=tenant,
            actor_tenant=by.tenant,
            actor=by.key_id,
            action=str(action),
            subject=subject,
            detail=detail,
        )
    )


def events(connection: Connection, tenant: str, reader: Principal, limit: int, before: int | None) -> list[Event]:
    """The tenant's latest rows before a sequence number, the newest first. Another tenant's keys are not named."""
    table = schema.audit
    wanted = select(table).where(table.c.tenant == tenant).order_by(table.c.sequence.desc()).limit(limit)
    if before is not None:
        wanted = wanted.where(table.c.sequence < before)
    return [
        Event(
            sequence=row["sequence"],
            at_s=row["at_s"],
            tenant=row["tenant"],
            actor=_actor(row["actor_tenant"], row["actor"], reader),
            action=row["action"],
            subject=row["subject"],
            detail=row["detail"],
        )
        for row in connection.execute(wanted).mappings()
    ]


def _actor(tenant: str, key_id: str, reader: Principal) -> str:
    if not key_id:
        return "installation"
    return key_id if tenant == reader.tenant else "operator"
