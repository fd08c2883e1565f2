"""The URL of a PostgreSQL: what it may contain, libpq's TLS modes, and a password that is never shown."""

import asyncio
import ssl
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from controlplane.app.settings import load
from controlplane.db.availability import open_when_available
from controlplane.db.database import Database, disposing, reading_engine
from controlplane.db.postgres_url import PostgresUrl, database_arguments, parse_database_arguments
from kelvin.contracts.setting_parser import BadSetting
from tests.controlplane.postgres_server import USER, PostgresServer, database_name
from tests.controlplane.postgres_wire import PostgresProxy
from tests.kelvin.crypto.pki import Authority


def uses_tls(place: PostgresUrl) -> bool:
    """Return whether a session is encrypted."""
    with disposing(reading_engine(place)) as engine, engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        return bool(driver.pgconn.ssl_in_use)


@pytest.mark.parametrize(
    ("mode", "trusted", "answers"),
    [
        pytest.param("verify-full", "one", True, id="verified by name"),
        pytest.param("require", None, True, id="not verified"),
        pytest.param("verify-full", "other", False, id="signed by another authority"),
        pytest.param("verify-full", None, False, id="no trusted authority"),
    ],
)
def test_postgres_tls_modes(
    postgres: PostgresServer, place: PostgresUrl, tmp_path: Path, mode: str, trusted: str | None, answers: bool
) -> None:
    """The modes are libpq's. If the server has no TLS, only `disable` and `prefer` connect."""
    one, other = Authority(), Authority("other")
    pair = one.sign(name="localhost")
    (tmp_path / "pair.pem").write_bytes(pair.certificate + pair.key)
    (tmp_path / "one.pem").write_bytes(one.pem)
    (tmp_path / "other.pem").write_bytes(other.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pair.pem")
    roots = tmp_path / f"{trusted}.pem"  # a missing file if no authority is trusted
    more = f"&sslmode={mode}&sslrootcert={roots if mode != 'require' else '/none'}"
    with PostgresProxy(postgres.directory, context) as wire:
        if answers:
            assert uses_tls(wire.place(database_name(place), more))
        else:
            with pytest.raises(OperationalError, match="certificate"):
                uses_tls(wire.place(database_name(place), more))
    with PostgresProxy(postgres.directory) as wire:
        with pytest.raises(OperationalError, match=r"SSL|certificate"):
            uses_tls(wire.place(database_name(place), more))
        assert not uses_tls(wire.place(database_name(place), "&sslmode=prefer"))


SECRET = "hunter2"


async def test_the_password_comes_from_a_file_and_is_shown_nowhere(
    postgres: PostgresServer, place: PostgresUrl, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is read for each session. The password is in no error, log, `repr` or argument of another process."""
    file = tmp_path / "password"
    kept = PostgresUrl(place.url, file)

    stop = asyncio.Event()
    opening = asyncio.create_task(open_when_available(kept, stop))
    async with asyncio.timeout(60):
        while "can't be read" not in caplog.text and not caplog.records:
            await asyncio.sleep(0.005)
    file.write_text(f"{SECRET}\n")
    database = await asyncio.wait_for(opening, 60)
    assert isinstance(database, Database)
    driver = database.engine.raw_connection()
    assert driver.driver_connection is not None
    assert driver.driver_connection.info.password == SECRET
    driver.close()
    shown = [repr(database), repr(kept), str(kept), *database_arguments(kept), caplog.text, *map(repr, caplog.records)]
    assert SECRET not in " ".join(shown)
    database.close()
    assert parse_database_arguments(database_arguments(kept)) == kept
    assert parse_database_arguments(database_arguments(place)) == place
    assert parse_database_arguments((str(tmp_path),)) == tmp_path


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        pytest.param(f"postgresql://u:{SECRET}@h/d", "must hold no password", id="a password"),
        pytest.param(f"postgresql://u@h/d?password={SECRET}", "must hold no password", id="a password parameter"),
        pytest.param("postgresql://u@h:port/d", "a number for its port", id="a bad port"),
        pytest.param("postgresql://u@[h/d", "a URL that libpq accepts", id="not a URL"),
        pytest.param(f"postgresql://u@h/d?hunter={SECRET}", "a URL that libpq accepts", id="an unknown parameter"),
        pytest.param("postgresql://h/d", "must name its user", id="no user"),
        pytest.param("postgresql://u@h", "must name its dbname", id="no database"),
        pytest.param("postgresql://u@h/d?options=-c", "must not set options", id="options"),
        pytest.param(f"mysql://u:{SECRET}@h/d", "must be postgresql://", id="another database"),
        pytest.param("/data/kelvin.db", "must be postgresql://", id="a file"),
    ],
)
def test_invalid_postgres_url_is_refused(url: str, rule: str) -> None:
    """The error names the rule, and shows only the scheme of the URL."""
    with pytest.raises(BadSetting, match=f"^KELVIN_DATABASE=.*: .*{rule}") as refused:
        load({"KELVIN_DATA": "/d", "KELVIN_DATABASE": url})
    assert SECRET not in str(refused.value)


def test_postgres_settings() -> None:
    """Without a URL the database is a file. Scheduled backups need that file."""
    url = f"postgresql://{USER}@h:5433/d?sslmode=verify-full"
    assert load({"KELVIN_DATA": "/d"}).database == load({"KELVIN_DATA": "/d", "KELVIN_DATABASE": ""}).database
    with_file = {"KELVIN_DATA": "/d", "KELVIN_DATABASE": url, "KELVIN_DATABASE_PASSWORD_FILE": "/secrets/p"}
    assert load(with_file).database == PostgresUrl(url, Path("/secrets/p"))
    with pytest.raises(BadSetting, match=r"KELVIN_DATABASE_PASSWORD_FILE=p: must be an absolute path"):
        load({**with_file, "KELVIN_DATABASE_PASSWORD_FILE": "p"})
    with pytest.raises(BadSetting, match=r"KELVIN_BACKUP=/b: is for DATA/kelvin\.db"):
        load({**with_file, "KELVIN_BACKUP": "/b"})


@pytest.mark.parametrize("content", [None, b"k\xffy"], ids=["missing", "no UTF-8"])
def test_empty_password_file_refuses_database_calls(tmp_path: Path, content: bytes | None) -> None:
    """Calls are refused until the file is right."""
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    there = PostgresUrl(f"postgresql://{USER}@127.0.0.1:1/d", file)
    with disposing(reading_engine(there)) as engine, pytest.raises(OperationalError):
        engine.connect()
