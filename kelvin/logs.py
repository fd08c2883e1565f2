"""`kelvin logs [PROCESS]`: the JSON logs of this machine's processes."""

import click

from kelvin.client import DoorClosed, target
from kelvin.tail import last_lines


@click.command("logs")
@click.argument("process", required=False)
@click.option("--lines", default=100, type=click.IntRange(1), help="Lines from the end of each log.")
def logs_command(process: str | None, lines: int) -> None:
    """Print the last lines of one process's log, or of all."""
    directory = target().data / "logs"
    found = sorted(directory.glob("*.log")) if directory.is_dir() else []
    if not found:
        raise DoorClosed(f"{directory} holds no logs; is this the data directory of `kelvin up`?")
    names = [path.stem for path in found]
    if process is not None and process not in names:
        raise DoorClosed(f"process '{process}' has no log; there is: {', '.join(names)}")
    for path in found:
        if process in (None, path.stem):
            for line in last_lines(path, lines):
                click.echo(line)
