"""The audit: who changed what of a tenant or of the installation, by which request, and when.

Entries are added in the change's own transaction, by `record` alone; the database takes none back and changes none,
but lets one's words go once its window is over (`audit_expiry.py`). What is the installation's own is the tenant's "".
"""

import secrets
from typing import Any, Final

import msgspec
from fastapi import Request
from sqlalchemy import Connection, RowMapping, func, insert, select, update

from contracts.control import Principal, Scope
from contracts.scopes import allows
from contracts.secrets import redact
from contracts.wire import Decoder, Wire, decoder
from controlplane import schema
from controlplane.audit_windows import days_of
from controlplane.policy.trail import Action, Changed, Said, Value, Window, genesis, next_chain, window_of
from service.principal import holder_of

SAID: Final = tuple(Said.__dataclass_fields__)


class Actor(Principal, frozen=True, omit_defaults=True):
    """Who asks for a change, and the id of that request."""

    request_id: str = ""


INSTALLATION: Final = Actor(key_id="", tenant="", scopes=())  # what no key asked for


class ActorOf:
    """A dependency of every route that changes something: the caller, whose key must allow `scope`."""

    def __init__(self, scope: Scope) -> None:
        self._holder = holder_of(scope)

    def __call__(self, request: Request) -> Actor:
        """Raises as `holder_of`."""
        who = self._holder(request)
        return Actor(
            key_id=who.key_id,
            tenant=who.tenant,
            scopes=who.scopes,
            models=who.models,
            request_id=request.headers.get("x-request-id", "")[:64],
        )


class Event(Wire, frozen=True):
    """One entry, as it is told. `actor` is the id of the key that asked, or what that is to the reader."""

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
    expired: bool  # its words are gone; a digest is left


def record(
    connection: Connection,
    by: Actor,
    now_s: int,
    tenant: str,
    action: Action,
    subject: str,
    detail: str = "",
    changed: Changed | None = None,
) -> None:
    """Add an entry to the tenant's chain; it stands or falls with the transaction. What is kept for no time is not
    written. Never give it a secret, nor anything of a request to a model.
    """
    window = window_of(action)
    if window is Window.ACCESS and days_of(connection, tenant)[window] == 0:
        return
    said = Said(
        actor_tenant=by.tenant,
        actor=by.key_id,
        action=str(action),
        subject=redact(subject),
        detail=redact(detail),
        changed=redact(msgspec.json.encode(changed or {}, order="deterministic").decode()),
        request_id=by.request_id,
        salt=secrets.token_hex(16),
    )
    table, chains = schema.audit, schema.audit_chains
    last = connection.execute(select(func.coalesce(func.max(table.c.sequence), 0))).scalar_one()
    end = connection.execute(select(chains.c.links, chains.c.chain).where(chains.c.tenant == tenant)).first()
    links, before = (0, genesis(tenant)) if end is None else (end.links, end.chain)
    link, digest = links + 1, said.digest()
    chain = next_chain(before, link, now_s, window, digest)
    row = {name: getattr(said, name) for name in SAID}
    place = {
        "tenant": tenant,
        "at_s": now_s,
        "link": link,
        "window_name": str(window),
        "digest": digest,
        "chain": chain,
    }
    connection.execute(insert(table).values(sequence=last + 1, **place, **row))
    if end is None:
        connection.execute(insert(chains).values(tenant=tenant, links=link, chain=chain))
    else:
        connection.execute(update(chains).where(chains.c.tenant == tenant).values(links=link, chain=chain))


def events(connection: Connection, tenant: str, reader: Principal, limit: int, before: int | None) -> list[Event]:
    """The tenant's latest entries before a sequence number, the newest first.

    Keys and requests of another tenant than the reader's are named to operators alone.
    """
    table = schema.audit
    wanted = select(table).where(table.c.tenant == tenant).order_by(table.c.sequence.desc()).limit(limit)
    if before is not None:
        wanted = wanted.where(table.c.sequence < before)
    return [_event(row, reader) for row in connection.execute(wanted).mappings()]


def _event(row: RowMapping, reader: Principal) -> Event:
    expired = row["expired_at_s"] is not None
    named = row["actor_tenant"] == reader.tenant or allows(reader.scopes, Scope.OPERATOR)
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
