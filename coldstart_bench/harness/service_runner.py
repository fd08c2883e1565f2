"""Run one process for the length of a block: start it, wait until it is ready, end it.

A bench of an activator alone runs it this way, and plays the other services itself.
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
POLL_S: Final = 0.02
MAX_OUTPUT_CHARACTERS: Final = 500


@contextmanager
def running_service(
    command: Sequence[str], environment: Mapping[str, str], log: Path, is_ready: Callable[[], bool], what: str
) -> Iterator[int]:
    """Run a process and yield its pid once it is ready. Its output goes to `log`. Its child processes end with it.
    Raises InstallationFailed with its last output if it ends early, or is not ready within READY_S.
    """
    with log.open("wb") as said:
        process = subprocess.Popen(command, env=dict(environment), stdout=said, stderr=said, start_new_session=True)
    try:
        has_started = poll_until_true(lambda: is_ready() or process.poll() is not None, READY_S, POLL_S)
        if not has_started or process.poll() is not None:
            raise InstallationFailed(
                f"{what} did not start: {log.read_text(errors='replace')[-MAX_OUTPUT_CHARACTERS:]}"
            )
        yield process.pid
    finally:
        end(process)
        with suppress(ProcessLookupError):  # its group has no process any more
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def running_activator_process(data: Path, port: int, settings: Mapping[str, str] | None = None) -> Iterator[int]:
    """Run a ready activator until the block ends, and yield its pid. Raises InstallationFailed with its last output."""
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
