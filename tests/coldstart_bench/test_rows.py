"""Every figure stands beside the floor of its own run."""

import pytest

from coldstart_bench.rows import rows_of, table


def test_a_row_is_a_ratio_to_the_floor_of_its_size_and_tier() -> None:
    """The floor's own ratio is one."""
    rows = rows_of({(5, "host", "floor"): [1.0, 1.0, 1.0], (5, "host", "kelvin"): [1.4, 1.5, 1.6]})
    assert [(row.system, row.ratio_to_floor) for row in rows] == [("floor", 1.0), ("kelvin", 1.5)]
    assert "1.50x" in table(rows)


def test_a_row_without_its_floor_is_a_defect() -> None:
    """A ratio to another run's floor is never printed."""
    with pytest.raises(KeyError):
        rows_of({(5, "nvme", "kelvin"): [1.0], (5, "host", "floor"): [1.0]})
