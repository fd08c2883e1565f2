"""The floor beside a start is one that was measured for about that size, or none."""

from pathlib import Path

import msgspec
import pytest

from kelvin.timeline import BadReport, read_floor_us

ROWS = [
    {"size_bytes": 500_000_000, "tier": "host", "system": "floor", "median_s": 0.07},
    {"size_bytes": 500_000_000, "tier": "nvme", "system": "floor", "median_s": 0.2},
    {"size_bytes": 2_000_000_000, "tier": "host", "system": "floor", "median_s": 0.2},
    {"size_bytes": 500_000_000, "tier": "host", "system": "kelvin", "median_s": 0.1},
]


@pytest.mark.parametrize(
    ("weight_bytes", "want"),
    [
        pytest.param(491_000_000, 70_000, id="the nearest size"),
        pytest.param(2_100_000_000, 200_000, id="the next one up"),
        pytest.param(1_000_000_000, None, id="none is near"),
        pytest.param(0, None, id="an unknown size has none"),
    ],
)
def test_read_floor_us(tmp_path: Path, weight_bytes: int, want: int | None) -> None:
    """Only the floor's own rows of the host tier count."""
    report = tmp_path / "bench.json"
    report.write_bytes(msgspec.json.encode({"rows": ROWS, "machine": {}, "commit": None}))
    assert read_floor_us(report, weight_bytes) == want


def test_what_is_no_report_is_named(tmp_path: Path) -> None:
    """The file and the rule are in the error."""
    (tmp_path / "x.json").write_text('{"rows": 3}')
    with pytest.raises(BadReport, match="is not a report"):
        read_floor_us(tmp_path / "x.json", 1)
    with pytest.raises(BadReport, match="No such file"):
        read_floor_us(tmp_path / "y.json", 1)
