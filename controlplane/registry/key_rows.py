"""Read and write keys as rows. `key_store.py` changes them, `policy/access.py` decides who may."""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, RowMapping, and_, insert, not_, or_, select, update

from controlplane.db import schema
from controlplane.db.json_columns import read_enum
from controlplane.registry.policy.access import OPERATOR_TENANT, KeyState, key_state
from kelvin.contracts.errors import NotFound, Refused
from kelvin.contracts.serving.control_messages import KeyRow, Scope


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is stored."""

    key_id: str
    tenant: str
    name: str
    secret_sha256: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...]
    created_at_s: int
    expires_at_s: int | None = None
    revoked_at_s: int | None = None
    last_used_at_s: int | None = None
    successor: str | None = None

    def state(self, now_s: int) -> KeyState:
        """Return whether the key is active, expired or revoked."""
        return key_state(self.expires_at_s, self.revoked_at_s, now_s)

    def row(self) -> KeyRow:
        """Return the key as activators know it."""
        return KeyRow(
            key_id=self.key_id,
            secret_sha256=self.secret_sha256,
            tenant=self.tenant,
            scopes=self.scopes,
            models=self.models,
            expires_at_s=self.expires_at_s,
        )


def insert_key(connection: Connection, key: Key) -> None:
    """Insert a new key."""
    connection.execute(
        insert(schema.keys).values(
            key_id=key.key_id,
            tenant=key.tenant,
            secret_sha256=key.secret_sha256,
            scopes=" ".join(key.scopes),
            created_at_s=key.created_at_s,
            name=key.name,
            models=" ".join(key.models),
            expires_at_s=key.expires_at_s,
        )
    )


def update_key(connection: Connection, key_id: str, **columns: int | str | None) -> None:
    """Update columns of an existing key."""
    connection.execute(update(schema.keys).where(schema.keys.c.key_id == key_id).values(**columns))


def is_active(now_s: int) -> ColumnElement[bool]:
    """Return the condition of an active key for a query, as in `key_state`. Rows are never deleted, so a tenant may
    have many more keys than active ones.
    """
    c = schema.keys.c
    return and_(c.revoked_at_s.is_(None), or_(c.expires_at_s.is_(None), c.expires_at_s > now_s))


def load_keys(connection: Connection) -> list[Key]:
    """Return all keys. Raises UnreadableColumn."""
    return [_key(row) for row in connection.execute(select(schema.keys)).mappings()]


def load_listed_keys(connection: Connection, tenant: str, now_s: int, ended: int) -> list[Key]:
    """Return the tenant's active keys and its newest `ended` other keys, the newest first."""
    table = schema.keys
    newest_first = (table.c.created_at_s.desc(), table.c.key_id)
    good = select(table).where(table.c.tenant == tenant, is_active(now_s))
    others = select(table).where(table.c.tenant == tenant, not_(is_active(now_s))).order_by(*newest_first).limit(ended)
    found = [_key(row) for query in (good, others) for row in connection.execute(query).mappings()]
    return sorted(found, key=lambda key: (-key.created_at_s, key.key_id))


def find_key(connection: Connection, tenant: str, key_id: str) -> Key:
    """Return the tenant's key. Raises Refused(NotFound), also for another tenant's key."""
    table = schema.keys
    wanted = select(table).where(table.c.tenant == tenant, table.c.key_id == key_id)
    row = connection.execute(wanted).mappings().first()
    if row is None:
        raise Refused(NotFound("key", key_id[:63]))
    return _key(row)


def permanent_operator_keys(connection: Connection) -> list[str]:
    """Return the ids of operator keys that are not revoked and do not expire."""
    c = schema.keys.c
    query = select(c.key_id, c.scopes).where(
        c.tenant == OPERATOR_TENANT, c.expires_at_s.is_(None), c.revoked_at_s.is_(None)
    )  # fmt: skip
    return [key_id for key_id, scopes in connection.execute(query) if Scope.OPERATOR in scopes.split()]


def _key(row: RowMapping) -> Key:
    return Key(
        key_id=row["key_id"],
        tenant=row["tenant"],
        name=row["name"],
        secret_sha256=row["secret_sha256"],
        scopes=tuple(read_enum(word, Scope, f"the scopes of key {row['key_id']}") for word in row["scopes"].split()),
        models=tuple(row["models"].split()),
        created_at_s=row["created_at_s"],
        expires_at_s=row["expires_at_s"],
        revoked_at_s=row["revoked_at_s"],
        last_used_at_s=row["last_used_at_s"],
        successor=row["successor"],
    )
