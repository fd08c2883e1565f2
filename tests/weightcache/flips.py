"""Flip a bit in the host slabs of an agent, through its memory: no other process maps them writable."""

import re
from pathlib import Path
from typing import Final

_SLAB: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-s .*memfd:kelvin-slab", re.MULTILINE)


def flip_bit_of_process(pid: int, chunk: bytes, offset: int) -> None:
    """Flip the lowest bit of the chunk's byte at `offset`, where process `pid` has the chunk in its slabs.

    It writes through `/proc/PID/mem`, as a debugger would. That needs the same user, or an ancestor process.
    """
    found = _places(pid, chunk)
    assert len(found) == 1, f"the chunk is {len(found)} times in memory"
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(found[0] + offset)
        memory.write(bytes([chunk[offset] ^ 1]))


def byte_at(pid: int, chunk: bytes, offset: int) -> int | None:
    """Return the byte that now follows the chunk's first `offset` bytes, or None if they are in no slab."""
    found = _places(pid, chunk[:offset])
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for address in found:
            memory.seek(address + offset)
            return memory.read(1)[0]
    return None


def _places(pid: int, wanted: bytes) -> list[int]:
    """Return the addresses of these bytes in the process's slabs. Chunks begin at pages."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for first, last in _SLAB.findall(Path(f"/proc/{pid}/maps").read_text()):
            begin = int(first, 16)
            memory.seek(begin)
            data = memory.read(int(last, 16) - begin)
            at = data.find(wanted)
            while at >= 0:
                if at % 4096 == 0:
                    found.append(begin + at)
                at = data.find(wanted, at + 1)
    return found
