"""One activator without the rest of an installation, for benches that stand for the rest themselves."""

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from coldstart_bench.services import READY_S, service
from contracts.errors import Refused
from service.client import ServiceClient
from service.unix import SocketDirectory


@contextmanager
def activator(data: Path, port: int, settings: Mapping[str, str] | None = None) -> Iterator[int]:
    """Ready, until the block ends; its process id. Raises InstallationFailed with its last words."""
    environment = {**os.environ, "KELVIN_DATA": str(data), "KELVIN_PORT": str(port), **(settings or {})}
    command = [sys.executable, "-m", "activator"]
    with service(command, environment, data / "log", lambda: asyncio.run(_is_ready(data)), "the activator") as pid:
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
