"""What PostgreSQL refuses of the audit: as the triggers of SQLite in `audit_migration`, and frozen like them."""

from typing import Final

_SAME: Final = ("sequence", "at_s", "tenant", "window_name", "link", "digest", "chain")
_EMPTIED: Final = ("actor_tenant", "actor", "action", "subject", "detail", "changed", "request_id", "salt")
_IS_NEXT: Final = (
    "NEW.expired_at_s IS NULL "
    "AND NEW.link = 1 + COALESCE((SELECT links FROM audit_chains WHERE tenant = NEW.tenant), 0) "
    "AND NEW.sequence > (SELECT COALESCE(MAX(sequence), 0) FROM audit)"
)
# The JSON of entries that let others go alone: what is emptied is none.
_LET_GO: Final = (
    "EXISTS (SELECT 1 FROM audit AS let WHERE let.tenant = OLD.tenant AND let.action = 'audit.expired' "
    "AND let.subject = OLD.window_name AND CASE WHEN let.action = 'audit.expired' "
    "THEN CAST(CAST(let.changed AS json) #>> '{before_s,1}' AS BIGINT) END > OLD.at_s)"
)
_IS_EXPIRY: Final = " AND ".join(
    (
        "OLD.expired_at_s IS NULL AND NEW.expired_at_s IS NOT NULL",
        *(f"NEW.{name} = OLD.{name}" for name in _SAME),
        *(f"NEW.{name} = ''" for name in _EMPTIED),
        _LET_GO,
    )
)
_GROWS: Final = "NEW.tenant = OLD.tenant AND NEW.links = OLD.links + 1"


def _function(name: str, allowed: str) -> str:
    """A refusal is of the class of broken constraints, as SQLite's is."""
    return (
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"IF ({allowed}) IS NOT TRUE THEN RAISE EXCEPTION 'the audit is only added to' USING ERRCODE = '23000'; "
        "END IF; RETURN NEW; END $$"
    )


def _trigger(name: str, event: str, table: str, each: str = "ROW") -> str:
    return f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH {each} EXECUTE FUNCTION {name}()"


# By name: of which table, upon what, and what alone is allowed.
_GUARDS: Final = {
    "audit_adds": ("audit", "INSERT", _IS_NEXT),
    "audit_keeps": ("audit", "UPDATE", _IS_EXPIRY),
    "audit_stays": ("audit", "DELETE", "FALSE"),
    "audit_chains_grow": ("audit_chains", "UPDATE", _GROWS),
    "audit_chains_stay": ("audit_chains", "DELETE", "FALSE"),
    "audit_is_kept": ("audit", "TRUNCATE", "FALSE"),
    "audit_chains_are_kept": ("audit_chains", "TRUNCATE", "FALSE"),
}
TABLES: Final = {name: table for name, (table, _, _) in _GUARDS.items()}
STATEMENTS: Final = tuple(
    statement
    for name, (table, event, allowed) in _GUARDS.items()
    for statement in (
        _function(name, allowed),
        _trigger(name, event, table, "STATEMENT" if event == "TRUNCATE" else "ROW"),
    )
)
