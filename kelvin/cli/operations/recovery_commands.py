"""`kelvin backup` and `kelvin restore`: save and restore the registry, ledger and keys of this machine's installation.

The control plane owns the format of backups. While it runs, it makes the backup itself; otherwise its programs do.
"""

import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import click
import httpx
import msgspec

from kelvin.cli.base.api_client import CommandFailed, current_target, failure_of_response
from kelvin.contracts.accounting.backup_reports import SUFFIX, RestoreReport
from kelvin.contracts.wire import decode
from kelvin.doctor.secret_checks import is_running
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.atomic_file import pending_file
from kelvin.process.hardening import protect_memory
from kelvin.process.python_command import python_command
from kelvin.supervisor.data_lock import AlreadyRunning, InsecureDirectory, data_lock
from kelvin.supervisor.settings import has_postgres

OUTPUT_TIMEOUT_S: Final = 600.0  # no byte arrives while the database is copied
MISSING_EXIT: Final = 2
_STDOUT: Final = Path("-")
_DATABASE_SET_HINT: Final = (
    "KELVIN_DATABASE is set: nothing was restored. A backup holds a kelvin.db, and the control plane would not use it. "
    "Bring that PostgreSQL back by pg_restore, or from its archive. To put the backup's rows into an empty one name it "
    "by `--database`. For an installation with a kelvin.db of its own unset KELVIN_DATABASE (`--check` looks at a "
    "backup all the same)"
)
_NOT_RUNNING_HINT: Final = (
    "KELVIN_DATABASE is set, and nothing runs: pg_dump, or the archive of that PostgreSQL, backs it up. For an "
    "installation with a kelvin.db of its own unset KELVIN_DATABASE"
)
T = TypeVar("T")

_PIECE: Final = 1 << 20


@click.command("backup")
@click.argument("to", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def backup_command(to: Path, as_json: bool) -> None:
    """Back up registry, ledger and keys.

    FILE is a file, a directory, or `-`. The installation may run or be stopped. The backup holds secrets (the first two
    API keys and the CA's key), so its mode is 0600. The bytes of versions are not in it.
    """
    protect_memory()
    if to == _STDOUT:
        if sys.stdout.isatty():
            raise click.UsageError("a backup is no text: send it to a file or a program")
        # With PYTHONUNBUFFERED `sys.stdout.buffer` ignores a short write, as on a full disk.
        try:
            with open(sys.stdout.fileno(), "wb", closefd=False) as file:
                size, digest = _copy_output(file)
        except OSError as error:
            raise CommandFailed(f"standard output can't be written: {error.strerror}") from error
    else:
        to = to / _backup_name() if to.is_dir() else to
        try:
            with pending_file(to, 0o600) as draft:
                size, digest = _copy_output(draft.file)
                draft.commit()
        except OSError as error:
            raise CommandFailed(f"{to} can't be written: {error.strerror}") from error
    summary = {"file": str(to), "bytes": size, "sha256": digest}
    if as_json:
        click.echo(json.dumps(summary), err=to == _STDOUT)
    else:
        click.echo(f"{to}: {size} bytes, sha256 {digest}", err=True)


def _backup_name() -> str:
    return f"kelvin-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}{SUFFIX}"


def _copy_output(file: BinaryIO) -> tuple[int, str]:
    """Write the backup. Return its size and digest. Raises CommandFailed if it was cut short."""
    data = current_target().data.absolute()
    size, digest = 0, hashlib.sha256()
    for piece in _backup_running(data) if is_running(data) else _backup_stopped(data):
        file.write(piece)
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()


def _backup_stopped(data: Path) -> Iterator[bytes]:
    if has_postgres():
        raise CommandFailed(_NOT_RUNNING_HINT)
    if not (data / "kelvin.db").is_file():  # checked first: create no lock file in a foreign directory
        raise CommandFailed(f"nothing runs in {data}, and it holds no kelvin.db")
    try:
        with data_lock(data) as lock:
            yield from run_for_output(
                "controlplane.backup.backups", [str(data)], otherwise="no backup was made", locks=[lock]
            )
    except AlreadyRunning as error:
        raise CommandFailed(
            f"{error}, and its control plane does not answer: `kelvin logs controlplane` says why"
        ) from error
    except OSError as error:
        raise CommandFailed(f"{data} can't be used: {error.strerror}") from error


def _backup_running(data: Path) -> Iterator[bytes]:
    with contextlib.closing(SocketDirectory(data / "run")) as directory:
        transport = httpx.HTTPTransport(uds=directory.address("control.sock"))
        with (
            httpx.Client(transport=transport, timeout=OUTPUT_TIMEOUT_S, base_url="http://control") as control,
            control.stream("GET", "/internal/v1/backup") as answer,
        ):
            if answer.status_code != 200:
                has_reason = answer.status_code < 500 or answer.status_code == HTTPStatus.INSUFFICIENT_STORAGE
                logged = "" if has_reason else "; `kelvin logs controlplane` says why"
                answer.read()
                raise CommandFailed(failure_of_response(answer).message + logged)
            yield from answer.iter_raw()


@click.command("restore")
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.option("--check", is_flag=True, help="Only verify the backup; don't touch the data directory.")
@click.option("--replace", is_flag=True, help="Move existing data aside; store, spools and caches stay.")
@click.option("--accept-unsound", is_flag=True, help="Accept a ledger or audit log whose chain does not verify.")
@click.option(
    "--database",
    metavar="URL",
    help="Restore into this empty database instead: postgresql://USER@HOST:PORT/DATABASE, or a file's name.",
)
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with only the database's password. [default: libpq's usual places]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def restore_command(
    context: click.Context,
    source: Path,
    check: bool,
    replace: bool,
    accept_unsound: bool,
    database: str | None,
    password_file: Path | None,
    as_json: bool,
) -> None:
    """Restore a backup into a new data directory.

    SOURCE is a backup file, or the directory of scheduled backups, whose journal is then replayed as well. Every digest
    and the ledger's chain are verified before anything is written. Exits with 2 if journal entries are missing or spool
    records can't be read: the rest was restored, and the bill lacks those.
    """
    protect_memory()
    options = [word for word, is_set in (("--replace", replace), ("--accept-unsound", accept_unsound)) if is_set]
    if database is not None:
        if check or replace:
            raise click.UsageError("--database is for an empty one: it goes with neither --check nor --replace")
        options += ["--database", database]
        options += [] if password_file is None else ["--password-file", str(password_file.absolute())]
    elif password_file is not None:
        raise click.UsageError("--password-file is for --database")
    elif has_postgres() and not check:
        raise CommandFailed(_DATABASE_SET_HINT)
    if check or database is not None:
        report = _restore([str(source.absolute()), *options])
    else:
        data = current_target().data.absolute()
        try:
            with data_lock(data, keeps_secrets=True) as lock:
                check_stopped(data)
                report = _restore([str(source.absolute()), str(data), *options], lock)
        except (AlreadyRunning, InsecureDirectory) as error:
            raise CommandFailed(str(error)) from error
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        _print_report(report, check)
    for reason in report.passed_over:
        click.echo(f"passed over: {reason}", err=True)
    if report.unreadable:
        records = f"{report.unreadable} records of its spools can't be read by this program"
        click.echo(f"the ledger is not whole: {records}", err=True)
    if report.missing != 0:
        lost = "the journal behind it is gone" if report.missing is None else f"{report.missing} entries are missing"
        click.echo(f"the ledger is not whole: {lost}", err=True)
        if source.is_file():
            again = "--replace`" if database is None else "--database` into another empty one"
            click.echo(
                f"they are in its journal: `kelvin restore {source.absolute().parent} {again} enters them, too",
                err=True,
            )
    if report.missing != 0 or report.unreadable:
        context.exit(MISSING_EXIT)


def _restore(arguments: list[str], *locks: int) -> RestoreReport:
    return run_for_report(
        "controlplane.backup.restore_program", arguments, RestoreReport, otherwise="nothing was restored", locks=locks
    )


def _print_report(report: RestoreReport, check: bool) -> None:
    made = datetime.fromtimestamp(report.made_at_us / 1e6, UTC)
    links = sum(chain.links for chain in report.chains)
    click.echo(f"{Path(report.source).name}: made at {made:%Y-%m-%d %H:%M:%S} UTC, every digest is right")
    click.echo(f"ledger: {links:,} rows in {len(report.chains)} chains, {'all hold' if report.sound else 'NOT SOUND'}")
    click.echo(f"entered: {report.unshipped} records of its spools, {report.replayed} entries of the journal")
    entries = sum(chain.links for chain in report.audits)
    click.echo(f"audit: {entries:,} entries in {len(report.audits)} chains")
    click.echo(f"registry: {report.keys} keys, {len(report.versions)} versions")
    if check:
        click.echo("nothing was put in place")
        return
    if report.database is not None:
        click.echo(f"in place: every row, in {report.database}")
        if "://" in report.database:
            click.echo(f"next: `kelvin up` with KELVIN_DATABASE={report.database}, and `kelvin billing verify`")
        return
    click.echo(f"in place: {', '.join(report.placed)}")
    if report.aside is not None:
        click.echo(f"what was there: {report.aside}")
    click.echo(
        "next: `kelvin up`, `kelvin billing verify` and `kelvin fsck`; where the store is lost, put it back first"
    )


def run_for_report(
    module: str, arguments: Sequence[str], kind: type[T], *, otherwise: str, locks: Sequence[int] = ()
) -> T:
    """Run a module and return the report that it prints. If it fails, raise CommandFailed: `otherwise`, and its last
    line. The program inherits `locks` (descriptors) and holds them until it ends, even if this process is killed.
    """
    command = python_command(module, *arguments)
    done = subprocess.run(command, capture_output=True, check=False, pass_fds=locks)
    _check_ended(done.returncode, done.stderr, otherwise)
    return decode(done.stdout, kind, field=f"report of {module}")


def run_for_output(
    module: str, arguments: Sequence[str], *, otherwise: str, locks: Sequence[int] = ()
) -> Iterator[bytes]:
    """Run a module and yield its output as it arrives. Raises as `run_for_report`, at the end."""
    command = python_command(module, *arguments)
    with (
        tempfile.TemporaryFile() as errors,  # not a pipe: it is read only at the end, and a full pipe would block
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, pass_fds=locks) as process,
    ):
        assert process.stdout is not None
        while piece := process.stdout.read(_PIECE):
            yield piece
        status = process.wait()
        errors.seek(0)
        _check_ended(status, errors.read(), otherwise)


def _check_ended(status: int, errors: bytes, otherwise: str) -> None:
    if status != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["it printed no error"]
        raise CommandFailed(f"{otherwise}: {lines[-1]}")


def check_stopped(data: Path) -> None:
    """Raise CommandFailed if a control plane runs in `data`. Started without a supervisor, it holds no lock there."""
    if is_running(data):
        raise CommandFailed(f"a control plane runs in {data}: stop it first")
