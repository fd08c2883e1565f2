"""Memory of the zygote and its parked standbys, as the kernel counts it (proc(5), `smaps_rollup`).

Runtimes are not measured: their memory is their version's cost. For each answer the kernel walks the page tables of the
process, which takes one to three milliseconds here. So it runs in a thread, and answers are cached.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.policy.standby_sizing import ASSUMED_BYTES

CACHE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """`pss_bytes`: private memory and a part of each shared page. `private_bytes`: the memory that its end frees."""

    pss_bytes: int = 0
    private_bytes: int = 0


def footprint_of(rollup: str) -> Footprint:
    """Parse the text of `smaps_rollup`. Raises ValueError if a line is missing."""
    found = {name: value for name, _, value in (line.partition(":") for line in rollup.splitlines())}
    try:
        pss, clean, dirty = (int(found[name].split()[0]) * 1024 for name in ("Pss", "Private_Clean", "Private_Dirty"))
    except KeyError as missing:
        raise ValueError(f"smaps_rollup has no {missing.args[0]}") from None
    return Footprint(pss, clean + dirty)


def sum_footprints(footprints: Iterable[Footprint]) -> Footprint:
    """Return the sum. A shared page counts once in `pss_bytes`, because each process has its part of it."""
    found = tuple(footprints)
    return Footprint(sum(each.pss_bytes for each in found), sum(each.private_bytes for each in found))


class Footprints:
    """The last measured footprints, without processes that ended meanwhile. Empty before the first `refresh`."""

    def __init__(self, fleet: Fleet, zygote_pid: Callable[[], int | None], proc: Path = Path("/proc")) -> None:
        self._fleet = fleet
        self._zygote_pid = zygote_pid
        self._proc = proc
        self._measured_us = -int(CACHE_S * 1e6)
        self._standbys: dict[str, Footprint] = {}
        self.zygote = Footprint()

    def __repr__(self) -> str:
        standbys = self.standbys
        return f"<Footprints zygote={self.zygote.pss_bytes >> 20} MiB standbys={standbys.pss_bytes >> 20} MiB>"

    @property
    def standbys(self) -> Footprint:
        """Return the sum over all standbys that were parked."""
        return sum_footprints(self._standbys.values())

    @property
    def standby_bytes(self) -> int:
        """Return the mean private memory of a standby, or an assumed value until one was measured."""
        if not self._standbys:
            return ASSUMED_BYTES
        return self.standbys.private_bytes // len(self._standbys)

    async def refresh(self) -> None:
        """Measure again, unless the same standbys were measured within CACHE_S."""
        now_us = self._fleet.clock.monotonic_us()
        parked = {each.runtime_id: each.pid for each in self._fleet.table if each.state is ReplicaState.STANDBY}
        if now_us - self._measured_us < CACHE_S * 1e6 and parked.keys() == self._standbys.keys():
            return
        self._measured_us = now_us
        zygote = self._zygote_pid()
        pids = [*parked.values(), *(() if zygote is None else (zygote,))]
        found = await asyncio.to_thread(self._read, pids)
        # A process that is alive after the measurement had its pid all the time, so the numbers are its own.
        self._standbys = {
            runtime_id: found[pid]
            for runtime_id, pid in parked.items()
            if pid in found and runtime_id in self._fleet.table and self._fleet[runtime_id].is_alive()
        }
        self.zygote = Footprint() if zygote is None else found.get(zygote, Footprint())

    def _read(self, pids: Iterable[int]) -> dict[int, Footprint]:
        """Measure processes; blocks for milliseconds."""
        found = {}
        for pid in pids:
            try:
                found[pid] = footprint_of((self._proc / str(pid) / "smaps_rollup").read_text())
            except (OSError, ValueError):  # it has ended, or this kernel has no such file
                continue
        return found
