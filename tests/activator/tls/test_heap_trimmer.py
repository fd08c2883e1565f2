"""HeapTrimmer: memory used by a burst of handshakes is returned to the system."""

import asyncio
import os
import socket
import ssl
import struct
import time
from pathlib import Path

import pytest

from activator.tls.heap_trimmer import CHECK_S, GROWN_BYTES, MAX_PAUSE, HeapTrimmer
from tests.activator.world import ActivatorWorld, world

HANDSHAKES = int(os.environ.get("KELVIN_TEST_HANDSHAKES", "20000"))
AT_ONCE = 500
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
MIB = 1 << 20


class _Process:
    """A process whose trim returns its free memory."""

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
    """A process that is small after a trim is not trimmed until it has grown."""
    process = _Process()
    trimmer = HeapTrimmer(process.resident, process.trim)
    process.free = GROWN_BYTES
    trimmer.trim_if_grown()
    assert process.trims == 0
    process.free += 1
    for _ in range(3):
        trimmer.trim_if_grown()
    assert (process.trims, process.free) == (1, 0)


def test_heap_is_trimmed_again_after_a_burst() -> None:
    """Memory in use at a trim is returned once it is free. A process that stays large is trimmed less often."""
    process = _Process()
    trimmer = HeapTrimmer(process.resident, process.trim)
    process.in_use += 2 * GROWN_BYTES
    trims = []
    for _ in range(16):
        trimmer.trim_if_grown()
        trims.append(process.trims)
    assert trims == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5]
    process.in_use, process.free = process.in_use - 2 * GROWN_BYTES, 2 * GROWN_BYTES
    for _ in range(16):
        trimmer.trim_if_grown()
    assert (process.trims, process.free) == (6, 0)


def test_pause_between_trims_is_bounded_and_ends_with_growth() -> None:
    """A large process is trimmed once per MAX_PAUSE checks, and at once when it grows further."""
    process = _Process()
    trimmer = HeapTrimmer(process.resident, process.trim)
    process.in_use += 2 * GROWN_BYTES
    for _ in range(4 * MAX_PAUSE):
        trimmer.trim_if_grown()
    before = process.trims
    for _ in range(MAX_PAUSE):
        trimmer.trim_if_grown()
    assert process.trims == before + 1
    process.in_use += GROWN_BYTES + 1
    trimmer.trim_if_grown()
    assert process.trims == before + 2


def _client_hello() -> bytes:
    client = ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


async def _abort(here: ActivatorWorld, hello: bytes, count: int) -> None:
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
    """The activator is soon within a few MiB of its size after the first tenth."""
    sizes, hello = [], _client_hello()
    async with world(tmp_path, trusted_addresses="127.0.0.1") as here:
        for count in (HANDSHAKES // 10, HANDSHAKES - HANDSHAKES // 10):
            began = time.monotonic()
            await _abort(here, hello, count)
            # It checks at once after growth, and after a burst within twice the burst's length.
            deadline = 2 * time.monotonic() - began + 3 * CHECK_S
            while (size := _resident_mib(here.process.pid)) > 62 + GROWN_BYTES / MIB and time.monotonic() < deadline:
                await asyncio.sleep(CHECK_S / 10)
            sizes.append(size)
    print(f"{HANDSHAKES} aborted handshakes: {sizes[0]:.0f} MiB after a tenth, {sizes[1]:.0f} MiB after all")
    assert max(sizes) < 62 + 2 * GROWN_BYTES / MIB
    assert sizes[1] < sizes[0] + GROWN_BYTES / MIB
