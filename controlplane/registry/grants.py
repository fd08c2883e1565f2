"""Read and write grants as rows: which other tenants may call a model. `registry.py` shows them.

A grant is deleted with the model and with either tenant, so a later tenant of the same name does not get it.
"""

from typing import Final

from sqlalchemy import Connection, delete, insert, select

from controlplane.audit import audit_rows
from controlplane.audit.audit_entry_policy import AuditAction, created_fields
from controlplane.audit.audit_rows import Actor
from controlplane.db import schema
from controlplane.db.tenant_rows import find_tenant
from controlplane.registry.policy.domain import Model
from kelvin.contracts.errors import CapacityExceeded, InvalidRequest, NotFound, Refused
from kelvin.contracts.names import require_dns_label

MAX_GRANTEES: Final = 1000  # per model, because each change sends all of them


def check_grantee(model: Model, grantee: str) -> None:
    """Check a new grantee. Raises Refused: InvalidRequest for a bad name or the owner itself, CapacityExceeded."""
    if require_dns_label(grantee, "tenant") == model.tenant:
        raise Refused(InvalidRequest("tenant", f"'{grantee}'", "must be another tenant than the model's own"))
    if grantee not in model.grantees and len(model.grantees) >= MAX_GRANTEES:
        raise Refused(CapacityExceeded("grants of a model", len(model.grantees) + 1, MAX_GRANTEES))


def insert_grant(connection: Connection, actor: Actor, model: Model, grantee: str, now_s: int) -> None:
    """Store the grant, and record it for the audit. Raises Refused(NotFound) for an unknown grantee."""
    find_tenant(connection, grantee)
    row = {"tenant": model.tenant, "model": model.model, "grantee": grantee, "created_at_s": now_s}
    connection.execute(insert(schema.grants).values(row))
    detail, changed = f"to {grantee}", created_fields(grantee=grantee)
    audit_rows.record(connection, actor, now_s, model.tenant, AuditAction.MODEL_GRANTED, model.model, detail, changed)


def delete_grant(connection: Connection, actor: Actor, model: Model, grantee: str, now_s: int) -> None:
    """Delete the grant, and record that for the audit. Raises Refused(NotFound) if there is none."""
    table = schema.grants.c
    gone = connection.execute(
        delete(schema.grants).where(table.tenant == model.tenant, table.model == model.model, table.grantee == grantee)
    )
    if not gone.rowcount:
        raise Refused(NotFound("grant", f"{model.model} to {grantee[:63]}"))
    detail, changed = f"from {grantee}", {"grantee": (grantee, None)}
    audit_rows.record(connection, actor, now_s, model.tenant, AuditAction.MODEL_REVOKED, model.model, detail, changed)


def delete_grants_to(connection: Connection, actor: Actor, grantee: str, now_s: int) -> None:
    """Delete all grants that the tenant has, and record that in each owner's audit log."""
    table = schema.grants.c
    had = connection.execute(select(table.tenant, table.model).where(table.grantee == grantee)).all()
    connection.execute(delete(schema.grants).where(table.grantee == grantee))
    for tenant, model in had:
        audit_rows.record(
            connection, actor, now_s, tenant, AuditAction.MODEL_REVOKED, model, f"from {grantee}, which was deleted"
        )


def load_grantees(connection: Connection) -> dict[tuple[str, str], list[str]]:
    """Return the grantees of each model that has any, in order."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in connection.execute(select(schema.grants).order_by(schema.grants.c.grantee)).mappings():
        found.setdefault((row["tenant"], row["model"]), []).append(row["grantee"])
    return found
