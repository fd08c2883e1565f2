"""Memory footprints of processes: the kernel's figures, and only of our own processes."""

from pathlib import Path

import pytest

from controlplane.scaling.local.footprints import Footprint, Footprints, footprint_of, sum_footprints
from controlplane.scaling.policy.standby_sizing import ASSUMED_BYTES
from tests.controlplane.machine_fixture import RunDirectory, local

ROLLUP = """55d0c0a00000-7ffd2a5f2000 ---p 00000000 00:00 0                          [rollup]
Rss:              303972 kB
Pss:              102400 kB
Pss_Dirty:         90000 kB
Shared_Clean:      60000 kB
Private_Clean:      1024 kB
Private_Dirty:     30720 kB
SwapPss:               0 kB
"""


def test_smaps_rollup_is_parsed() -> None:
    """A kilobyte is 1024 bytes. Private memory is the clean plus the dirty part."""
    assert footprint_of(ROLLUP) == Footprint(100 << 20, 31 << 20)


@pytest.mark.parametrize("name", ["Pss", "Private_Clean", "Private_Dirty"])
def test_missing_smaps_line_is_an_error(name: str) -> None:
    """The error names the line."""
    with pytest.raises(ValueError, match=f"no {name}"):
        footprint_of("\n".join(line for line in ROLLUP.splitlines() if not line.startswith(f"{name}:")))


def test_footprints_add_up() -> None:
    """The sum of no footprints is zero."""
    assert sum_footprints([]) == Footprint(0, 0)
    assert sum_footprints([Footprint(3, 1), Footprint(4, 2)]) == Footprint(7, 3)


async def test_only_live_processes_are_measured(run: RunDirectory, tmp_path: Path) -> None:
    """Parked standbys and the zygote are measured. Without figures from the kernel an assumed size is used."""

    async with local(run, standbys=2) as it:
        footprints = it.pool.footprints
        await it.wait_until_parked(2)
        await footprints.refresh()
        assert 0 < footprints.standbys.private_bytes <= footprints.standbys.pss_bytes
        assert footprints.standby_bytes == footprints.standbys.private_bytes // 2
        assert footprints.zygote.pss_bytes > 0
        blind = Footprints(it.fleet, lambda: None, tmp_path)
        await blind.refresh()
        assert (blind.standbys, blind.zygote, blind.standby_bytes) == (Footprint(), Footprint(), ASSUMED_BYTES)
        (first, second) = it.table
        victim = it.fleet[first.runtime_id]
        it.fleet.end(victim, 0.0)
        assert await victim.wait_gone(20.0)
        late = Footprints(it.fleet, lambda: None)
        await late.refresh()
        assert victim.runtime_id not in late._standbys
        assert not victim.is_alive()
        assert it.fleet[second.runtime_id].is_alive()
