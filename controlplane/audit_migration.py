"""The migration that chains the audit: columns, the rows that are there, and what the database refuses from then on.

Frozen like every step of `migrations`. The triggers are SQLite's; PostgreSQL's are `audit_guards`'.
"""

from typing import Final

from sqlalchemy import Connection, text

from controlplane import audit_guards
from controlplane.policy.trail import Said, genesis, next_chain, window_of

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
_SAME: Final = ("sequence", "at_s", "tenant", "window_name", "link", "digest", "chain")
_EMPTIED: Final = ("actor_tenant", "actor", "action", "subject", "detail", "changed", "request_id", "salt")
_ONLY_ADDED: Final = "BEGIN SELECT RAISE(ABORT, 'the audit is only added to'); END"
# json_extract of entries that let others go alone: what is emptied is no JSON.
_LET_GO: Final = (
    "EXISTS (SELECT 1 FROM audit AS let WHERE let.tenant = OLD.tenant AND let.action = 'audit.expired' "
    "AND let.subject = OLD.window_name AND CASE WHEN let.action = 'audit.expired' "
    "THEN json_extract(let.changed, '$.before_s[1]') END > OLD.at_s)"
)
_IS_EXPIRY: Final = " AND ".join(
    (
        "OLD.expired_at_s IS NULL AND NEW.expired_at_s IS NOT NULL",
        *(f"NEW.{name} = OLD.{name}" for name in _SAME),
        *(f"NEW.{name} = ''" for name in _EMPTIED),
        _LET_GO,
    )
)
TRIGGERS: Final = {
    "audit_adds": "BEFORE INSERT ON audit WHEN NEW.expired_at_s IS NOT NULL OR NEW.link <> 1 + "
    "COALESCE((SELECT links FROM audit_chains WHERE tenant = NEW.tenant), 0) "
    "OR NEW.sequence <= (SELECT COALESCE(MAX(sequence), 0) FROM audit)",
    "audit_keeps": f"BEFORE UPDATE ON audit WHEN NOT ({_IS_EXPIRY})",
    "audit_stays": "BEFORE DELETE ON audit",
    "audit_chains_grow": "BEFORE UPDATE ON audit_chains WHEN NEW.tenant <> OLD.tenant OR NEW.links <> OLD.links + 1",
    "audit_chains_stay": "BEFORE DELETE ON audit_chains",
}


def chain_audit(connection: Connection) -> None:
    """The rows that are there are chained as they are, in their order, without a salt: they have none."""
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
    if connection.dialect.name == "sqlite":
        for name, when in TRIGGERS.items():
            connection.execute(text(f"CREATE TRIGGER {name} {when} {_ONLY_ADDED}"))
    else:
        for statement in audit_guards.STATEMENTS:
            connection.exec_driver_sql(statement)


def _chain_rows(connection: Connection) -> None:
    ends: dict[str, tuple[int, str]] = {}
    rows = connection.execute(text("SELECT * FROM audit ORDER BY sequence")).mappings().all()
    place = text(
        "UPDATE audit SET window_name = :window, link = :link, digest = :digest, chain = :chain "
        "WHERE sequence = :sequence"
    )
    for row in rows:
        tenant, window = row["tenant"], window_of(row["action"])
        links, before = ends.get(tenant, (0, genesis(tenant)))
        digest = Said(**{name: row[name] for name in _EMPTIED}).digest()
        chain = next_chain(before, links + 1, row["at_s"], window, digest)
        ends[tenant] = links + 1, chain
        placed = {"window": str(window), "link": links + 1, "digest": digest, "chain": chain}
        connection.execute(place, {**placed, "sequence": row["sequence"]})
    for tenant, (links, chain) in ends.items():
        connection.execute(
            text("INSERT INTO audit_chains (tenant, links, chain) VALUES (:tenant, :links, :chain)"),
            {"tenant": tenant, "links": links, "chain": chain},
        )
