"""Commands about an installation on this machine: run it, restart its front door, print its logs."""

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import Final

import click

from kelvin.cli.base.api_client import CommandFailed, current_target
from kelvin.ipc.socket_directory import SocketDirectory, peer_pid
from kelvin.supervisor.hot_restart import OUTCOME_FILE
from kelvin.supervisor.log_rotation import last_lines
from kelvin.supervisor.settings import load_up

RESTART_TIMEOUT_S: Final = 180.0  # a start and a drain, unless KELVIN_ACTIVATOR_DRAIN_S is longer
POLL_S: Final = 0.05


@click.command("up")
@click.option("--port", type=click.IntRange(1, 65535), help="HTTPS port. [default: $KELVIN_PORT, else 8443]")
@click.option(
    "--store", metavar="URL", help="s3://BUCKET/PREFIX or file:///PATH. [default: $KELVIN_STORE, else in DATA]"
)
def up_command(port: int | None, store: str | None) -> None:
    """Run an installation on this machine. Ends on SIGTERM, SIGHUP or Ctrl-C."""
    from kelvin.supervisor.data_lock import AlreadyRunning, InsecureDirectory
    from kelvin.supervisor.installation_supervisor import NotReady, run_up

    data = current_target().data.absolute()
    try:
        run_up(load_up(data, port, store))
    except (AlreadyRunning, InsecureDirectory, NotReady) as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        if error.filename is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        path = Path(os.fsdecode(error.filename))
        what = f"DATA/{path.relative_to(data)}" if path.is_relative_to(data) else str(path)
        raise CommandFailed(
            f"{what} can't be written: {error.strerror}. Make room, for example by removing DATA/cache, "
            f"which is filled again from the store. DATA is {data}"
        ) from error


@click.command("restart")
@click.argument("what", type=click.Choice(["activator"]))
def restart_command(what: str) -> None:
    """Replace the front door's process under load. Returns when the old process has ended."""
    data = current_target().data
    old = _activator_pid(data)
    supervisor = _supervisor_pid(data)
    if old is None or supervisor is None:
        raise CommandFailed(f"no installation runs in {data}")
    outcome = data / "run" / OUTCOME_FILE
    outcome.unlink(missing_ok=True)  # left by an earlier restart
    os.kill(supervisor, signal.SIGUSR1)
    limit = time.monotonic() + RESTART_TIMEOUT_S
    while Path(f"/proc/{old}").exists() or (new := _activator_pid(data)) is None:
        if outcome.exists() and (reason := outcome.read_text().strip()):
            raise CommandFailed(reason)
        if _supervisor_pid(data) != supervisor:
            raise CommandFailed(f"the installation ended before the {what} was restarted")
        if time.monotonic() > limit:
            raise CommandFailed(
                f"the {what} was not restarted within {RESTART_TIMEOUT_S:.0f} s; "
                f"see the standard error of `kelvin up`, process {supervisor}"
            )
        time.sleep(POLL_S)
    click.echo(f"{what}: process {old} was replaced by {new}")


def _activator_pid(data: Path) -> int | None:
    if not (data / "run").is_dir():
        return None
    directory = SocketDirectory(data / "run")
    try:
        with directory.connect("activator.sock") as connected:
            return peer_pid(connected)
    except OSError:
        return None
    finally:
        directory.close()


def _supervisor_pid(data: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        pid = int((data / "lock").read_text())
        if b"up" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    return None


@click.command("logs")
@click.argument("process", required=False)
@click.option("--lines", default=100, type=click.IntRange(1), help="Print this many lines of each log.")
def logs_command(process: str | None, lines: int) -> None:
    """Print the last lines of one process's log, or of all logs. Example: `kelvin logs activator`."""
    directory = current_target().data / "logs"
    found = sorted(directory.glob("*.log")) if directory.is_dir() else []
    if not found:
        raise CommandFailed(f"{directory} holds no logs; is this the data directory of `kelvin up`?")
    names = [path.stem for path in found]
    if process is not None and process not in names:
        raise CommandFailed(f"process '{process}' has no log; there is: {', '.join(names)}")
    for path in found:
        if process in (None, path.stem):
            for line in last_lines(path, lines):
                click.echo(line)
