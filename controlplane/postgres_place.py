"""Where a PostgreSQL is, as `KELVIN_DATABASE` says it. libpq reads the URL, and its password is never part of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from contracts.numbers import whole_number

SCHEME: Final = "postgresql"
OURS: Final = ("options", "application_name", "client_encoding", "connect_timeout", "tcp_user_timeout")


class BadPlace(ValueError):
    """Not a place to be used; the text is the rule, and shows nothing of what was given."""


@dataclass(frozen=True, slots=True)
class PostgresPlace:
    """A URL without a password, and the file that holds one; without a file libpq looks where it always does."""

    url: str
    password_file: Path | None = None

    def __str__(self) -> str:
        return self.url

    def hosts(self) -> int:
        """Return how many hosts the URL names; libpq tries one after the other."""
        from psycopg import conninfo  # an extra, and only who names a PostgreSQL needs it

        parts = conninfo.conninfo_to_dict(self.url)
        return max(str(parts.get(name, "")).count(",") for name in ("host", "hostaddr")) + 1

    def password(self) -> str | None:
        """Read anew for each connection, so that it can be changed. Raises OSError, UnicodeDecodeError."""
        return None if self.password_file is None else self.password_file.read_text("utf-8").rstrip("\r\n")


def is_postgres(value: str) -> bool:
    """Whether it is meant as such a URL."""
    return value.startswith(f"{SCHEME}://")


def parse_place(url: str, password_file: Path | None = None) -> PostgresPlace:
    """Raises BadPlace."""
    if not is_postgres(url):
        raise BadPlace(f"must be {SCHEME}://USER@HOST:PORT/DATABASE; unset it for DATA/kelvin.db")
    try:
        from psycopg import Error, conninfo  # an extra, and only who names a PostgreSQL needs it
    except ImportError:
        raise BadPlace("needs the extra `postgres`: pip install 'kelvin-serving[postgres]'") from None
    try:
        parts = conninfo.conninfo_to_dict(url)
    except Error:
        raise BadPlace("must be a URL that libpq takes: a wrong port, or a parameter that it does not know") from None
    if "password" in parts:
        raise BadPlace("must hold no password: put it in KELVIN_DATABASE_PASSWORD_FILE, or in libpq's PGPASSFILE")
    if not all(whole_number(port) is not None for port in str(parts.get("port", "0")).split(",")):
        raise BadPlace("must have a number for its port")
    if lacking := [name for name in ("user", "dbname") if name not in parts]:
        raise BadPlace(f"must name its {' and '.join(lacking)}: {SCHEME}://USER@HOST:PORT/DATABASE")
    if taken := sorted(set(OURS) & parts.keys()):
        raise BadPlace(f"must not set {', '.join(taken)}: that is set here")
    return PostgresPlace(url, password_file)


def words_of(place: Path | PostgresPlace) -> tuple[str, ...]:
    """A database as arguments of a program: anybody on the machine may read them."""
    if isinstance(place, PostgresPlace) and place.password_file is not None:
        return place.url, str(place.password_file)
    return (str(place),)


def place_of(words: Sequence[str]) -> Path | PostgresPlace:
    """The way back. Raises BadPlace."""
    database, *file = words
    return parse_place(database, *map(Path, file)) if is_postgres(database) else Path(database)
