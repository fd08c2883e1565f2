"""Keys: the one writer of their table. The database holds digests only; a key's text is told once, when it is made.

Each change is decided, stored and recorded for the audit in one transaction, then published, so that no activator
ever takes a key for good that a crash could take back, nor a revoked one after the answer that says so.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, select, update

from contracts.control import Feed, Scope
from contracts.errors import CapacityExceeded, Conflict, Refused
from controlplane import audit, schema
from controlplane.audit import Actor
from controlplane.feed import FeedHub
from controlplane.key_files import BadKeyFile, ensure_key_file, new_key_text, parse_key_text, warn_of_damaged
from controlplane.key_rows import Key, find_key, insert_key, lasting_operators, load_keys, load_listed, set_columns
from controlplane.policy.access import (
    OPERATORS,
    Grant,
    KeyState,
    after_overlap,
    check_grant,
    check_not_last,
    may_touch,
    successors_end,
)
from controlplane.policy.trail import Action, Changed, made
from controlplane.store import Database
from controlplane.tenant_rows import find_tenant
from controlplane.tenants import TELL_S, good_keys, insert_tenant

DEFAULT_TENANT: Final = OPERATORS
MAX_KEYS: Final = 1000  # good ones, of a tenant
MAX_ENDED: Final = 200  # others that a list shows


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A key that every installation begins with."""

    file_name: str
    name: str
    scopes: tuple[Scope, ...]


BOOTSTRAPS: Final = (
    Bootstrap("admin.key", "admin", (Scope.ADMIN, Scope.OPERATOR)),
    Bootstrap("default.key", "default", (Scope.INFER,)),
)


class KeyStore:
    """Owns the table of keys."""

    def __init__(self, database: Database, feed: FeedHub) -> None:
        self._database = database
        self._feed = feed
        self._turn = asyncio.Lock()  # published in the order in which it was stored
        self._ends: dict[str, int] = {}  # published keys that expire

    def __repr__(self) -> str:
        return f"<KeyStore expiring={len(self._ends)}>"

    async def bootstrap(self, data: Path, now_s: int) -> None:
        """Make the default tenant and its keys where it never had any, and publish all that are good.

        A key whose file was removed after the first start stays good and is not made anew. A file that was damaged
        after it is named in the log, and left as it is. Raises BadKeyFile, UnreadableColumn.
        """
        present = await self._database.read(load_keys)
        made: list[Key] = []
        if not any(key.tenant == DEFAULT_TENANT for key in present):
            for each in BOOTSTRAPS:
                path = data / each.file_name
                try:
                    key_id, digest = parse_key_text(ensure_key_file(path))
                except BadKeyFile as error:
                    raise BadKeyFile(f"{path}: {error}") from None
                made.append(Key(key_id, DEFAULT_TENANT, each.name, digest, each.scopes, (), now_s))
            await self._database.write(lambda connection: _begin(connection, made, now_s))
        else:
            for each in BOOTSTRAPS:
                warn_of_damaged(data / each.file_name)
        good = [key for key in (*present, *made) if key.state(now_s) is KeyState.ACTIVE]
        self._publish(now_s, *good)

    async def of_tenant(self, tenant: str, now_s: int) -> list[Key]:
        """The tenant's good keys and the last MAX_ENDED others, the newest first. Raises Refused(NotFound)."""

        def read(connection: Connection) -> list[Key]:
            find_tenant(connection, tenant)
            return load_listed(connection, tenant, now_s, MAX_ENDED)

        return await self._database.read(read)

    async def create(self, by: Actor, tenant: str, grant: Grant, lives_s: int | None, now_s: int) -> tuple[Key, str]:
        """A new key and its text, which nobody can be told again. Raises Refused: as `check_grant`, NotFound,
        CapacityExceeded.
        """
        grant = check_grant(by, tenant, grant)
        text = new_key_text()
        key_id, digest = parse_key_text(text)
        ends_s = None if lives_s is None else now_s + lives_s
        key = Key(key_id, tenant, grant.name, digest, grant.scopes, grant.models, now_s, ends_s)

        def write(connection: Connection) -> None:
            find_tenant(connection, tenant)
            insert_key(connection, key)
            _check_count(connection, tenant, now_s)
            audit.record(connection, by, now_s, tenant, Action.KEY_CREATED, key_id, _detail(key), _made(key))

        async with self._turn:
            await self._database.write(write)
            revision = self._publish(now_s, key)
        await self._feed.settled(revision, TELL_S)  # so that it is good where it is used next
        return key, text

    async def rotate(self, by: Actor, tenant: str, key_id: str, overlap_s: int, now_s: int) -> tuple[Key, str, Key]:
        """A new key that may do what the old one does, its text, and the old one, which ends after the overlap.

        Raises Refused: NotFound, Forbidden, Conflict (it is not good any more, or was rotated before),
        CapacityExceeded.
        """
        text = new_key_text()
        new_id, digest = parse_key_text(text)

        def write(connection: Connection) -> tuple[Key, Key]:
            old = find_key(connection, tenant, key_id)
            may_touch(by, old.scopes)
            if old.state(now_s) is not KeyState.ACTIVE:
                raise Refused(Conflict(f"key {key_id}", f"is {old.state(now_s)}; create a new one"))
            if old.successor is not None:
                raise Refused(Conflict(f"key {key_id}", f"was rotated already; its successor is {old.successor}"))
            ends_s = successors_end(old.created_at_s, old.expires_at_s, now_s)
            new = Key(new_id, tenant, old.name, digest, old.scopes, old.models, now_s, ends_s)
            insert_key(connection, new)
            expires_at_s = after_overlap(old.expires_at_s, now_s, overlap_s)
            set_columns(connection, key_id, expires_at_s=expires_at_s, successor=new_id)
            _check_count(connection, tenant, now_s)
            detail = f"to {new_id}, ends after {overlap_s} s"
            changed: Changed = {
                "successor": (None, new_id),
                "expires_at_s": (old.expires_at_s, expires_at_s),
            }
            audit.record(connection, by, now_s, tenant, Action.KEY_ROTATED, key_id, detail, changed)
            audit.record(connection, by, now_s, tenant, Action.KEY_CREATED, new_id, _detail(new), _made(new))
            return new, find_key(connection, tenant, key_id)

        async with self._turn:
            new, old = await self._database.write(write)
            revision = self._publish(now_s, new, old)
        await self._feed.settled(revision, TELL_S)
        return new, text, old

    async def revoke(self, by: Actor, tenant: str, key_id: str, now_s: int) -> tuple[Key, bool]:
        """End it now; a second time changes nothing. The key, and whether every activator was told within a
        second; False also where one has lost its feed moments ago, and is not back.

        Raises Refused: NotFound, Forbidden, Conflict (the last key of an operator).
        """

        def write(connection: Connection) -> Key:
            key = find_key(connection, tenant, key_id)
            may_touch(by, key.scopes)
            if key.revoked_at_s is None:
                check_not_last(key_id, key.scopes, lasting_operators(connection))
                set_columns(connection, key_id, revoked_at_s=now_s)
                audit.record(connection, by, now_s, tenant, Action.KEY_REVOKED, key_id)
            return find_key(connection, tenant, key_id)

        async with self._turn:
            key = await self._database.write(write)
            revision = self._publish(now_s, key)
        return key, await self._feed.settled(revision, TELL_S)

    async def revoke_all(self, by: Actor, tenant: str, now_s: int) -> None:
        """End every good key of a tenant that is about to go; returns once activators were told, or after a second."""

        def write(connection: Connection) -> list[Key]:
            ended = good_keys(connection, tenant, now_s)
            for key_id in ended:
                set_columns(connection, key_id, revoked_at_s=now_s)
                audit.record(connection, by, now_s, tenant, Action.KEY_REVOKED, key_id, "its tenant is deleted")
            return [find_key(connection, tenant, key_id) for key_id in ended]

        async with self._turn:
            ended = await self._database.write(write)
            revision = self._publish(now_s, *ended)
        await self._feed.settled(revision, TELL_S)

    async def note_uses(self, used_at_s: dict[str, int]) -> None:
        """When keys were last good, as activators tell; the later of two stands, an unknown key is passed over."""
        table = schema.keys

        def write(connection: Connection) -> None:
            for key_id, at_s in used_at_s.items():
                known = table.c.last_used_at_s
                is_newer = known.is_(None) | (known < at_s)
                connection.execute(update(table).where(table.c.key_id == key_id, is_newer).values(last_used_at_s=at_s))

        await self._database.write(write)

    def _publish(self, now_s: int, *keys: Key) -> int:
        """Tell of those that are good, and take back the others, with whatever has expired since the last time."""
        good = tuple(key.row() for key in keys if key.state(now_s) is KeyState.ACTIVE)
        for row in good:
            self._ends.pop(row.key_id, None)
            if row.expires_at_s is not None:
                self._ends[row.key_id] = row.expires_at_s
        gone = {key.key_id for key in keys} - {row.key_id for row in good}
        gone |= {key_id for key_id, ends_s in self._ends.items() if ends_s <= now_s}
        for key_id in gone:
            self._ends.pop(key_id, None)
        return self._feed.publish(Feed(keys=good, removed_keys=tuple(sorted(gone))))


def _check_count(connection: Connection, tenant: str, now_s: int) -> None:
    """Raise Refused(CapacityExceeded) if the tenant has too many good keys with those that this transaction made."""
    if (good := len(good_keys(connection, tenant, now_s))) > MAX_KEYS:
        raise Refused(CapacityExceeded(f"keys of tenant '{tenant}'", good, MAX_KEYS))


def _detail(key: Key) -> str:
    models = f", models {' '.join(key.models)}" if key.models else ""
    return f"'{key.name}', scopes {' '.join(key.scopes)}{models}"


def _made(key: Key) -> Changed:
    scopes = tuple(map(str, key.scopes))
    return made(name=key.name, scopes=scopes, models=key.models, expires_at_s=key.expires_at_s)


def _begin(connection: Connection, keys: list[Key], now_s: int) -> None:
    known = connection.execute(select(schema.tenants.c.tenant).where(schema.tenants.c.tenant == DEFAULT_TENANT))
    if known.first() is None:
        insert_tenant(connection, audit.INSTALLATION, DEFAULT_TENANT, now_s)
    for key in keys:
        insert_key(connection, key)
        detail, changed = _detail(key), _made(key)
        audit.record(connection, audit.INSTALLATION, now_s, key.tenant, Action.KEY_CREATED, key.key_id, detail, changed)
