"""Audit entries as rows: who changed what of a tenant or of the installation, by which request, and when.

`record` adds entries in the change's own transaction. The database refuses to delete or change them. When an entry's
window is over, its body is emptied; its digest stays, and so does the chain. An expiry is recorded as an entry first.
The database refuses to empty an entry that no such record covers, and `verify_audit` reports one that was emptied
without. Entries of the installation itself have the tenant "".
"""

import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec
from fastapi import Request
from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from controlplane.audit.audit_entry_policy import (
    DAY_S,
    DEFAULT_DAYS,
    MAX_DAYS,
    AuditAction,
    AuditEntry,
    AuditWindow,
    Changed,
    EntryBody,
    Value,
    chained_values,
    min_days,
    verify,
    window_of,
)
from controlplane.db import schema
from controlplane.db.chained_log import AUDIT, ChainWriter, OnProgress
from controlplane.db.database import UNREADABLE, distinct_texts, refuse_unreadable, stream_rows, unreadable
from kelvin.contracts.accounting.audit_reports import AuditChain, AuditReport
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.redaction import redact
from kelvin.contracts.serving.control_messages import Principal, Scope, scope_allows
from kelvin.contracts.wire import BadJson, Decoder, Wire, decoder
from kelvin.ipc.principal import require_scope

ALL_TENANTS: Final = "*"  # not a valid tenant name
_BODY_FIELDS: Final = tuple(EntryBody.__dataclass_fields__)
_ROWS: Final = 2_000


class Actor(Principal, frozen=True, omit_defaults=True):
    """The caller who asks for a change, and the id of that request."""

    request_id: str = ""


INSTALLATION_ACTOR: Final = Actor(key_id="", tenant="", scopes=())  # for changes that no key asked for


class RequireActor:
    """FastAPI dependency of every route that changes something: the caller, whose key must allow `scope`."""

    def __init__(self, scope: Scope) -> None:
        self._require = require_scope(scope)

    def __call__(self, request: Request) -> Actor:
        """Return the caller. Raises as `require_scope`."""
        principal = self._require(request)
        return Actor(
            key_id=principal.key_id,
            tenant=principal.tenant,
            scopes=principal.scopes,
            models=principal.models,
            request_id=request.headers.get("x-request-id", "")[:64],
        )


class Event(Wire, frozen=True):
    """One entry as the API shows it. `actor` is the id of the key that asked, or "operator" or "installation"."""

    sequence: int
    at_s: int
    tenant: str
    actor: str
    action: str
    subject: str  # a key's id, the tenant, a model, or what else was changed
    detail: str
    changed: dict[str, tuple[Value, Value]]  # a field's name -> what it was, what it is
    request_id: str
    window: str
    link: int  # its number in the tenant's chain
    chain: str
    expired: bool  # its body is gone; only the digest is left


def record(
    connection: Connection,
    actor: Actor,
    now_s: int,
    tenant: str,
    action: AuditAction,
    subject: str,
    detail: str = "",
    changed: Changed | None = None,
) -> None:
    """Add an entry to the tenant's chain, as part of the transaction. An access entry is not written if its window is 0
    days. Never pass a secret, or anything of a request to a model.
    """
    window = window_of(action)
    if window is AuditWindow.ACCESS and window_days(connection, tenant)[window] == 0:
        return
    body = EntryBody(
        actor_tenant=actor.tenant,
        actor=actor.key_id,
        action=str(action),
        subject=redact(subject),
        detail=redact(detail),
        changed=redact(msgspec.json.encode(changed or {}, order="deterministic").decode()),
        request_id=actor.request_id,
        salt=secrets.token_hex(16),
    )
    table, name = schema.audit, (tenant,)
    last = connection.execute(select(func.coalesce(func.max(table.c.sequence), 0))).scalar_one()
    chains, digest = ChainWriter(connection, AUDIT), body.digest()
    place = chains.add(name, chained_values(chains.next_link(name), now_s, window, digest))
    values = {
        "sequence": last + 1,
        "tenant": tenant,
        "at_s": now_s,
        "window_name": str(window),
        "digest": digest,
        **place._asdict(),
        **{field: getattr(body, field) for field in _BODY_FIELDS},
    }
    connection.execute(insert(table).values(values))
    chains.write()


def events(connection: Connection, tenant: str, reader: Principal, limit: int, before: int | None) -> list[Event]:
    """Return the tenant's latest entries before a sequence number, the newest first.

    Only operators see which key and request of another tenant than the reader's made a change. Raises Refused(Conflict)
    if an entry can't be read.
    """
    table = schema.audit
    query = select(table).where(table.c.tenant == tenant).order_by(table.c.sequence.desc()).limit(limit)
    if before is not None:
        query = query.where(table.c.sequence < before)
    with refuse_unreadable("the audit", "kelvin audit verify"):
        return [_event(row, reader) for row in connection.execute(query).mappings()]


def _event(row: RowMapping, reader: Principal) -> Event:
    expired = row["expired_at_s"] is not None
    named = row["actor_tenant"] == reader.tenant or scope_allows(reader.scopes, Scope.OPERATOR)
    return Event(
        sequence=row["sequence"],
        at_s=row["at_s"],
        tenant=row["tenant"],
        actor="" if expired else _actor(row["actor"], named=named),
        action=row["action"],
        subject=row["subject"],
        detail=row["detail"],
        changed=_CHANGED.decode(row["changed"] or "{}"),
        request_id=row["request_id"] if named else "",
        window=row["window_name"],
        link=row["link"],
        chain=row["chain"],
        expired=expired,
    )


_CHANGED: Final[Decoder[Any]] = decoder(dict[str, tuple[Value, Value]])


def _actor(key_id: str, *, named: bool) -> str:
    if not key_id:
        return "installation"
    return key_id if named else "operator"


def window_days(connection: Connection, tenant: str) -> dict[AuditWindow, int]:
    """Return for how many days bodies are kept, by window: the tenant's setting, else the installation's, else the
    default.

    Windows of a newer program are left out.
    """
    table = schema.audit_windows
    found = dict(DEFAULT_DAYS)
    for owner in dict.fromkeys(("", tenant)):
        rows = connection.execute(select(table.c.window_name, table.c.days).where(table.c.tenant == owner))
        found |= {AuditWindow(row.window_name): row.days for row in rows if row.window_name in DEFAULT_DAYS}
    return found


def set_window_days(connection: Connection, tenant: str, days: dict[str, int | None]) -> None:
    """Set windows of a tenant, or with "" those of all tenants that have no setting. None removes the setting. Raises
    Refused(InvalidRequest).
    """
    table = schema.audit_windows
    for name, value in days.items():
        if name not in DEFAULT_DAYS:
            raise Refused(InvalidRequest("windows", f"'{name[:63]}'", f"must be some of {', '.join(DEFAULT_DAYS)}"))
        window = AuditWindow(name)
        if value is not None and not min_days(window) <= value <= MAX_DAYS:
            rule = f"must be {min_days(window)} to {MAX_DAYS} days"
            raise Refused(InvalidRequest(f"windows.{window}", str(value), rule))
        connection.execute(delete(table).where(table.c.tenant == tenant, table.c.window_name == str(window)))
        if value is not None:
            connection.execute(insert(table).values(tenant=tenant, window_name=str(window), days=value))


def expire(connection: Connection, actor: Actor, tenant: str, now_s: int) -> int:
    """Empty the tenant's entries that are older than their window. Return their number."""
    return sum(
        _expire(connection, actor, tenant, window, days, now_s)
        for window, days in window_days(connection, tenant).items()
    )


def _expire(connection: Connection, actor: Actor, tenant: str, window: AuditWindow, days: int, now_s: int) -> int:
    table = schema.audit
    before_s = now_s - days * DAY_S if days else now_s + 1
    old = (
        table.c.tenant == tenant,
        table.c.window_name == str(window),
        table.c.expired_at_s.is_(None),
        table.c.at_s < before_s,
    )
    count = int(connection.execute(select(func.count()).select_from(table).where(*old)).scalar_one())
    if count:
        changed = {"before_s": (None, before_s), "days": (None, days), "entries": (None, count)}
        record(connection, actor, now_s, tenant, AuditAction.AUDIT_EXPIRED, str(window), changed=changed)
        connection.execute(update(table).where(*old).values(expired_at_s=now_s, **dict.fromkeys(_BODY_FIELDS, "")))
    return count


def audited_tenants(connection: Connection) -> list[str]:
    """Return every tenant with audit entries, deleted ones and the installation's own ("") included."""
    names = (distinct_texts(connection, table.c.tenant) for table in (schema.audit, schema.audit_chains))
    return sorted({tenant for each in names for tenant in each})


def count_entries(connection: Connection, tenant: str) -> int:
    """Return about how many rows `verify_audit` reads."""
    count = select(func.count()).select_from(schema.audit)
    return int(
        connection.execute(
            count if tenant == ALL_TENANTS else count.where(schema.audit.c.tenant == tenant)
        ).scalar_one()
    )


def verify_audit(connection: Connection, tenant: str, on_progress: OnProgress = lambda rows: None) -> AuditReport:
    """Recompute from its rows the chain of the tenant, or every chain."""
    tenants = audited_tenants(connection) if tenant == ALL_TENANTS else [tenant]
    found = tuple(verify_chain(connection, each, on_progress) for each in tenants)
    return AuditReport(sound=all(each.difference is None for each in found), chains=found)


def verify_chain(connection: Connection, tenant: str, on_progress: OnProgress = lambda rows: None) -> AuditChain:
    """Recompute the tenant's chain up to the first difference."""
    written, expired_before_s, problem = None, dict[str, int](), None
    try:
        written, expired_before_s = AUDIT.end_of(connection, (tenant,)), _expired_before_s(connection, tenant)
    except UNREADABLE as error:
        problem = unreadable(error)
    found = verify(tenant, _entries(connection, tenant, on_progress), written, expired_before_s)
    return AuditChain(
        tenant=tenant,
        links=found.links,
        chain=found.chain,
        expired=found.expired,
        difference=problem or found.difference,
    )


def _expired_before_s(connection: Connection, tenant: str) -> dict[str, int]:
    """Return, by window, the second before which bodies expired. A forged record may say anything: an unreadable one is
    left out, and verifying the chain reports its link.
    """
    c = schema.audit.c
    query = select(c.subject, c.changed).where(c.tenant == tenant, c.action == str(AuditAction.AUDIT_EXPIRED))
    found: dict[str, int] = {}
    for subject, changed in connection.execute(query):
        with suppress(BadJson, KeyError):
            _, before_s = decoder(dict[str, tuple[None, int]]).decode(changed)["before_s"]
            found[subject] = max(found.get(subject, 0), before_s)
    return found


def _entries(connection: Connection, tenant: str, on_progress: OnProgress) -> Iterator[AuditEntry | str]:
    """Yield the entries up to the first one that can't be read, and for that one the reason as a text."""
    c = schema.audit.c
    words = [c[field] for field in _BODY_FIELDS]
    query = select(c.link, c.at_s, c.window_name, c.digest, c.chain, c.expired_at_s, *words)
    rows = stream_rows(connection, query.where(c.tenant == tenant).order_by(c.link), _ROWS)
    try:
        for number, (link, at_s, window, digest, chain, expired_at_s, *body) in enumerate(rows, 1):
            yield AuditEntry(link, at_s, window, digest, chain, EntryBody(*body) if expired_at_s is None else None)
            if number % _ROWS == 0:
                on_progress(_ROWS)
    except UNREADABLE as error:
        yield unreadable(error)
