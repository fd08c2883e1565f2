"""Memory that a burst of handshakes took is given back."""

import asyncio
import os
import socket
import ssl
import struct
from pathlib import Path

import pytest

from activator.heap import GROWN_BYTES, LOOK_S, HeapTrimmer
from tests.activator.world import World, world

HANDSHAKES = int(os.environ.get("KELVIN_TEST_HANDSHAKES", "20000"))
AT_ONCE = 500
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
MIB = 1 << 20


class _Process:
    """A process whose trim gives back what is free."""

    def __init__(self) -> None:
        self.in_use = 60 * MIB
        self.free = 0
        self.trims = 0

    def resident(self) -> int:
        return self.in_use + self.free

    def trim(self) -> None:
        self.trims += 1
        self.free = 0


def test_heap_is_trimmed_after_growth_only() -> None:
    """A trim that gave nothing back is not repeated until the process has grown again."""
    process = _Process()
    trimmer = HeapTrimmer(process.resident, process.trim)
    process.free = GROWN_BYTES
    trimmer.trim_if_grown()
    assert process.trims == 0
    process.free += 1
    trimmer.trim_if_grown()
    assert (process.trims, process.free) == (1, 0)
    process.in_use += 2 * GROWN_BYTES
    for _ in range(3):
        trimmer.trim_if_grown()
    assert process.trims == 2, "it is in use"
    process.in_use -= 2 * GROWN_BYTES
    trimmer.trim_if_grown()
    process.free = GROWN_BYTES + 1
    trimmer.trim_if_grown()
    assert process.trims == 3


def _client_hello() -> bytes:
    client = ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


async def _abort(here: World, hello: bytes, count: int) -> None:
    """Begin handshakes, AT_ONCE at a time, and reset them in the middle."""
    for _ in range(count // AT_ONCE):
        opened = []
        for _ in range(AT_ONCE):
            connection = socket.create_connection(("127.0.0.1", here.port))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.send(hello)
            opened.append(connection)
        await asyncio.sleep(0.05)
        for connection in opened:
            connection.close()


@pytest.mark.deep
@pytest.mark.timeout(900)
async def test_aborted_handshakes_leave_no_memory_behind(tmp_path: Path) -> None:
    """The activator is as small after all of them as after the first tenth, but for a few MiB."""
    sizes, hello = [], _client_hello()
    async with world(tmp_path, trusted_addresses="127.0.0.1") as here:
        for count in (HANDSHAKES // 10, HANDSHAKES - HANDSHAKES // 10):
            await _abort(here, hello, count)
            await asyncio.sleep(2 * LOOK_S + 1)
            sizes.append(_resident_mib(here.process.pid))
    first, last = sizes
    print(f"{HANDSHAKES} aborted handshakes: {first:.0f} MiB after a tenth, {last:.0f} MiB after all")
    assert last < first + GROWN_BYTES / MIB
    assert last < 62 + 2 * GROWN_BYTES / MIB
