"""First token, time to bound and memory of a start are held against what is stated; each can go red."""

from collections.abc import Sequence

import pytest

from coldstart_bench.processes import pss_outside_slabs
from coldstart_bench.rows import ColdFigures, Footprint, StageRow, judge_cold, rows_of, without_probe

SIZE, SMALL, MIB = 500_000_000, 100_000_000, 1 << 20
STAGES = [StageRow(SIZE, "host", "leased", 0.01), StageRow(SIZE, "host", "bound", 0.02)]
FITS = Footprint(SIZE, SIZE, 512 << 20, 100 * MIB, 200 * MIB)


def passed(
    host: float = 1.3, nvme: float = 1.2, size: int = SIZE, stages: Sequence[StageRow] = STAGES, taken: Footprint = FITS
) -> list[bool | None]:
    """Host, NVMe, bound, memory."""
    measured = {(size, tier, "floor"): [1.0] for tier in ("host", "nvme")}
    rows = rows_of({**measured, (size, "host", "kelvin"): [host], (size, "nvme", "kelvin"): [nvme]})
    found = ColdFigures((size,), rows, tuple(stages), (taken,))
    return [verdict.passed for verdict in judge_cold(found)]


def test_good_figures_pass() -> None:
    """All four lines."""
    assert passed() == [True, True, True, True]


@pytest.mark.parametrize(
    ("found", "want"),
    [
        pytest.param(passed(host=1.36), [False, True, True, True], id="slower than 1.35 of the floor from memory"),
        pytest.param(passed(nvme=1.26), [True, False, True, True], id="slower than 1.25 of the floor from NVMe"),
        pytest.param(
            passed(stages=[StageRow(SIZE, "host", "bound", 0.06)]), [True, True, False, True], id="bound too late"
        ),
        pytest.param(passed(stages=[]), [True, True, None, True], id="never bound"),
    ],
)
def test_a_bad_figure_fails(found: list[bool | None], want: list[bool | None]) -> None:
    """Its own line alone."""
    assert found == want


def test_memory_beyond_the_model_fails() -> None:
    """Own memory grows by more than 256 MiB, the last slab's spare room included."""
    assert passed(taken=Footprint(SIZE, SIZE, 512 << 20, 100 * MIB, 400 * MIB))[-1] is False


def test_a_small_model_is_not_held_to_the_floor() -> None:
    """What any start costs is most of it; the figure is printed all the same."""
    assert passed(size=SMALL, host=1.9)[:2] == [None, None]


def test_what_has_no_figure_is_said_not_to_be_measured() -> None:
    """Each line of a size that was asked for is there; none of them passes."""
    rows = rows_of({(SIZE, "host", "kelvin"): [1.0], (SIZE, "nvme", "floor"): [1.0]})
    found = judge_cold(ColdFigures((SIZE,), rows))
    assert {(verdict.value, verdict.passed) for verdict in found} == {(None, None)}
    assert [verdict.state for verdict in found] == ["host", "nvme", "host", ""]


def test_our_row_without_its_probe_is_less_by_its_share() -> None:
    """Interval and ratio too; the others stay."""
    rows = rows_of({(SIZE, "host", "floor"): [0.1], (SIZE, "host", "kelvin"): [0.15]})
    found = {row.system: row for row in without_probe(rows, {SIZE: 0.02})}
    assert found["kelvin without its probe"].median_s == pytest.approx(0.13)
    assert found["kelvin without its probe"].ratio_to_floor == pytest.approx(1.3)
    assert (found["kelvin"], found["floor"]) == tuple(sorted(rows, key=lambda row: -row.median_s))


SMAPS = """7f0000000000-7f0010000000 r--s 00000000 00:01 12 /memfd:kelvin-slab (deleted)
Size:             262144 kB
Pss:              131072 kB
Pss_Dirty:             0 kB
7f1000000000-7f1000001000 rw-p 00000000 00:00 0
Pss:                   4 kB
7f2000000000-7f2000003000 r-xp 00000000 fe:00 77 /usr/lib/libc.so.6
Pss:                   3 kB
VmFlags: rd ex
"""


def test_slabs_are_left_out_of_a_process_own_memory() -> None:
    """Everything else counts."""
    assert pss_outside_slabs(SMAPS) == 7 * 1024
