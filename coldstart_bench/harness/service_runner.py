"""One process that a bench needs for the length of a block: begun, waited for until it is ready, and ended with it.

One activator without the rest of an installation is such a process: its bench stands for the rest itself.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from coldstart_bench.harness.installation import InstallationFailed, end
from coldstart_bench.harness.polling import poll_until_true
from kelvin.contracts.errors import Refused
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.python_command import python_command

READY_S: Final = 60.0
POLL_S: Final = 0.02  # how late its readiness may be noticed
MAX_OUTPUT_CHARACTERS: Final = 500


@contextmanager
def running_service(
    command: Sequence[str], environment: Mapping[str, str], log: Path, is_ready: Callable[[], bool], what: str
) -> Iterator[int]:
    """Its process id, from when it is ready on. Both its outputs are in `log`. What it started ends with it.

    Raises InstallationFailed with its last words where it ends before it is ready, or is not within READY_S.
    """
    with log.open("wb") as said:
        process = subprocess.Popen(command, env=dict(environment), stdout=said, stderr=said, start_new_session=True)
    try:
        came = poll_until_true(lambda: is_ready() or process.poll() is not None, READY_S, POLL_S)
        if not came or process.poll() is not None:
            raise InstallationFailed(
                f"{what} did not start: {log.read_text(errors='replace')[-MAX_OUTPUT_CHARACTERS:]}"
            )
        yield process.pid
    finally:
        end(process)
        with suppress(ProcessLookupError):  # nobody of its group lives any more
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def running_activator_process(data: Path, port: int, settings: Mapping[str, str] | None = None) -> Iterator[int]:
    """Ready, until the block ends; its process id. Raises InstallationFailed with its last words."""
    environment = {**os.environ, "KELVIN_DATA": str(data), "KELVIN_PORT": str(port), **(settings or {})}
    command = python_command("activator")
    with running_service(
        command, environment, data / "log", lambda: asyncio.run(_is_ready(data)), "the activator"
    ) as pid:
        yield pid


async def _is_ready(data: Path) -> bool:
    directory = SocketDirectory(data / "run")
    client = ServiceClient(directory, "activator.sock", "the activator")
    try:
        async with client.open("GET", "/readyz", timeout_s=READY_S) as answer:
            return answer.status == 200
    except Refused:
        return False
    finally:
        await client.close()
        directory.close()
