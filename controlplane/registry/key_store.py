"""Store keys. This is the only writer of their table. The database holds digests only. A key's text is returned once,
by the call that creates it.

Each change is decided, stored and recorded for the audit in one transaction, then published. So an activator never
accepts a key that a crash could take back, nor a revoked key after an answer that says all activators know.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, select, update

from controlplane.audit import audit_rows
from controlplane.audit.audit_entry_policy import AuditAction, Changed, created_fields
from controlplane.audit.audit_rows import Actor
from controlplane.db import schema
from controlplane.db.database import Database
from controlplane.db.tenant_rows import find_tenant
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.key_files import BadKeyFile, ensure_key_file, new_key_text, parse_key_text, warn_of_damaged
from controlplane.registry.key_rows import (
    Key,
    find_key,
    insert_key,
    load_keys,
    load_listed_keys,
    permanent_operator_keys,
    update_key,
)
from controlplane.registry.policy.access import (
    OPERATOR_TENANT,
    KeySpec,
    KeyState,
    check_key_spec,
    check_may_manage,
    check_not_last,
    rotated_key_expiry_s,
    successor_expiry_s,
)
from controlplane.registry.tenant_store import DELIVERY_LIMIT_S, active_keys, insert_tenant
from kelvin.contracts.errors import CapacityExceeded, Conflict, Refused
from kelvin.contracts.serving.control_messages import Feed, Scope

DEFAULT_TENANT: Final = OPERATOR_TENANT
MAX_KEYS: Final = 1000  # active ones of a tenant
MAX_ENDED_KEYS: Final = 200  # expired and revoked ones that a list shows


@dataclass(frozen=True, slots=True)
class BootstrapKey:
    """A key that every installation is created with."""

    file_name: str
    name: str
    scopes: tuple[Scope, ...]


BOOTSTRAP_KEYS: Final = (
    BootstrapKey("admin.key", "admin", (Scope.ADMIN, Scope.OPERATOR)),
    BootstrapKey("default.key", "default", (Scope.INFER,)),
)


class KeyStore:
    """Owns the table of keys."""

    def __init__(self, database: Database, feed: FeedHub) -> None:
        self._database = database
        self._feed = feed
        self._write_lock = asyncio.Lock()  # changes are published in the order in which they were stored
        self._expiries_s: dict[str, int] = {}  # expiry of each published key that expires

    def __repr__(self) -> str:
        return f"<KeyStore expiring={len(self._expiries_s)}>"

    async def bootstrap(self, data: Path, now_s: int) -> None:
        """Create the default tenant and its keys if it never had any, and publish all active keys.

        A key whose file was removed after the first start stays valid, and the file is not created again. A damaged
        file is logged and left as it is. Raises BadKeyFile, UnreadableColumn.
        """
        present = await self._database.read(load_keys)
        made: list[Key] = []
        if not any(key.tenant == DEFAULT_TENANT for key in present):
            for each in BOOTSTRAP_KEYS:
                path = data / each.file_name
                try:
                    key_id, digest = parse_key_text(ensure_key_file(path))
                except BadKeyFile as error:
                    raise BadKeyFile(f"{path}: {error}") from None
                made.append(Key(key_id, DEFAULT_TENANT, each.name, digest, each.scopes, (), now_s))
            await self._database.write(lambda connection: _insert_bootstrap(connection, made, now_s))
        else:
            for each in BOOTSTRAP_KEYS:
                warn_of_damaged(data / each.file_name)
        active = [key for key in (*present, *made) if key.state(now_s) is KeyState.ACTIVE]
        self._publish(now_s, *active)

    async def tenant_keys(self, tenant: str, now_s: int) -> list[Key]:
        """Return the tenant's active keys and last MAX_ENDED_KEYS others, newest first. Raises Refused(NotFound)."""

        def read(connection: Connection) -> list[Key]:
            find_tenant(connection, tenant)
            return load_listed_keys(connection, tenant, now_s, MAX_ENDED_KEYS)

        return await self._database.read(read)

    async def create(
        self, actor: Actor, tenant: str, grant: KeySpec, lifetime_s: int | None, now_s: int
    ) -> tuple[Key, str]:
        """Create a key. Return it and its text. Raises Refused: as `check_key_spec`, NotFound, CapacityExceeded."""
        grant = check_key_spec(actor, tenant, grant)
        text = new_key_text()
        key_id, digest = parse_key_text(text)
        ends_s = None if lifetime_s is None else now_s + lifetime_s
        key = Key(key_id, tenant, grant.name, digest, grant.scopes, grant.models, now_s, ends_s)

        def write(connection: Connection) -> None:
            find_tenant(connection, tenant)
            insert_key(connection, key)
            _check_count(connection, tenant, now_s)
            _record_created(connection, actor, key, now_s)

        async with self._write_lock:
            await self._database.write(write)
            revision = self._publish(now_s, key)
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)  # so that activators accept its first use
        return key, text

    async def rotate(self, actor: Actor, tenant: str, key_id: str, overlap_s: int, now_s: int) -> tuple[Key, str, Key]:
        """Create a key with the old key's scopes and models. Return it, its text, and the old key, which ends after the
        overlap.

        Raises Refused: NotFound, Forbidden, Conflict (the key is not active, or was rotated before), CapacityExceeded.
        """
        text = new_key_text()
        new_id, digest = parse_key_text(text)

        def write(connection: Connection) -> tuple[Key, Key]:
            old = find_key(connection, tenant, key_id)
            check_may_manage(actor, old.scopes)
            if old.state(now_s) is not KeyState.ACTIVE:
                raise Refused(Conflict(f"key {key_id}", f"is {old.state(now_s)}; create a new one"))
            if old.successor is not None:
                raise Refused(Conflict(f"key {key_id}", f"was rotated already; its successor is {old.successor}"))
            ends_s = successor_expiry_s(old.created_at_s, old.expires_at_s, now_s)
            new = Key(new_id, tenant, old.name, digest, old.scopes, old.models, now_s, ends_s)
            insert_key(connection, new)
            expires_at_s = rotated_key_expiry_s(old.expires_at_s, now_s, overlap_s)
            update_key(connection, key_id, expires_at_s=expires_at_s, successor=new_id)
            _check_count(connection, tenant, now_s)
            detail = f"to {new_id}, ends after {overlap_s} s"
            changed: Changed = {
                "successor": (None, new_id),
                "expires_at_s": (old.expires_at_s, expires_at_s),
            }
            audit_rows.record(connection, actor, now_s, tenant, AuditAction.KEY_ROTATED, key_id, detail, changed)
            _record_created(connection, actor, new, now_s)
            return new, find_key(connection, tenant, key_id)

        async with self._write_lock:
            new, old = await self._database.write(write)
            revision = self._publish(now_s, new, old)
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)
        return new, text, old

    async def revoke(self, actor: Actor, tenant: str, key_id: str, now_s: int) -> tuple[Key, bool]:
        """Revoke a key now; idempotent. Return the key, and whether every activator knows it within DELIVERY_LIMIT_S;
        False also if one lost its feed moments ago and is not back.

        Raises Refused: NotFound, Forbidden, Conflict (the last key of an operator).
        """

        def write(connection: Connection) -> Key:
            key = find_key(connection, tenant, key_id)
            check_may_manage(actor, key.scopes)
            if key.revoked_at_s is None:
                check_not_last(key_id, key.scopes, permanent_operator_keys(connection))
                update_key(connection, key_id, revoked_at_s=now_s)
                audit_rows.record(connection, actor, now_s, tenant, AuditAction.KEY_REVOKED, key_id)
            return find_key(connection, tenant, key_id)

        async with self._write_lock:
            key = await self._database.write(write)
            revision = self._publish(now_s, key)
        return key, await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)

    async def revoke_all(self, actor: Actor, tenant: str, now_s: int) -> None:
        """Revoke every active key of a tenant. Returns once activators know it, or after DELIVERY_LIMIT_S."""

        def write(connection: Connection) -> list[Key]:
            ended = active_keys(connection, tenant, now_s)
            for key_id in ended:
                update_key(connection, key_id, revoked_at_s=now_s)
                audit_rows.record(
                    connection, actor, now_s, tenant, AuditAction.KEY_REVOKED, key_id, "its tenant is deleted"
                )
            return [find_key(connection, tenant, key_id) for key_id in ended]

        async with self._write_lock:
            ended = await self._database.write(write)
            revision = self._publish(now_s, *ended)
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)

    async def record_uses(self, used_at_s: dict[str, int]) -> None:
        """Record when keys were last used, as activators report it. The later time stands; unknown keys are ignored."""
        table = schema.keys

        def write(connection: Connection) -> None:
            for key_id, at_s in used_at_s.items():
                known = table.c.last_used_at_s
                is_newer = known.is_(None) | (known < at_s)
                connection.execute(update(table).where(table.c.key_id == key_id, is_newer).values(last_used_at_s=at_s))

        await self._database.write(write)

    def _publish(self, now_s: int, *keys: Key) -> int:
        """Publish active keys as rows, others as removed, together with keys that have expired since the last call."""
        good = tuple(key.row() for key in keys if key.state(now_s) is KeyState.ACTIVE)
        for row in good:
            self._expiries_s.pop(row.key_id, None)
            if row.expires_at_s is not None:
                self._expiries_s[row.key_id] = row.expires_at_s
        gone = {key.key_id for key in keys} - {row.key_id for row in good}
        gone |= {key_id for key_id, ends_s in self._expiries_s.items() if ends_s <= now_s}
        for key_id in gone:
            self._expiries_s.pop(key_id, None)
        return self._feed.publish(Feed(keys=good, removed_keys=tuple(sorted(gone))))


def _check_count(connection: Connection, tenant: str, now_s: int) -> None:
    """Check the number of active keys, with those that this transaction created. Raises Refused(CapacityExceeded)."""
    if (good := len(active_keys(connection, tenant, now_s))) > MAX_KEYS:
        raise Refused(CapacityExceeded(f"keys of tenant '{tenant}'", good, MAX_KEYS))


def _record_created(connection: Connection, actor: Actor, key: Key, now_s: int) -> None:
    models = f", models {' '.join(key.models)}" if key.models else ""
    detail, scopes = f"'{key.name}', scopes {' '.join(key.scopes)}{models}", tuple(map(str, key.scopes))
    changed = created_fields(name=key.name, scopes=scopes, models=key.models, expires_at_s=key.expires_at_s)
    audit_rows.record(connection, actor, now_s, key.tenant, AuditAction.KEY_CREATED, key.key_id, detail, changed)


def _insert_bootstrap(connection: Connection, keys: list[Key], now_s: int) -> None:
    known = connection.execute(select(schema.tenants.c.tenant).where(schema.tenants.c.tenant == DEFAULT_TENANT))
    if known.first() is None:
        insert_tenant(connection, audit_rows.INSTALLATION_ACTOR, DEFAULT_TENANT, now_s)
    for key in keys:
        insert_key(connection, key)
        _record_created(connection, audit_rows.INSTALLATION_ACTOR, key, now_s)
