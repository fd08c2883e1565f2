"""The standby lock has one holder, which alone may bind standbys. Its death releases the lock."""

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kelvin.contracts.errors import Refused
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.standby_lock import acquire_standby_lock, try_acquire_standby_lock

HOLDER = """
import pathlib, sys, threading
from kelvin.ipc.standby_lock import try_acquire_standby_lock
from kelvin.ipc.socket_directory import SocketDirectory
held = try_acquire_standby_lock(SocketDirectory(pathlib.Path(sys.argv[1])))
print(held is not None, flush=True)
threading.Event().wait()
"""


def test_standby_lock_has_one_holder(tmp_path: Path) -> None:
    """A second holder gets the lock only after the first releases it. Closing twice is harmless."""
    with closing(SocketDirectory(tmp_path)) as directory:
        first = try_acquire_standby_lock(directory)
        assert first is not None
        assert try_acquire_standby_lock(directory) is None
        first.close()
        second = try_acquire_standby_lock(directory)
        assert second is not None
        first.close()
        assert try_acquire_standby_lock(directory) is None
        second.close()


async def test_dead_holder_releases_the_standby_lock(tmp_path: Path) -> None:
    """A waiting process gets the lock after the holder's death, and not before."""
    with (
        closing(SocketDirectory(tmp_path)) as directory,
        subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"True\n"
            with pytest.raises(Refused, match="the standby lock"):
                await acquire_standby_lock(directory, 0.05)
        finally:
            process.send_signal(signal.SIGKILL)
        with closing(await acquire_standby_lock(directory, 60)):
            assert try_acquire_standby_lock(directory) is None
