"""A damaged database file is refused with a clear error, and never taken for a new one. On real SQLite files."""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from controlplane.app.control_plane_services import open_services
from controlplane.app.settings import load
from controlplane.billing.price_book import default_price_book
from controlplane.clock import SystemClock
from controlplane.db.availability import CHECK_INTERVAL_S, open_when_available, watch_write_session
from controlplane.db.database import Database, open_database
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.key_rows import load_keys
from controlplane.registry.key_store import KeyStore
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.numbers import MAX_LIMIT
from kelvin.contracts.setting_parser import BadSetting
from kelvin.process.loops import LoopHealth, Loops
from tests.controlplane.builders import NOW_S


def _open(path: Path) -> Database:
    opened = asyncio.run(open_when_available(path, asyncio.Event()))
    assert opened is not None
    return opened


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Return the database file of a process that was killed in its first minute. All data is in the write-ahead log."""
    work, left = tmp_path / "work", tmp_path / "left"
    work.mkdir()
    with closing(open_database(work / "kelvin.db")) as database:
        asyncio.run(KeyStore(database, FeedHub()).bootstrap(work, NOW_S))
        shutil.copytree(work, left)
    assert (left / "kelvin.db-wal").stat().st_size
    (left / "url").write_text("https://localhost:8443\n")
    return left / "kelvin.db"


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _has_keys(path: Path) -> bool:
    with closing(_open(path)) as database, database.engine.connect() as connection:
        return len(load_keys(connection)) == 2


def test_killed_database_opens(killed: Path) -> None:
    """Control of the tests below: nothing is damaged."""
    assert _has_keys(killed)


@pytest.mark.parametrize("damage", [_empty, _zero, Path.unlink])
@pytest.mark.parametrize("has_log", [True, False])
def test_damaged_database_is_refused(killed: Path, damage: Callable[[Path], None], *, has_log: bool) -> None:
    """This holds with and without its log. The remaining files stay unchanged for a repair."""
    log = killed.with_name("kelvin.db-wal")
    if not has_log:
        open_database(killed).close()  # which moves the log's content into the file
    damage(killed)
    before = {path: path.read_bytes() for path in (killed, log) if path.exists()}
    with pytest.raises(BadSetting, match=r"kelvin\.db is (empty|damaged|missing).*: restore a backup"):
        _open(killed)
    assert {path: path.read_bytes() for path in before} == before


def test_torn_database_is_refused(killed: Path) -> None:
    open_database(killed).close()
    _tear(killed)
    with pytest.raises(BadSetting, match=r"kelvin\.db is damaged \(database disk image is malformed\)"):
        _open(killed)


def test_zeroed_log_is_refused(killed: Path) -> None:
    """SQLite would silently drop the log, and every commit since the last checkpoint."""
    _zero(killed.with_name("kelvin.db-wal"))
    with pytest.raises(BadSetting, match=r"kelvin\.db-wal is damaged: restore a backup .* or remove it"):
        _open(killed)


@pytest.mark.parametrize("damage", [_empty, _tear, Path.unlink])
def test_database_that_lost_its_first_log_is_refused(killed: Path, damage: Callable[[Path], None]) -> None:
    """It has no table and would look new. The rest of the log stays for a repair."""
    log = killed.with_name("kelvin.db-wal")
    damage(log)
    before = [path.read_bytes() if path.exists() else b"" for path in (killed, log)]
    with pytest.raises(BadSetting, match=r"kelvin\.db has no keys, as its kelvin\.db-wal .*: restore .* or remove"):
        _open(killed)
    assert [path.read_bytes() if path.exists() else b"" for path in (killed, log)] == before
    for name in ("url", "kelvin.db", "kelvin.db-wal"):
        (killed.parent / name).unlink(missing_ok=True)
    _open(killed).close()


def test_log_torn_anywhere_leaves_no_database_without_keys(killed: Path) -> None:
    """It is refused or opens with its keys. Both happen."""
    files = {path: path.read_bytes() for path in killed.parent.iterdir()}
    log = killed.with_name("kelvin.db-wal")
    outcomes: list[bool | None] = []
    for sixteenths in range(17):
        for path, content in files.items():
            path.write_bytes(content)
        log.write_bytes(files[log][: len(files[log]) * sixteenths // 16])
        try:
            outcomes.append(_has_keys(killed))
        except BadSetting:
            outcomes.append(None)
    assert set(outcomes) == {None, True}


@pytest.mark.parametrize("damage", [_empty, _tear, _zero])
def test_damaged_shared_memory_is_made_again(killed: Path, damage: Callable[[Path], None]) -> None:
    """The file holds nothing that is not in the log."""
    shared = killed.with_name("kelvin.db-shm")
    shared.write_bytes(bytes(range(256)) * 128)
    damage(shared)
    _open(killed).close()


@pytest.mark.parametrize("damage", [_empty, Path.unlink])
def test_refusal_says_how_to_begin_anew(killed: Path, damage: Callable[[Path], None]) -> None:
    """After the named files are removed, a new database opens."""
    open_database(killed).close()
    damage(killed)
    with pytest.raises(BadSetting, match=r"or remove `url` and `kelvin\.db` to begin without models, keys and bills"):
        _open(killed)
    for name in ("url", "kelvin.db"):
        (killed.parent / name).unlink(missing_ok=True)
    _open(killed).close()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("schema_version (number, name) VALUES (1000, 'a later step')", id="registry"),
        pytest.param("ledger_schema (number) VALUES (1000)", id="ledger"),
    ],
)
def test_database_of_a_newer_program_is_refused(killed: Path, step: str) -> None:
    """The error names both ways out, and what a restored backup lacks."""
    with closing(_open(killed)) as database, database.engine.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO {step}")
    ways = r"use the newer program again, or restore a backup .* which lacks later changes"
    with pytest.raises(BadSetting, match=rf"KELVIN_DATA=.*1000; this program knows \d+: {ways}"):
        _open(killed)


_VERSION = (
    "INSERT INTO versions (tenant, model, version, state, limits, architecture, weight_bytes, total_bytes, "
    "kv_bytes_per_token, max_positions, created_at_s) VALUES ('default', 'm', 'v', 'ready', "
    "'{\"max_input_tokens\":1,\"max_output_tokens\":1}', 'a', 1, 1, 1, 1, 1)"
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param("tenants SET limits = '{\"burst\":9}'", "limits of tenant default .*`burst`", id="a limit"),
        pytest.param(f"tenants SET limits = '{{\"rpm\":{MAX_LIMIT + 1}}}'", f"limits .*<= {MAX_LIMIT}", id="a bound"),
        pytest.param("models SET scale = '{\"pace\":1}'", "scale of model default/m .*`pace`", id="a scale"),
        pytest.param("models SET degradation = '{}'", "ladder of model default/m .*`steps`", id="a ladder"),
        pytest.param("keys SET scopes = scopes || ' observe'", "scopes of key .*'observe'", id="a scope"),
        pytest.param("tenants SET state = 'frozen'", "state of tenant default .*'frozen'", id="a tenant's state"),
        pytest.param("versions SET state = 'old'", "state of version default/m@v .*'old'", id="a version's state"),
    ],
)
async def test_settings_of_a_newer_program_are_refused(tmp_path: Path, change: str, named: str) -> None:
    """The error names their owner and what to do."""
    with closing(open_database(tmp_path / "kelvin.db")) as database:
        await KeyStore(database, FeedHub()).bootstrap(tmp_path, NOW_S)
        with database.engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO models (tenant, model, created_at_s) VALUES ('default', 'm', 1)")
            connection.exec_driver_sql(_VERSION)
            connection.exec_driver_sql(f"UPDATE {change}")
        refusal = rf"KELVIN_DATA=.*: the {named}.*: use the newer program"
        with pytest.raises(BadSetting, match=refusal):
            async with AsyncExitStack() as stack:
                await open_services(
                    stack, load({"KELVIN_DATA": str(tmp_path)}), SystemClock(), default_price_book(), Mock(), Mock(),
                    database, None,
                )  # fmt: skip


def test_start_that_was_killed_early_goes_on(tmp_path: Path) -> None:
    """An empty file of an installation that was never ready is a new database."""
    (tmp_path / "kelvin.db").touch()
    _open(tmp_path / "kelvin.db").close()


@pytest.mark.virtual_time
async def test_write_session_watch_survives_an_error() -> None:
    """An error in one round must not end the loop, or a session that is cut later would stay without the lock. The
    error is counted under the loop's name. An unavailable database is not counted.
    """

    class Scripted:
        """Writes end as scripted. Later ones succeed."""

        def __init__(self) -> None:
            self.ends: list[Exception] = [KeyError("a defect"), Refused(Unavailable("the database"))]
            self.writes = 0

        async def write(self, work: object, *, repeated: bool) -> None:
            self.writes += 1
            if self.ends:
                raise self.ends.pop(0)

    database, health = Scripted(), LoopHealth()
    async with Loops(health) as loops:
        loops.start("writing session", lambda: watch_write_session(database, SystemClock()))  # type: ignore[arg-type]
        await asyncio.sleep(6 * CHECK_INTERVAL_S)
    assert database.writes >= 5
    assert health.errors == {"writing session": 1}
