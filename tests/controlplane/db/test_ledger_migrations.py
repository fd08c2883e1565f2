"""A ledger of any released schema opens, gets chains and totals, and bills as before."""

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect, text

from controlplane.db.database import sqlite_engine
from controlplane.db.dialects import ensure_c_collation
from controlplane.db.ledger_migrations import STEPS, NewerLedger, ensure_ledger
from controlplane.db.ledger_schema import metadata, request_records
from controlplane.ledger_check.ledger_verification import verify_ledger
from tests.controlplane.billing_fixture import GOLDEN, enter, report
from tests.controlplane.database_backends import SQLITE, DatabaseBackend
from tests.controlplane.usage_records import lifetime_record, request_record

# Written by a program with schema 2: a closed month with a conflict and a late correction, two more months.
CHAINED = GOLDEN.with_name("ledger_2.sql")


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Engine]:
    """A database that schema 1 left."""
    path = tmp_path / "kelvin.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(GOLDEN.read_text())
    connection.close()
    made = sqlite_engine(path)
    yield made
    made.dispose()


@pytest.fixture
def fresh(backend: DatabaseBackend, tmp_path: Path) -> Engine:
    """A ledger without rows."""
    made = backend.engine(tmp_path / "fresh")
    ensure_ledger(made)
    return made


def _columns(engine: Engine, table: str) -> dict[str, tuple[str, bool]]:
    """Return type and nullability by column. SQLite ignores the length of a text, so it is left out there."""
    length = r"\(\d+\)" if engine.dialect.name == SQLITE else "$^"
    columns = inspect(engine).get_columns(table)
    return {each["name"]: (re.sub(length, "", str(each["type"])), each["nullable"]) for each in columns}


@pytest.mark.parametrize("table", sorted(metadata.tables))
def test_migrations_produce_the_ledger_tables(
    backend: DatabaseBackend, fresh: Engine, tmp_path: Path, table: str
) -> None:
    """Columns, keys and indices equal those of the code's tables."""
    declared = backend.engine(tmp_path / "declared")
    metadata.create_all(declared)
    ensure_c_collation(declared, metadata.tables)
    assert _columns(fresh, table) == _columns(declared, table)
    for facts in ("get_pk_constraint", "get_indexes"):
        found, wanted = (getattr(inspect(engine), facts)(table) for engine in (fresh, declared))
        for each in [*found, *wanted] if facts == "get_indexes" else []:
            each.pop("dialect_options", None)
        assert repr(found) == repr(wanted)


def test_an_old_ledger_is_chained_and_bills_as_before(old: Engine) -> None:
    """Nothing is lost, the chains are sound, and new records are stored."""
    ensure_ledger(old)
    ensure_ledger(old)
    found = report(old)
    assert found.requests == {"cancelled": 2, "ok": 2, "overloaded": 1, "replica_lost": 1}
    assert (found.prompt_tokens, found.completion_tokens) == (1040, 26)
    assert [use.lifetimes for use in found.device] == [1, 1]
    assert [problem.kind for problem in found.balance.problems] == ["sequence_hole", "conflict"]
    assert report(old, tenant="other", month="2026-10").requests == {"ok": 1}
    for tenant, months in (("acme", ["2026-11"]), ("other", ["2026-10"]), ("", ["2026-11"])):
        with old.connect() as connection:
            checked = verify_ledger(connection, tenant, None)
        assert (checked.sound, [each.month for each in checked.months]) == (True, months)
    enter(old, [request_record(9, source="activator-1"), lifetime_record(7, runtime_id="rt-7", requests=0)])
    with old.connect() as connection:
        assert verify_ledger(connection, "acme", None).sound
    assert report(old).requests["ok"] == 3


def test_an_old_ledger_whose_rows_were_lost_would_bill_less(old: Engine) -> None:
    """Negative control: the bill above comes from the old rows."""
    with old.begin() as connection:
        connection.execute(text("DELETE FROM ledger_requests WHERE request_id = 'req-2'"))
    ensure_ledger(old)
    assert report(old).requests["ok"] == 1


def test_the_digests_of_a_chained_ledger_stay_what_they_were(tmp_path: Path) -> None:
    """Records without an idempotency key keep the digests of the program that wrote them. So do later ones."""
    path = tmp_path / "kelvin.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(CHAINED.read_text())
        ends = dict(connection.execute("SELECT tenant || month, chain FROM ledger_chains").fetchall())
    connection.close()
    engine = sqlite_engine(path)
    ensure_ledger(engine)
    enter(engine, [request_record(30, sequence=30), request_record(31, sequence=31, once="a")])
    for tenant in ("acme", ""):
        with engine.connect() as opened:
            found = verify_ledger(opened, tenant, None)
        assert found.sound
        for month in found.months:
            if month.month == "2026-11":
                assert month.chain == ends[tenant + month.month]
    with engine.begin() as changing:
        changing.execute(text("UPDATE ledger_requests SET once = 'b' WHERE once = 'a'"))
    with engine.connect() as opened:
        assert not verify_ledger(opened, "acme", None).sound
    engine.dispose()


def test_a_step_that_fails_leaves_the_old_ledger(old: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start tries again."""
    monkeypatch.setattr("controlplane.db.ledger_migrations.month_of", lambda at_us: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ensure_ledger(old)
    monkeypatch.undo()
    assert "ledger_chains" not in inspect(old).get_table_names()
    ensure_ledger(old)
    with old.connect() as connection:
        assert connection.execute(text("SELECT COUNT(*) FROM ledger_requests WHERE link = 0")).scalar_one() == 0
        assert connection.execute(request_records.select()).mappings().first() is not None


def test_a_newer_ledger_is_refused(fresh: Engine) -> None:
    with fresh.begin() as connection:
        connection.execute(text("INSERT INTO ledger_schema VALUES (:number)"), {"number": len(STEPS) + 1})
    with pytest.raises(NewerLedger, match=f"has schema {len(STEPS) + 1}"):
        ensure_ledger(fresh)
