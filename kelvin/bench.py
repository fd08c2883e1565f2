"""`kelvin bench`: runs the benchmarks in a process of their own, so that nothing of the command line is measured."""

import subprocess
import sys

import click


@click.group("bench")
def bench_command() -> None:
    """Measure this machine; every figure beside a floor of the same run."""


@bench_command.command("cold", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def cold_command(arguments: tuple[str, ...]) -> None:
    """First token from zero (see --help)."""
    _run("cold", *arguments)


@bench_command.command("ledger", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def ledger_command(arguments: tuple[str, ...]) -> None:
    """A month of many requests: its bill and its proofs (see --help)."""
    _run("ledger", *arguments)


def _run(*words: str) -> None:
    raise SystemExit(subprocess.run([sys.executable, "-m", "coldstart_bench", *words], check=False).returncode)
