"""`kelvin cache`: a tenant's cache agent on a node, for all of its pods there."""

import os
import sys
from pathlib import Path

import click

from kelvin.runtime import label
from kelvin.settings import agent_environment


@click.command("cache")
@click.option("--tenant", required=True, callback=label, help="Whose versions it lends, and nobody else's.")
@click.option("--store", metavar="URL", help="s3://BUCKET/PREFIX or file:///PATH. [default: $KELVIN_STORE]")
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="What it keeps; runtimes find it by DATA/run.",
)
def cache_command(tenant: str, store: str | None, data: Path) -> None:
    """Keep a tenant's versions on this node, for every `kelvin runtime --cache DATA/run`, until SIGTERM."""
    environment = agent_environment(data, tenant, store)
    os.execve(sys.executable, [sys.executable, "-m", "weightcache"], environment)  # noqa: S606
