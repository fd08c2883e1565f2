"""Migrate the database forward: numbered steps, each applied once, in a transaction of its own.

A released step is never edited. Its DDL is frozen here as text for both SQLite and PostgreSQL, and a test compares the
result with `schema.py`. The only way back is a backup. A database of a newer program is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine, text

from controlplane.db import schema
from controlplane.db.audit_migration import chain_audit
from controlplane.db.dialects import disable_statement_timeout, drop_columns, ensure_c_collation
from kelvin.contracts.wire import decode_any, encode

_VERSION_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS schema_version (number INTEGER PRIMARY KEY, name VARCHAR(64) NOT NULL)"
)


class NewerDatabase(RuntimeError):
    """A newer program wrote the database. Reading it with this one could lose what that one added."""


@dataclass(frozen=True, slots=True)
class Migration:
    """A migration step. Numbers start at 1 and have no gaps."""

    number: int
    name: str
    apply: Callable[[Connection], None]


def _registry(connection: Connection) -> None:
    for statement in (
        "CREATE TABLE tenants (tenant VARCHAR(63) NOT NULL PRIMARY KEY, created_at_s BIGINT NOT NULL)",
        "CREATE TABLE keys (key_id VARCHAR(12) NOT NULL PRIMARY KEY, "
        "tenant VARCHAR(63) NOT NULL REFERENCES tenants (tenant), secret_sha256 VARCHAR(64) NOT NULL, "
        "scopes TEXT NOT NULL, created_at_s BIGINT NOT NULL)",
        "CREATE TABLE models (tenant VARCHAR(63) NOT NULL REFERENCES tenants (tenant), model VARCHAR(63) NOT NULL, "
        "created_at_s BIGINT NOT NULL, min_replicas INTEGER NOT NULL, max_replicas INTEGER NOT NULL, target FLOAT, "
        "window_s FLOAT NOT NULL, grace_s FLOAT NOT NULL, PRIMARY KEY (tenant, model))",
        "CREATE TABLE versions (tenant VARCHAR(63) NOT NULL, model VARCHAR(63) NOT NULL, "
        "version VARCHAR(64) NOT NULL, state VARCHAR(16) NOT NULL, fault VARCHAR(64), limits TEXT NOT NULL, "
        "architecture TEXT NOT NULL, weight_bytes BIGINT NOT NULL, total_bytes BIGINT NOT NULL, "
        "kv_bytes_per_token BIGINT NOT NULL, max_positions BIGINT NOT NULL, created_at_s BIGINT NOT NULL, "
        "PRIMARY KEY (tenant, model, version), FOREIGN KEY (tenant, model) REFERENCES models (tenant, model))",
        "CREATE TABLE aliases (tenant VARCHAR(63) NOT NULL, model VARCHAR(63) NOT NULL, alias VARCHAR(63) NOT NULL, "
        "version VARCHAR(64) NOT NULL, PRIMARY KEY (tenant, model, alias), "
        "FOREIGN KEY (tenant, model, version) REFERENCES versions (tenant, model, version))",
    ):
        connection.execute(text(statement))


def _access(connection: Connection) -> None:
    """Add access control. Until now one tenant had two keys; the admin key becomes the first operator key."""
    for statement in (
        "ALTER TABLE tenants ADD COLUMN state VARCHAR(16) DEFAULT 'active' NOT NULL",
        "ALTER TABLE keys ADD COLUMN name VARCHAR(63) DEFAULT '' NOT NULL",
        "ALTER TABLE keys ADD COLUMN models TEXT DEFAULT '' NOT NULL",
        "ALTER TABLE keys ADD COLUMN expires_at_s BIGINT",
        "ALTER TABLE keys ADD COLUMN revoked_at_s BIGINT",
        "ALTER TABLE keys ADD COLUMN last_used_at_s BIGINT",
        "ALTER TABLE keys ADD COLUMN successor VARCHAR(12)",
        "UPDATE keys SET name = 'default' WHERE scopes = 'infer'",
        "UPDATE keys SET name = 'admin', scopes = 'admin operator' WHERE scopes = 'admin' AND tenant = 'default'",
        "CREATE TABLE audit (sequence BIGINT NOT NULL PRIMARY KEY, at_s BIGINT NOT NULL, tenant VARCHAR(63) NOT NULL, "
        "actor_tenant VARCHAR(63) NOT NULL, actor VARCHAR(12) NOT NULL, action VARCHAR(32) NOT NULL, "
        "subject VARCHAR(63) NOT NULL, detail TEXT NOT NULL)",
    ):
        connection.execute(text(statement))


def _kinds(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE versions ADD COLUMN kind VARCHAR(16) NOT NULL DEFAULT 'generate'"))


def _signatures(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE versions ADD COLUMN signature TEXT"))


def _limits(connection: Connection) -> None:
    for column in ("store_bytes", "requests", "body_bytes"):
        connection.execute(text(f"ALTER TABLE tenants ADD COLUMN {column} BIGINT"))


def _idle(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE models ADD COLUMN idle VARCHAR(16) NOT NULL DEFAULT 'zero'"))
    connection.execute(text("ALTER TABLE models ADD COLUMN wait_price BIGINT NOT NULL DEFAULT 10000"))


def _rates(connection: Connection) -> None:
    for column in ("rpm", "tpm", "context_tokens", "output_tokens"):
        connection.execute(text(f"ALTER TABLE tenants ADD COLUMN {column} BIGINT"))


def _grants(connection: Connection) -> None:
    statement = (
        "CREATE TABLE grants (tenant VARCHAR(63) NOT NULL, model VARCHAR(63) NOT NULL, "
        "grantee VARCHAR(63) NOT NULL REFERENCES tenants (tenant), created_at_s BIGINT NOT NULL, "
        "PRIMARY KEY (tenant, model, grantee), FOREIGN KEY (tenant, model) REFERENCES models (tenant, model))"
    )
    connection.execute(text(statement))


def _splits(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE models ADD COLUMN split TEXT"))


def _budgets(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE tenants ADD COLUMN budget_micros BIGINT"))


def _ladders(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE models ADD COLUMN ladder TEXT"))


def _plans(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE tenants ADD COLUMN weight BIGINT"))
    connection.execute(text("ALTER TABLE tenants ADD COLUMN priority VARCHAR(16)"))


def _plan_ladders(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE tenants ADD COLUMN plan VARCHAR(63)"))
    connection.execute(text("ALTER TABLE models ADD COLUMN plan_ladders TEXT"))


def _deadlines(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE tenants ADD COLUMN deadline_max_s BIGINT"))


def _averages(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE models ADD COLUMN average VARCHAR(16) NOT NULL DEFAULT 'linear'"))


def _backlogs(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE models ADD COLUMN backlog_s FLOAT NOT NULL DEFAULT 0"))


def _stops(connection: Connection) -> None:
    connection.execute(text("ALTER TABLE versions ADD COLUMN stopped_at_s BIGINT"))


def _settings(connection: Connection) -> None:
    """Move settings to one JSON object per tenant or model. Until now each setting had a column of its own."""
    limits = (
        "store_bytes", "requests", "body_bytes", "rpm", "tpm", "context_tokens", "output_tokens", "budget_micros",
        "weight", "priority", "plan", "deadline_max_s",
    )  # fmt: skip
    scale = {
        "min": "min_replicas", "max": "max_replicas", "target": "target", "window_s": "window_s", "grace_s": "grace_s",
        "idle": "idle", "wait_price": "wait_price", "average": "average", "backlog_s": "backlog_s",
    }  # fmt: skip
    connection.execute(text("ALTER TABLE tenants ADD COLUMN limits TEXT NOT NULL DEFAULT '{}'"))
    connection.execute(text("ALTER TABLE models ADD COLUMN scale TEXT NOT NULL DEFAULT '{}'"))
    connection.execute(text("ALTER TABLE models ADD COLUMN degradation TEXT"))
    set_limits = text("UPDATE tenants SET limits = :limits WHERE tenant = :tenant")
    for row in connection.execute(text("SELECT * FROM tenants")).mappings().all():
        own = {name: row[name] for name in limits if row[name] is not None}
        connection.execute(set_limits, {"limits": encode(own).decode(), "tenant": row["tenant"]})
    set_scale = text("UPDATE models SET scale = :scale, degradation = :steps WHERE tenant = :tenant AND model = :model")
    for row in connection.execute(text("SELECT * FROM models")).mappings().all():
        steps, plans = decode_any(row["ladder"] or "[]"), decode_any(row["plan_ladders"] or "{}")
        values = {
            "scale": encode({name: row[column] for name, column in scale.items()}).decode(),
            "steps": encode({"steps": steps, "plans": plans}).decode() if steps or plans else None,
        }
        connection.execute(set_scale, {**values, "tenant": row["tenant"], "model": row["model"]})
    tenants = (
        "CREATE TABLE tenants (tenant VARCHAR(63) NOT NULL PRIMARY KEY, created_at_s BIGINT NOT NULL, "
        "state VARCHAR(16) DEFAULT 'active' NOT NULL, limits TEXT NOT NULL DEFAULT '{}')"
    )
    models = (
        "CREATE TABLE models (tenant VARCHAR(63) NOT NULL REFERENCES tenants (tenant), model VARCHAR(63) NOT NULL, "
        "created_at_s BIGINT NOT NULL, split TEXT, scale TEXT NOT NULL DEFAULT '{}', degradation TEXT, "
        "PRIMARY KEY (tenant, model))"
    )
    drop_columns(connection, "tenants", limits, tenants)
    drop_columns(connection, "models", (*scale.values(), "ladder", "plan_ladders"), models)


STEPS: Final[Sequence[Migration]] = (
    Migration(1, "registry", _registry),
    Migration(2, "access", _access),
    Migration(3, "kinds", _kinds),
    Migration(4, "signatures", _signatures),
    Migration(5, "limits", _limits),
    Migration(6, "idle", _idle),
    Migration(7, "rates", _rates),
    Migration(8, "grants", _grants),
    Migration(9, "splits", _splits),
    Migration(10, "budgets", _budgets),
    Migration(11, "ladders", _ladders),
    Migration(12, "trail", chain_audit),
    Migration(13, "plans", _plans),
    Migration(14, "plan ladders", _plan_ladders),
    Migration(15, "deadlines", _deadlines),
    Migration(16, "averages", _averages),
    Migration(17, "backlogs", _backlogs),
    Migration(18, "stops", _stops),
    Migration(19, "settings", _settings),
)


def migrate(engine: Engine, steps: Sequence[Migration] = STEPS) -> None:
    """Apply missing steps in order. A step that fails changes nothing. Raises NewerDatabase."""
    with engine.begin() as connection:
        connection.execute(text(_VERSION_TABLE))
        done = connection.execute(text("SELECT COALESCE(MAX(number), 0) FROM schema_version")).scalar_one()
    if done > len(steps):
        raise NewerDatabase(f"the database is at schema {done}; this program knows {len(steps)}")
    for step in steps[done:]:
        with engine.begin() as connection:
            disable_statement_timeout(connection)
            step.apply(connection)
            connection.execute(
                text("INSERT INTO schema_version (number, name) VALUES (:number, :name)"),
                {"number": step.number, "name": step.name},
            )
    ensure_c_collation(engine, schema.metadata.tables)
