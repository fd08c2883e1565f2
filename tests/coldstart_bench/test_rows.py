"""Every figure stands beside the floor of its own run."""

from coldstart_bench.rows import StageRow, rows_of, stage_table, table, without_probe


def test_a_row_is_a_ratio_to_the_floor_of_its_size_and_tier() -> None:
    """The floor's own ratio is one."""
    rows = rows_of({(5, "host", "floor"): [1.0, 1.0, 1.0], (5, "host", "kelvin"): [1.4, 1.5, 1.6]})
    assert [(row.system, row.ratio_to_floor) for row in rows] == [("floor", 1.0), ("kelvin", 1.5)]
    assert "1.50x" in table(rows)


def test_a_row_without_its_floor_has_no_ratio() -> None:
    """One to another tier's floor is never printed."""
    rows = rows_of({(5, "nvme", "kelvin"): [1.0], (5, "host", "floor"): [1.0]})
    assert {row.system: row.ratio_to_floor for row in rows} == {"kelvin": None, "floor": 1.0}
    assert [line.split()[-1] for line in table(rows).splitlines()[1:]] == ["1.00x", "1"]
    assert {row.ratio_to_floor for row in without_probe(rows, {5: 0.25}) if row.system != "floor"} == {None}


def test_stages_stand_beside_the_floor_of_their_size_and_tier() -> None:
    """In its own milliseconds; one that a tier did not have is left open; what follows the first token is not told."""
    rows = rows_of({(5, tier, "floor"): [0.1] for tier in ("host", "nvme")})
    stages = [StageRow(5, "host", "ready", 0.02), StageRow(5, "nvme", "ready", 0.05), StageRow(5, "host", "done", 9.0)]
    stages.append(StageRow(5, "nvme", "leased", 0.03))
    _, ready, leased = (line.split() for line in stage_table(stages, rows).splitlines())
    assert ready == ["ready", "20.0ms", "0.200x", "50.0ms", "0.500x"]
    assert leased == ["leased", "30.0ms", "0.300x"]
