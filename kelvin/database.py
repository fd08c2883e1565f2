"""`kelvin database copy`: from a stopped installation's kelvin.db to a PostgreSQL.

What is copied, and how it is proved, is the control plane's: a program of it does that.
"""

import json
from pathlib import Path

import click
import msgspec

from contracts.backup import CopyReport
from kelvin.client import DoorClosed, target
from kelvin.program import check_stopped, reported
from kelvin.supervisor.lock import AlreadyRunning, data_lock
from service.private import keep_secrets


@click.group("database")
def database_command() -> None:
    """The control plane's database: registry, tenants, keys, audit and ledger."""


@database_command.command("copy")
@click.option(
    "--to", "url", required=True, metavar="URL", help="postgresql://USER@HOST:PORT/DATABASE, which must be empty."
)
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Holds its password, alone. [default: libpq looks where it always does]",
)
@click.option("--accept-unsound", is_flag=True, help="Also a ledger or an audit whose chain does not verify.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def copy_command(url: str, password_file: Path | None, accept_unsound: bool, as_json: bool) -> None:
    """Copy the kelvin.db of a stopped installation into an empty PostgreSQL, for KELVIN_DATABASE.

    Every row is compared and every chain verified there, before any of it counts. What was cut has done nothing: run
    it again. The kelvin.db stays as it is.
    """
    keep_secrets()
    data = target().data.absolute()
    if not (data / "kelvin.db").is_file():  # before a lock is made in a directory that is none of ours
        raise DoorClosed(f"{data} holds no kelvin.db")
    files = [] if password_file is None else [str(password_file.absolute())]
    options = ["--accept-unsound"] if accept_unsound else []
    try:
        with data_lock(data) as lock:
            check_stopped(data)
            report = reported(
                "controlplane.database_copy",
                [str(data), url, *files, *options],
                CopyReport,
                otherwise="nothing was copied",
                locks=[lock],
            )
    except AlreadyRunning as error:
        raise DoorClosed(f"{error}: stop it first") from error
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(report), indent=2))
        return
    links, entries = sum(each.links for each in report.chains), sum(each.links for each in report.audits)
    holds = "all hold" if report.sound else "NOT SOUND, as they were"
    click.echo(f"{report.rows:,} rows of {len(report.tables)} tables are in {report.database}, each as it was")
    click.echo(
        f"ledger: {links:,} rows in {len(report.chains)} chains, audit: {entries:,} in {len(report.audits)}: {holds}"
    )
    click.echo(f"next: `kelvin up` with KELVIN_DATABASE={report.database}; nobody looks at {data}/kelvin.db any more")
