"""The audit log in its database: chaining, refused changes, expiry, and forgeries. Runs on both backends."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError, ProgrammingError

from controlplane.audit import audit_log
from controlplane.audit.audit_entry_policy import DAY_S, AuditAction, EntryBody
from controlplane.audit.audit_log import EXPIRY_INTERVAL_S, AuditLog
from controlplane.audit.audit_rows import (
    ALL_TENANTS,
    Actor,
    Event,
    audited_tenants,
    events,
    expire,
    record,
    set_window_days,
    verify_audit,
    verify_chain,
)
from controlplane.clock import SystemClock
from controlplane.db.audit_migration import GUARDS
from controlplane.db.migrations import STEPS, migrate
from kelvin.contracts.accounting.audit_reports import AuditChain
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Principal, Scope
from tests.controlplane.database_backends import SQLITE, DatabaseBackend
from tests.controlplane.database_backends import database as opened

NOW_S = 1_700_000_000
YEAR_S = 365 * DAY_S
BY = Actor(key_id="acme-k", tenant="acme", scopes=(), request_id="req_7")


@pytest.fixture
def engine(backend: DatabaseBackend, tmp_path: Path) -> Engine:
    made = backend.engine(tmp_path)
    migrate(made)
    return made


def note(engine: Engine, action: AuditAction, *, tenant: str = "acme", at_s: int = NOW_S, subject: str = "s") -> None:
    with engine.begin() as connection:
        record(connection, BY, at_s, tenant, action, subject, changed={"rpm": (None, 60)})


def verified(engine: Engine, tenant: str = "acme") -> AuditChain:
    with engine.connect() as connection:
        return verify_chain(connection, tenant)


def shown(engine: Engine, tenant: str = "acme", reader: Principal = BY) -> list[Event]:
    with engine.connect() as connection:
        return events(connection, tenant, reader, 100, None)


def filled(engine: Engine) -> None:
    for number in range(5):
        note(engine, AuditAction.KEY_CREATED, subject=f"k{number}", at_s=NOW_S + number)


def forge(engine: Engine, *statements: str) -> None:
    """Run statements without the triggers, as the owner of the database could."""
    with engine.begin() as connection:
        for name, guard in GUARDS.items():
            where = "" if engine.dialect.name == SQLITE else f"ON {guard.table}"
            connection.execute(text(f"DROP TRIGGER IF EXISTS {name} {where}"))
        for statement in statements:
            connection.execute(text(statement))


def test_entry_names_actor_change_and_request(engine: Engine) -> None:
    """An entry has the values before and after. Each tenant's chain has its own numbers."""
    filled(engine)
    note(engine, AuditAction.TENANT_LIMITED, tenant="other", subject="other")
    newest = shown(engine)[0]
    assert (newest.actor, newest.action, newest.subject, newest.request_id) == ("acme-k", "key.created", "k4", "req_7")
    assert newest.changed == {"rpm": (None, 60)}
    assert (newest.window, newest.link, newest.expired) == ("keys", 5, False)
    (other,) = shown(engine, "other")
    assert (other.link, other.sequence) == (1, 6)
    with engine.connect() as connection:
        report = verify_audit(connection, ALL_TENANTS)
    assert report.sound
    assert [(each.tenant, each.links) for each in report.chains] == [("acme", 5), ("other", 1)]
    assert report.chains[0].chain == newest.chain


def test_another_tenants_reader_learns_no_key_and_no_request(engine: Engine) -> None:
    """The reader sees only that an operator acted."""
    note(engine, AuditAction.TENANT_SUSPENDED)
    (seen,) = shown(engine, reader=Principal(key_id="x", tenant="third", scopes=()))
    assert (seen.actor, seen.request_id) == ("operator", "")


def test_operator_sees_key_and_request_of_a_tenants_act(engine: Engine) -> None:
    """An operator sees the tenant's key, so the act is not taken for an operator's."""
    filled(engine)
    seen = shown(engine, reader=Principal(key_id="x", tenant="third", scopes=(Scope.OPERATOR,)))[0]
    assert (seen.actor, seen.request_id) == ("acme-k", "req_7")


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("DELETE FROM audit WHERE link = 5", id="delete the last row"),
        pytest.param("DELETE FROM audit", id="delete all rows"),
        pytest.param("UPDATE audit SET actor = 'other' WHERE link = 3", id="change a field"),
        pytest.param("UPDATE audit SET at_s = 1 WHERE link = 3", id="change a time"),
        pytest.param("UPDATE audit SET link = 9 WHERE link = 5", id="change a link"),
        pytest.param(
            "UPDATE audit SET actor_tenant='', actor='', action='', subject='', detail='', changed='', request_id='', "
            "salt='', expired_at_s=9 WHERE link = 1",
            id="empty a row without an expiry entry",
        ),
        pytest.param(
            "INSERT INTO audit (sequence, at_s, tenant, actor_tenant, actor, action, subject, detail, link) "
            "VALUES (9, 1, 'acme', '', '', 'key.created', 'k', '', 9)",
            id="insert a link that is not the next",
        ),
        pytest.param(
            "INSERT OR REPLACE INTO audit (sequence, at_s, tenant, actor_tenant, actor, action, subject, detail, link) "
            "VALUES (2, 1, 'acme', '', '', 'key.created', 'k', '', 6)",
            id="replace a row",
        ),
        pytest.param("UPDATE audit_chains SET links = 4", id="move the end back"),
        pytest.param("DELETE FROM audit_chains", id="delete the end"),
    ],
)
def test_the_database_only_adds(engine: Engine, statement: str) -> None:
    """The statement is refused, and nothing has changed."""
    filled(engine)
    before = shown(engine)
    if engine.dialect.name != SQLITE and "OR REPLACE" in statement:
        statement = statement.replace("OR REPLACE", "") + " ON CONFLICT (sequence) DO UPDATE SET actor = ''"
    with pytest.raises(IntegrityError, match="only added to"), engine.begin() as connection:
        connection.execute(text(statement))
    assert shown(engine) == before
    assert verified(engine).difference is None


@pytest.mark.parametrize(
    ("statements", "links", "says"),
    [
        pytest.param((), 5, None, id="nothing"),
        pytest.param(("UPDATE audit SET actor = 'acme-j' WHERE link = 3",), 2, "link 3 (key.created)", id="a byte"),
        pytest.param(("UPDATE audit SET changed = '{}' WHERE link = 1",), 0, "link 1", id="a value"),
        pytest.param(("DELETE FROM audit WHERE link = 2",), 1, "link 3 comes after link 1", id="a row"),
        pytest.param(("DELETE FROM audit WHERE link = 5",), 4, "5 links were written", id="the last row"),
        pytest.param(("DELETE FROM audit",), 0, "the chain ends with link 0", id="all rows"),
        pytest.param(
            (
                "UPDATE audit SET link = 99 WHERE link = 2",
                "UPDATE audit SET link = 2 WHERE link = 3",
                "UPDATE audit SET link = 3 WHERE link = 99",
            ),
            1,
            "link 2",
            id="two rows in another order",
        ),
        pytest.param(
            ("UPDATE audit SET actor='', salt='', expired_at_s=9 WHERE link = 4",), 3, "no entry says", id="emptied"
        ),
    ],
)
def test_a_forgery_is_named(engine: Engine, statements: tuple[str, ...], links: int, says: str | None) -> None:
    """Without the triggers each forgery is possible. Verification names the first bad link."""
    filled(engine)
    forge(engine, *statements)
    found = verified(engine)
    assert found.links == links
    assert (found.difference is None) is (says is None)
    assert says is None or says in (found.difference or "")
    with engine.connect() as connection:
        assert verify_audit(connection, ALL_TENANTS).sound is (says is None)


def test_expired_entry_keeps_its_digest_only(engine: Engine) -> None:
    """An expired entry loses its content, the expiry is an entry itself, and the chain still holds. A second run
    changes nothing, and a forgery of the remaining fields is still found.
    """
    filled(engine)
    note(engine, AuditAction.MODEL_DEPLOYED, subject="m")
    later = NOW_S + 365 * DAY_S + 3
    with engine.begin() as connection:
        assert expire(connection, BY, "acme", later) == 4  # three keys and the model; the others are younger
        assert expire(connection, BY, "acme", later) == 0
    seen = {each.link: each for each in shown(engine)}
    assert [link for link, each in sorted(seen.items()) if each.expired] == [1, 2, 3, 6]
    assert (seen[1].actor, seen[1].subject, seen[1].changed, seen[1].at_s) == ("", "", {}, NOW_S)
    assert (seen[7].action, seen[7].subject, seen[7].changed["entries"]) == ("audit.expired", "keys", (None, 3))
    with engine.connect() as connection:
        kept = connection.execute(text("SELECT * FROM audit WHERE link = 1")).one()
    assert not {"acme-k", "k0", "key.created", "req_7"} & {str(value) for value in kept}
    found = verified(engine)
    assert (found.links, found.expired, found.difference) == (8, 4, None)
    forge(engine, "UPDATE audit SET at_s = at_s - 1 WHERE link = 1")
    assert "link 1" in (verified(engine).difference or "")


def test_widened_expiry_entry_is_found(engine: Engine) -> None:
    """Negative control: an expiry entry that was changed to cover one more entry is itself reported."""
    filled(engine)
    with engine.begin() as connection:
        expire(connection, BY, "acme", NOW_S + 365 * DAY_S + 1)
    forge(
        engine,
        "UPDATE audit SET changed = replace(changed, '1700000001', '1800000000') WHERE action = 'audit.expired'",
        "UPDATE audit SET actor='', salt='', expired_at_s=9 WHERE link = 4",
    )
    assert "link 6 (audit.expired)" in (verified(engine).difference or "")


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        pytest.param("UPDATE audit SET changed = '' WHERE link = 6", "link 1", id="nothing"),
        pytest.param("UPDATE audit SET changed = '{}' WHERE link = 6", "link 1", id="no time"),
        pytest.param("UPDATE audit SET changed = '{\"before_s\":[1]}' WHERE link = 6", "link 1", id="half of the time"),
        pytest.param("UPDATE audit SET subject = 'x' WHERE link = 6", "link 1", id="another window's entry"),
    ],
)
def test_forged_expiry_that_cannot_be_read_is_named(engine: Engine, statement: str, says: str) -> None:
    """An expiry entry with an unreadable value covers no entry."""
    filled(engine)
    with engine.begin() as connection:
        expire(connection, BY, "acme", NOW_S + 365 * DAY_S + 3)
    assert verified(engine).difference is None
    forge(engine, statement)
    assert says in (verified(engine).difference or "")


@pytest.mark.parametrize("column", ["subject", "at_s", "digest", "changed"])
def test_audit_text_that_is_not_utf8_is_named(engine: Engine, column: str) -> None:
    """SQLite returns such bytes as text that cannot be decoded. PostgreSQL refuses text in a number column."""
    filled(engine)
    statement = f"UPDATE audit SET {column} = CAST(X'ff' AS TEXT) WHERE link = 2"
    if column == "at_s" and engine.dialect.name == "postgresql":
        with pytest.raises(ProgrammingError):
            forge(engine, statement)
        return
    whole = verified(engine)
    forge(engine, statement)
    found = verified(engine)
    assert found.difference is not None
    assert (found.links, whole.links) == (1, 5)


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("UPDATE audit_chains SET chain = CAST(X'ff' AS TEXT)", id="the end"),
        pytest.param("UPDATE audit SET subject = CAST(X'ff' AS TEXT) WHERE link = 6", id="an expiry entry"),
    ],
)
def test_unreadable_text_elsewhere_hides_no_links(engine: Engine, statement: str) -> None:
    """Other links are still verified if the stored end or an expiry entry cannot be read."""
    filled(engine)
    with engine.begin() as connection:
        record(connection, BY, NOW_S, "acme", AuditAction.AUDIT_EXPIRED, "keys")
    forge(engine, statement)
    found = verified(engine)
    assert (found.links, found.difference is None) == (6 if "chains" in statement else 5, False)


@pytest.mark.parametrize("value", ["'x'", "CAST(X'ff' AS TEXT)"])
def test_listing_refuses_an_unreadable_entry(engine: Engine, value: str) -> None:
    """The message names `kelvin audit verify`, which finds the entry."""
    filled(engine)
    forge(engine, f"UPDATE audit SET changed = {value} WHERE link = 2")
    with pytest.raises(Refused, match="kelvin audit verify"):
        shown(engine)


@pytest.mark.parametrize("tenant", ["X'ff'", "CAST(X'ff' AS TEXT)"])
def test_a_tenant_that_is_no_text_is_named(engine: Engine, tenant: str) -> None:
    """The chain that lost its entries is reported, too."""
    filled(engine)
    forge(engine, f"UPDATE audit SET tenant = {tenant}")
    with engine.connect() as connection:
        report = verify_audit(connection, ALL_TENANTS)
    assert not report.sound
    assert "acme" in {each.tenant for each in report.chains if each.difference is not None}


def test_windows_are_the_tenants_or_the_installations(engine: Engine) -> None:
    """With a window of zero days no entry is written, and older ones expire next. Other tenants keep theirs."""
    note(engine, AuditAction.ACCESS_KEYS)
    note(engine, AuditAction.ACCESS_KEYS, tenant="other")
    with engine.begin() as connection:
        set_window_days(connection, "acme", {"access": 0})
        set_window_days(connection, "", {"keys": 30})
    note(engine, AuditAction.ACCESS_KEYS)
    assert [each.action for each in shown(engine)] == ["access.keys"]
    with engine.begin() as connection:
        assert {tenant: expire(connection, BY, tenant, NOW_S) for tenant in audited_tenants(connection)} == {
            "acme": 1, "other": 0,
        }  # fmt: skip
    note(engine, AuditAction.KEY_CREATED, tenant="other")
    with engine.begin() as connection:
        assert expire(connection, BY, "other", NOW_S + 31 * DAY_S) == 1
        assert [verify_chain(connection, tenant).difference for tenant in ("acme", "other")] == [None, None]


def test_window_of_a_newer_program_blocks_no_entry(engine: Engine) -> None:
    """Entries in known windows are written and expire as usual."""
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO audit_windows VALUES ('acme', 'deploys', 7), ('acme', 'access', 7)"))
    note(engine, AuditAction.ACCESS_KEYS)
    with engine.begin() as connection:
        assert expire(connection, BY, "acme", NOW_S + 8 * DAY_S) == 1


def test_no_secret_is_written(engine: Engine) -> None:
    """A secret in a subject, a detail or a value is cut, as in logs."""
    key = "kv-abcdefghijkl-" + "A" * 43
    with engine.begin() as connection:
        record(connection, BY, NOW_S, "acme", AuditAction.KEY_CREATED, key, key, {"name": (None, key)})
    assert "A" * 43 not in repr(shown(engine))
    assert verified(engine).difference is None


def test_the_entry_falls_with_its_change(engine: Engine) -> None:
    """A transaction that is rolled back leaves neither the change nor the entry."""

    def given_up() -> None:
        with engine.begin() as connection:
            record(connection, BY, NOW_S, "acme", AuditAction.KEY_CREATED, "k")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        given_up()
    assert shown(engine) == []
    assert verified(engine) == AuditChain(tenant="acme", links=0, chain=verified(engine).chain, expired=0)


@pytest.mark.parametrize("table", sorted({guard.table for guard in GUARDS.values()}))
def test_postgresql_empties_no_table_of_it(backend: DatabaseBackend, engine: Engine, table: str) -> None:
    """In PostgreSQL, TRUNCATE does not fire DELETE triggers and needs its own."""
    filled(engine)
    if backend.name != SQLITE:
        with pytest.raises(IntegrityError, match="only added to"), engine.begin() as connection:
            connection.execute(text(f"TRUNCATE {table}"))
    assert verified(engine).difference is None


def test_migration_chains_existing_audit_rows(
    backend: DatabaseBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Existing rows are chained unchanged and in order, the next entry is the next link, and rows are then read-only.
    The migration does not use today's digest function, so later changes to it do not matter.
    """
    engine = backend.engine(tmp_path)
    migrate(engine, STEPS[:11])
    with engine.begin() as connection:
        for sequence, tenant in enumerate(("acme", "other", "acme"), 1):
            row = {"sequence": sequence, "tenant": tenant}
            connection.execute(
                text(
                    "INSERT INTO audit VALUES (:sequence, 5, :tenant, 'default', 'abc', 'tenant.created', :tenant, 'd')"
                ),
                row,
            )
    with monkeypatch.context() as later:
        later.setattr(EntryBody, "digest", lambda _: "0" * 64)
        migrate(engine)
    note(engine, AuditAction.KEY_CREATED)
    assert [(each.link, each.action, each.window) for each in shown(engine)] == [
        (3, "key.created", "keys"), (2, "tenant.created", "tenants"), (1, "tenant.created", "tenants"),
    ]  # fmt: skip
    assert (verified(engine).links, verified(engine).difference) == (3, None)
    with pytest.raises(IntegrityError, match="only added to"), engine.begin() as connection:
        connection.execute(text("UPDATE audit SET detail = '' WHERE sequence = 1"))


class HourlyClock:
    """A clock that cancels the loop after its last hour. In each hour the wall clock is ahead by that hour's value."""

    def __init__(self, *ahead_s: int) -> None:
        self._ahead_s = ahead_s
        self.hours = 0

    def monotonic_us(self) -> int:
        return self.hours * 3600 * 1_000_000

    def wall_s(self) -> int:
        return NOW_S + self.hours * 3600 + self._ahead_s[self.hours]

    async def sleep(self, seconds: float) -> None:
        assert seconds == EXPIRY_INTERVAL_S == 3600
        if self.hours + 1 == len(self._ahead_s):
            raise asyncio.CancelledError
        self.hours += 1


async def expires(path: Path, at_s: int, clock: HourlyClock) -> bool:
    """Return whether the expiry loop expires an entry of that time."""
    with closing(opened(path)) as database:
        note(database.engine, AuditAction.KEY_CREATED, at_s=at_s)
        with pytest.raises(asyncio.CancelledError):
            await AuditLog(database, clock).run()
        return any(each.expired for each in shown(database.engine))


@pytest.mark.parametrize(("hours", "is_gone"), [(1, False), (2, True)])
async def test_audit_loop_expires_entries(tmp_path: Path, hours: int, is_gone: bool) -> None:
    """The first expiry comes after one hour."""
    assert await expires(tmp_path, NOW_S - 400 * DAY_S, HourlyClock(*[0] * hours)) is is_gone


@pytest.mark.parametrize(
    ("ahead_s", "is_gone"),
    [
        pytest.param((20 * YEAR_S, 0, 0, 0), False, id="at the start"),
        pytest.param((0, 20 * YEAR_S, 0, 0), False, id="for an hour"),
        pytest.param((0, 20 * YEAR_S, 20 * YEAR_S, 20 * YEAR_S), True, id="the control: it stays so"),
    ],
)
async def test_clock_that_is_ahead_for_a_while_expires_nothing(
    tmp_path: Path, ahead_s: tuple[int, ...], is_gone: bool
) -> None:
    """Expired content is lost for good."""
    assert await expires(tmp_path, NOW_S, HourlyClock(*ahead_s)) is is_gone


async def test_one_tenants_defect_stops_no_other_expiry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of the remaining tenants still expire. An expiry of the broken tenant alone raises the error."""
    seen: list[str] = []

    def broken(connection: Connection, actor: Actor, tenant: str, now_s: int) -> int:
        seen.append(tenant)
        if tenant == "":
            raise ZeroDivisionError
        return expire(connection, actor, tenant, now_s)

    monkeypatch.setattr(audit_log, "expire", broken)
    monkeypatch.setattr(audit_log, "audited_tenants", lambda _: ["", "default"])
    with closing(opened(tmp_path)) as database:
        note(database.engine, AuditAction.KEY_CREATED)
        await AuditLog(database, SystemClock()).expire()
        assert len(seen) > 1
        with pytest.raises(ZeroDivisionError):
            await AuditLog(database, SystemClock()).expire(tenant="")
