"""Run the process of the push API: `python -m snapshotter`.

In check mode it only tests whether the store is usable, and changes nothing there. `kelvin doctor` uses that.
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
from kelvin.process.startup import STORE_STATUS, exit_on_bad_setting, is_check_only
from snapshotter.app.settings import SnapshotterSettings, from_environment

CHECK_TIMEOUT_S: Final = 10.0


async def check_store(settings: SnapshotterSettings) -> None:
    """Exit with one line and STORE_STATUS unless the store answers. Raises BadSetting."""
    try:
        if not _exists(settings.store_url):
            return
        async with asyncio.timeout(CHECK_TIMEOUT_S), open_checked_store(settings.store_url, writes=False) as store:
            await store.stat("ready")
    except BlobNotFound:
        return  # the store answered
    except Refused as refused:
        _exit(refused.failure.message)
    except TimeoutError:
        _exit(f"the store does not answer within {CHECK_TIMEOUT_S:g} s")
    except OSError as error:
        _exit(f"the store's directory can't be used: {error.strerror or error}")


def _exists(url: str) -> bool:
    """Return False if the store is a directory that the first start will create. Raises BadSetting if no start can use
    it, and OSError if the disk fails.
    """
    directory = directory_of(url)
    if directory is None:
        return True
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        why = "it can't be written" if existing == directory else f"it can't be created in {existing}"
        raise BadSetting(SETTING, url, f"must be a usable directory: {why}")
    return existing == directory


def _exit(reason: str) -> None:
    sys.stderr.write(f"{reason}\n")
    sys.exit(STORE_STATUS)


def main() -> None:
    """Run until SIGTERM or the supervisor's end. Exits with 2 for a bad setting."""
    with exit_on_bad_setting():
        configure_logging("snapshotter", log_level())
        protect_memory()  # it has the key that signs seals
        settings = from_environment()
        if is_check_only():
            asyncio.run(check_store(settings))
            return
        from snapshotter.app.app import serve  # not needed for a check

        run_service(lambda stop: serve(settings, stop), settings.lifeline_fd)


if __name__ == "__main__":
    main()
