"""Keys as rows of the database. Who may have and change which is `keys`' and `policy/access`' to say."""

from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, insert, select, update

from contracts.control import KeyRow, Scope
from contracts.errors import NotFound, Refused
from controlplane import schema
from controlplane.policy.access import OPERATORS, KeyState, key_state


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
        """Whether it is good."""
        return key_state(self.expires_at_s, self.revoked_at_s, now_s)

    def row(self) -> KeyRow:
        """What activators know of it."""
        return KeyRow(
            key_id=self.key_id,
            secret_sha256=self.secret_sha256,
            tenant=self.tenant,
            scopes=self.scopes,
            models=self.models,
            expires_at_s=self.expires_at_s,
        )


def insert_key(connection: Connection, key: Key) -> None:
    """A new one."""
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


def set_columns(connection: Connection, key_id: str, **columns: int | str | None) -> None:
    """Of one that there is."""
    connection.execute(update(schema.keys).where(schema.keys.c.key_id == key_id).values(**columns))


def load_keys(connection: Connection, tenant: str | None = None) -> list[Key]:
    """Of a tenant, or all; the newest first."""
    table = schema.keys
    wanted = select(table).order_by(table.c.created_at_s.desc(), table.c.key_id)
    if tenant is not None:
        wanted = wanted.where(table.c.tenant == tenant)
    return [_key(row) for row in connection.execute(wanted).mappings()]


def find_key(connection: Connection, tenant: str, key_id: str) -> Key:
    """Raises Refused(NotFound): another tenant's looks like none."""
    table = schema.keys
    wanted = select(table).where(table.c.tenant == tenant, table.c.key_id == key_id)
    row = connection.execute(wanted).mappings().first()
    if row is None:
        raise Refused(NotFound("key", key_id[:63]))
    return _key(row)


def lasting_operators(connection: Connection) -> list[str]:
    """Keys of operators that end only when they are revoked."""
    return [
        key.key_id
        for key in load_keys(connection, OPERATORS)
        if Scope.OPERATOR in key.scopes and key.expires_at_s is None and key.revoked_at_s is None
    ]


def _key(row: RowMapping) -> Key:
    return Key(
        key_id=row["key_id"],
        tenant=row["tenant"],
        name=row["name"],
        secret_sha256=row["secret_sha256"],
        scopes=tuple(Scope(scope) for scope in row["scopes"].split()),
        models=tuple(row["models"].split()),
        created_at_s=row["created_at_s"],
        expires_at_s=row["expires_at_s"],
        revoked_at_s=row["revoked_at_s"],
        last_used_at_s=row["last_used_at_s"],
        successor=row["successor"],
    )
