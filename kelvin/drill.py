"""`kelvin drill`: break an installation of its own and time the way back, as the process that this one becomes."""

import os
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
    os.execv(sys.executable, command)  # noqa: S606 - who ends the command ends the drill, and waits for its end
