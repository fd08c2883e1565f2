"""`python -m snapshotter`: the process of the push API.

Where it only checks, it asks the store whether it can be used, and changes nothing there: `kelvin doctor` learns of the
store by it.
"""

import asyncio
import os
import sys
from typing import Final

from kelvin.blobstore.blob_store import BlobNotFound
from kelvin.blobstore.s3_location import SETTING
from kelvin.blobstore.store_factory import directory_of, open_checked_store
from kelvin.contracts.errors import Refused
from kelvin.contracts.setting_parser import BadSetting
from kelvin.process.hardening import protect_memory
from kelvin.process.log import configure_logging
from kelvin.process.service_lifecycle import run_service
from kelvin.process.settings import log_level
from kelvin.process.startup import STORE_STATUS, only_checks, refusing_bad_settings
from snapshotter.app.settings import SnapshotterSettings, from_environment

CHECK_S: Final = 10.0


async def check_store(settings: SnapshotterSettings) -> None:
    """Ends the process with one line and STORE_STATUS where it does not answer. Raises BadSetting."""
    try:
        if not _is_made(settings.store_url):
            return
        async with asyncio.timeout(CHECK_S), open_checked_store(settings.store_url, writes=False) as store:
            await store.stat("ready")
    except BlobNotFound:
        return  # it answered, which is all that was asked
    except Refused as refused:
        _end(refused.failure.message)
    except TimeoutError:
        _end(f"the store does not answer within {CHECK_S:g} s")
    except OSError as error:
        _end(f"the store's directory can't be used: {error.strerror or error}")


def _is_made(url: str) -> bool:
    """Return False if the store is a directory that the first start will make. Raises BadSetting if no start can use it
    and OSError if the disk fails.
    """
    directory = directory_of(url)
    if directory is None:
        return True
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        why = "it can't be written" if there == directory else f"it can't be created in {there}"
        raise BadSetting(SETTING, url, f"must be a directory that can be used: {why}")
    return there == directory


def _end(why: str) -> None:
    sys.stderr.write(f"{why}\n")
    sys.exit(STORE_STATUS)


def main() -> None:
    """Run until SIGTERM or the supervisor's end; exits with 2 for a bad setting."""
    with refusing_bad_settings():
        configure_logging("snapshotter", log_level())
        protect_memory()  # it has the key that signs seals
        settings = from_environment()
        if only_checks():
            asyncio.run(check_store(settings))
            return
        from snapshotter.app.app import serve  # a check needs none of it

        run_service(lambda stop: serve(settings, stop), settings.lifeline_fd)


if __name__ == "__main__":
    main()
