"""Migrate the audit log to hash chains: new columns, links for existing rows, and triggers that refuse other changes.

Frozen, like every step in `migrations.py`.
"""

import hashlib
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
from sqlalchemy import Connection, text

_COLUMNS: Final = (
    "changed TEXT NOT NULL DEFAULT '{}'",
    "request_id VARCHAR(64) NOT NULL DEFAULT ''",
    "salt VARCHAR(32) NOT NULL DEFAULT ''",
    "window_name VARCHAR(16) NOT NULL DEFAULT ''",
    "link BIGINT NOT NULL DEFAULT 0",
    "digest VARCHAR(64) NOT NULL DEFAULT ''",
    "chain VARCHAR(64) NOT NULL DEFAULT ''",
    "expired_at_s BIGINT",
)
_UNCHANGED_COLUMNS: Final = ("sequence", "at_s", "tenant", "window_name", "link", "digest", "chain")
_EMPTIED_COLUMNS: Final = ("actor_tenant", "actor", "action", "subject", "detail", "changed", "request_id", "salt")
_IS_NEXT_LINK: Final = (
    "NEW.expired_at_s IS NULL "
    "AND NEW.link = 1 + COALESCE((SELECT links FROM audit_chains WHERE tenant = NEW.tenant), 0) "
    "AND NEW.sequence > (SELECT COALESCE(MAX(sequence), 0) FROM audit)"
)
# An `audit.expired` entry covers entries before its `before_s`. The CASE keeps the database from parsing the JSON of
# other rows: an emptied one has none. Each database has its own expression for `{before_s}`.
_IS_EXPIRY: Final = " AND ".join(
    (
        "OLD.expired_at_s IS NULL AND NEW.expired_at_s IS NOT NULL",
        *(f"NEW.{name} = OLD.{name}" for name in _UNCHANGED_COLUMNS),
        *(f"NEW.{name} = ''" for name in _EMPTIED_COLUMNS),
        "EXISTS (SELECT 1 FROM audit AS let WHERE let.tenant = OLD.tenant AND let.action = 'audit.expired' "
        "AND let.subject = OLD.window_name "
        "AND CASE WHEN let.action = 'audit.expired' THEN {before_s} END > OLD.at_s)",
    )
)
_BEFORE_S: Final = {
    "sqlite": "json_extract(let.changed, '$.before_s[1]')",
    "postgresql": "CAST(CAST(let.changed AS json) #>> '{before_s,1}' AS BIGINT)",
}
_IS_NEXT_CHAIN_END: Final = "NEW.tenant = OLD.tenant AND NEW.links = OLD.links + 1"
_FORMAT_NAME: Final = "kelvin audit 1"
_WINDOWS: Final = {  # by the word of an action before its dot
    "access": "access", "key": "keys", "model": "models", "version": "models", "cache": "models", "tenant": "tenants",
    "month": "billing", "prices": "billing", "audit": "trail",
}  # fmt: skip


class Guard(NamedTuple):
    """A trigger: its table, its event, and the only change that it allows."""

    table: str
    event: str
    allowed: str = "FALSE"


GUARDS: Final = {
    "audit_adds": Guard("audit", "INSERT", _IS_NEXT_LINK),
    "audit_keeps": Guard("audit", "UPDATE", _IS_EXPIRY),
    "audit_stays": Guard("audit", "DELETE"),
    "audit_chains_grow": Guard("audit_chains", "UPDATE", _IS_NEXT_CHAIN_END),
    "audit_chains_stay": Guard("audit_chains", "DELETE"),
    # PostgreSQL only: SQLite has no TRUNCATE.
    "audit_is_kept": Guard("audit", "TRUNCATE"),
    "audit_chains_are_kept": Guard("audit_chains", "TRUNCATE"),
}


def _trigger_statements(dialect: str) -> Iterator[str]:
    """Yield the statements that create the triggers. In both databases a refusal counts as a constraint violation."""
    for name, (table, event, allowed) in GUARDS.items():
        refused = f"({allowed.replace('{before_s}', _BEFORE_S[dialect])}) IS NOT TRUE"
        message, upon = "'the audit is only added to'", f"CREATE TRIGGER {name} BEFORE {event} ON {table}"
        if dialect == "postgresql":
            yield (
                f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                f"IF {refused} THEN RAISE EXCEPTION {message} USING ERRCODE = '23000'; END IF; RETURN NEW; END $$"
            )
            yield f"{upon} FOR EACH {'STATEMENT' if event == 'TRUNCATE' else 'ROW'} EXECUTE FUNCTION {name}()"
        elif event != "TRUNCATE":
            yield f"{upon} WHEN {refused} BEGIN SELECT RAISE(ABORT, {message}); END"


def chain_audit(connection: Connection) -> None:
    """Chain the existing rows in their order. They have no salt."""
    for column in _COLUMNS:
        connection.execute(text(f"ALTER TABLE audit ADD COLUMN {column}"))
    for statement in (
        "CREATE TABLE audit_chains (tenant VARCHAR(63) NOT NULL PRIMARY KEY, links BIGINT NOT NULL, "
        "chain VARCHAR(64) NOT NULL)",
        "CREATE TABLE audit_windows (tenant VARCHAR(63) NOT NULL, window_name VARCHAR(16) NOT NULL, "
        "days INTEGER NOT NULL, PRIMARY KEY (tenant, window_name))",
    ):
        connection.execute(text(statement))
    _chain_rows(connection)
    connection.execute(text("CREATE UNIQUE INDEX audit_by_link ON audit (tenant, link)"))
    connection.execute(text("CREATE INDEX audit_expiries ON audit (tenant, subject) WHERE action = 'audit.expired'"))
    for statement in _trigger_statements(connection.dialect.name):
        connection.exec_driver_sql(statement)


def _chain_rows(connection: Connection) -> None:
    ends: dict[str, tuple[int, bytes]] = {}
    place = text(
        "UPDATE audit SET window_name = :window, link = :link, digest = :digest, chain = :chain "
        "WHERE sequence = :sequence"
    )
    for row in connection.execute(text("SELECT * FROM audit ORDER BY sequence")).mappings().all():
        tenant, window = row["tenant"], _WINDOWS[row["action"].partition(".")[0]]
        digest = _digest(b"", _FORMAT_NAME, *(row[field] for field in _EMPTIED_COLUMNS)).hex()
        links, end = ends.get(tenant) or (0, _digest(b"", _FORMAT_NAME, tenant))
        link, chain = links + 1, _digest(end, links + 1, row["at_s"], window, digest)
        ends[tenant] = link, chain
        placed = {"window": window, "link": link, "digest": digest, "chain": chain.hex()}
        connection.execute(place, {**placed, "sequence": row["sequence"]})
    for tenant, (links, end) in ends.items():
        made = text("INSERT INTO audit_chains (tenant, links, chain) VALUES (:tenant, :links, :chain)")
        connection.execute(made, {"tenant": tenant, "links": links, "chain": end.hex()})


def _digest(before: bytes, *values: str | int) -> bytes:
    return hashlib.sha256(before + msgspec.json.encode(values)).digest()
