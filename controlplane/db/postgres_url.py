"""Parse the PostgreSQL URL of `KELVIN_DATABASE`. libpq reads the URL, and it never holds the password."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kelvin.contracts.numbers import parse_whole_number

SCHEME: Final = "postgresql"
RESERVED_PARAMETERS: Final = ("options", "application_name", "client_encoding", "connect_timeout", "tcp_user_timeout")


class BadPostgresUrl(ValueError):
    """The URL can't be used. The text is the rule that it breaks, and shows nothing of the URL."""


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    """A URL without a password, and the file with the password. Without a file libpq looks in its usual places."""

    url: str
    password_file: Path | None = None

    def __str__(self) -> str:
        return self.url

    def hosts(self) -> int:
        """Return how many hosts the URL names; libpq tries one after the other."""
        from psycopg import conninfo  # needs the extra `postgres`

        parts = conninfo.conninfo_to_dict(self.url)
        return max(str(parts.get(name, "")).count(",") for name in ("host", "hostaddr")) + 1

    def password(self) -> str | None:
        """Return the password, if any, read for each connection: it may change. Raises OSError, UnicodeDecodeError."""
        return None if self.password_file is None else self.password_file.read_text("utf-8").rstrip("\r\n")


def is_postgres(value: str) -> bool:
    """Return whether the value is meant as a PostgreSQL URL."""
    return value.startswith(f"{SCHEME}://")


def parse_postgres_url(url: str, password_file: Path | None = None) -> PostgresUrl:
    """Check a URL. Raises BadPostgresUrl."""
    if not is_postgres(url):
        raise BadPostgresUrl(f"must be {SCHEME}://USER@HOST:PORT/DATABASE; unset it for DATA/kelvin.db")
    try:
        from psycopg import Error, conninfo  # needs the extra `postgres`
    except ImportError:
        raise BadPostgresUrl("needs the extra `postgres`: pip install 'kelvin-serving[postgres]'") from None
    try:
        parts = conninfo.conninfo_to_dict(url)
    except Error:
        raise BadPostgresUrl("must be a URL that libpq accepts: it has a bad port, or an unknown parameter") from None
    if "password" in parts:
        raise BadPostgresUrl("must hold no password: put it in KELVIN_DATABASE_PASSWORD_FILE, or in libpq's PGPASSFILE")
    if not all(parse_whole_number(port) is not None for port in str(parts.get("port", "0")).split(",")):
        raise BadPostgresUrl("must have a number for its port")
    if lacking := [name for name in ("user", "dbname") if name not in parts]:
        raise BadPostgresUrl(f"must name its {' and '.join(lacking)}: {SCHEME}://USER@HOST:PORT/DATABASE")
    if reserved := sorted(set(RESERVED_PARAMETERS) & parts.keys()):
        raise BadPostgresUrl(f"must not set {', '.join(reserved)}: Kelvin sets that")
    return PostgresUrl(url, password_file)


def database_arguments(place: Path | PostgresUrl) -> tuple[str, ...]:
    """Return a database as arguments of a program, without the password: any user of the machine may read them."""
    if isinstance(place, PostgresUrl) and place.password_file is not None:
        return place.url, str(place.password_file)
    return (str(place),)


def parse_database_arguments(words: Sequence[str]) -> Path | PostgresUrl:
    """Parse the arguments that `database_arguments` made. Raises BadPostgresUrl."""
    database, *file = words
    return parse_postgres_url(database, *map(Path, file)) if is_postgres(database) else Path(database)
