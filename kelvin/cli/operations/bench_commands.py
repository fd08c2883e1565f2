"""`kelvin bench` and `kelvin drill` replace this process by the bench, so that the command line is not measured."""

import os
import sys
from collections.abc import Mapping
from typing import Final

import click

from kelvin.process.python_command import python_command

BENCHES: Final[Mapping[str, str]] = {
    "floor": "Measure what this machine can do at most",
    "load": "Time loading all weights, beside other loaders",
    "cold": "Time the first token from zero",
    "pool": "Time the first token of new and waiting pods",
    "storm": "Load many models at once on several agents",
    "front": "Time what the front door adds to a request",
    "burst": "Send a thousand requests to a model at zero",
    "flood": "Time a quiet tenant's wait beside a loud one",
    "overload": "Send more load than the replicas can serve",
    "fleet": "Measure the cost of ten thousand idle models",
    "soak": "Run load while processes die and clocks step",
    "trace": "Replay a published trace as a load",
    "integrity": "Damage chunks: are they healed or refused?",
    "ledger": "Bill a month of many requests, and verify it",
}


@click.group("bench")
def bench_command() -> None:
    """Measure Kelvin on this machine. Floors and rivals are measured in the same run."""


def _bench_passthrough(name: str, what: str) -> click.Command:
    """Return a command that passes all its arguments to the bench, `--help` too."""

    def run(arguments: tuple[str, ...]) -> None:
        words = python_command("coldstart_bench", name, *arguments)
        os.execv(sys.executable, words)  # noqa: S606 - a signal to the command then reaches the bench itself

    return click.Command(
        name,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        callback=run,
        help=f"{what}.",
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
    )


for _name, _what in BENCHES.items():
    bench_command.add_command(_bench_passthrough(_name, _what))


@click.group("drill")
def drill_command() -> None:
    """Show that the documented recovery works here. Touches no installation of yours."""


drill_command.add_command(
    _bench_passthrough("recovery", "Lose the database, then the data directory; restore, and compare the bill")
)
