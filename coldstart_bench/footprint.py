"""How much memory a start takes: the runtime's own, sampled from its mappings while it starts, and its version's slabs.

Proportional set sizes (PSS, proc(5)): what several processes share is divided among them. Slabs are left out there and
counted whole, as the cache agent says, since other readers of a slab would make a part of it disappear.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SLAB: Final = "/memfd:kelvin-slab"
EVERY_S: Final = 0.01


def pss_outside_slabs(smaps: str) -> int:
    """Bytes, of the text of /proc/PID/smaps."""
    total, counts = 0, True
    for line in smaps.splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss" and counts:
            total += int(rest.split()[0]) * 1024
        elif "-" in name.partition(" ")[0]:  # a mapping begins: its addresses, and at the end what is mapped
            counts = SLAB not in line
    return total


def pss_of(pid: int) -> int:
    """Bytes outside slabs, 0 where it has ended."""
    try:
        return pss_outside_slabs(Path(f"/proc/{pid}/smaps").read_text())
    except OSError:
        return 0


def runtimes_below(supervisor: int) -> list[int]:
    """Standbys, runtimes and the zygote itself: children of the supervisor that are forks of one program."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
                if words[1:3] == [b"-m", b"runtime.zygote"] and int(parent) == supervisor:
                    found.append(int(entry))
    return found


class Watch:
    """PSS outside slabs of some processes, by process id: before, and at the peak."""

    def __init__(self, pids: list[int]) -> None:
        self.before = {pid: pss_of(pid) for pid in pids}
        self.peak = dict(self.before)


@contextlib.contextmanager
def watching(supervisor: int) -> Iterator[Watch]:
    """Samples all that may become the runtime, until the block is left."""
    watch, stop = Watch(runtimes_below(supervisor)), threading.Event()

    def sample() -> None:
        while not stop.wait(EVERY_S):
            for pid in watch.peak:
                watch.peak[pid] = max(watch.peak[pid], pss_of(pid))

    thread = threading.Thread(target=sample, name="footprint")
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()
