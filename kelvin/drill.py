"""`kelvin drill`: break an installation of its own and time the way back, in a process of its own."""

import subprocess
import sys

import click


@click.group("drill")
def drill_command() -> None:
    """Show that what the documentation states holds on this machine. Touches no installation of yours."""


@drill_command.command("recovery", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def recovery_command(arguments: tuple[str, ...]) -> None:
    """Lose the database, then the whole data directory; restore, and compare the bill (see --help)."""
    command = [sys.executable, "-m", "coldstart_bench", "recovery", *arguments]
    raise SystemExit(subprocess.run(command, check=False).returncode)
