"""`kelvin engine`: what judges pushes, beside a snapshotter that has no installation of one machine around it."""

import sys
from pathlib import Path

import click

from kelvin.client import DoorClosed
from kelvin.settings import load_engine
from kelvin.supervisor.lock import AlreadyRunning


@click.command("engine")
@click.option(
    "--store", metavar="URL", help="The snapshotter's: s3://BUCKET/PREFIX or file:///PATH. [default: $KELVIN_STORE]"
)
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="What it keeps; the snapshotter finds it by $KELVIN_ENGINE, which is DATA/run.",
)
def engine_command(store: str | None, data: Path) -> None:
    """Gate and seal what a snapshotter is pushed, until SIGTERM. Nothing is served."""
    from kelvin.supervisor.engine import run_engine

    try:
        status = run_engine(load_engine(data, store))
    except AlreadyRunning as error:
        raise DoorClosed(str(error)) from error
    sys.exit(status)
