"""Ask the store whether it can be used, and change nothing there: what `kelvin doctor` learns of it."""

import asyncio
import sys
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from blobstore.factory import opened
from blobstore.store import BlobNotFound
from contracts.errors import Refused
from service.startup import STORE_STATUS
from snapshotter.settings import SnapshotterSettings

CHECK_S: Final = 10.0


async def check_store(settings: SnapshotterSettings) -> None:
    """Ends the process with one line and STORE_STATUS where it does not answer. Raises BadSetting."""
    if not _is_made(settings.store_url):
        return  # a local one is made at the first start
    try:
        async with asyncio.timeout(CHECK_S), opened(settings.store_url, writes=False) as store:
            await store.stat("ready")
    except BlobNotFound:
        return  # it answered, which is all that was asked
    except Refused as refused:
        _end(refused.failure.message)
    except TimeoutError:
        _end(f"the store does not answer within {CHECK_S:g} s")


def _is_made(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme != "file" or Path(unquote(parts.path)).exists()


def _end(why: str) -> None:
    sys.stderr.write(f"{why}\n")
    sys.exit(STORE_STATUS)
