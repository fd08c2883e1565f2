"""An activator looks once, at its start, for records that others left. At a restart the old one still serves then: what
it can't ship before it ends is in no bill until some later activator starts.
"""

import asyncio
from pathlib import Path

from activator.app import PREFIX, RECOVER_AGAIN_S, ship_leftovers
from spool import Post, recover
from tests.simulation.undone import Undoing

WORLD = "door"
SIGN = r"^no_record_is_lost_or_doubled: \d+ records of activator-\d+ were not shipped"


async def _ship_leftovers(spools: Path, post: Post) -> None:
    while any(each.remaining for each in await recover(spools, lambda source: post if PREFIX in source else None)):
        await asyncio.sleep(RECOVER_AGAIN_S)
    await asyncio.Event().wait()


def undo(undoing: Undoing) -> None:
    undoing.function(ship_leftovers, _ship_leftovers)
