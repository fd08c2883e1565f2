"""`kelvin bench` and `kelvin drill` become a process of their own, so that nothing of the command line is measured."""

import os
import sys
from collections.abc import Mapping
from typing import Final

import click

from kelvin.process.python_command import python_command

BENCHES: Final[Mapping[str, str]] = {
    "floor": "What this machine can do at most",
    "load": "Bytes until every one was read, beside other loaders",
    "cold": "First token from zero",
    "pool": "First token by the start of a pod, and by one that waited",
    "storm": "Many models missing at once at several cache agents",
    "front": "What the front door adds to a request, beside nginx and others",
    "burst": "A thousand requests at once for a model at zero",
    "flood": "A quiet tenant's wait while another one asks a thousand times",
    "overload": "More load than the replicas can do: what is answered, who is refused",
    "fleet": "Ten thousand models, few of them in use: what each of them costs",
    "soak": "Load while processes die, clients stall and the clock is stepped",
    "trace": "A published trace as a load, and how close it came",
    "integrity": "Damaged chunks: healed, refused, or served",
    "ledger": "A month of many requests: its bill and its proofs",
}


@click.group("bench")
def bench_command() -> None:
    """Measure Kelvin on this machine, beside floors and rivals of the same run where there are any."""


def _bench_passthrough(name: str, what: str) -> click.Command:
    """A command whose words are the bench's own, `--help` too."""

    def run(arguments: tuple[str, ...]) -> None:
        words = python_command("coldstart_bench", name, *arguments)
        os.execv(sys.executable, words)  # noqa: S606 - who ends the command ends the bench, and waits for its end

    return click.Command(
        name,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        callback=run,
        help=f"{what} (see --help).",
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
    )


for _name, _what in BENCHES.items():
    bench_command.add_command(_bench_passthrough(_name, _what))


@click.group("drill")
def drill_command() -> None:
    """Show that what the documentation states holds on this machine. Touches no installation of yours."""


drill_command.add_command(
    _bench_passthrough("recovery", "Lose the database, then the whole data directory; restore, and compare the bill")
)
