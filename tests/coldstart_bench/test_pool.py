"""A pod that waits is held against what is stated; the line can go red."""

import pytest

from coldstart_bench.pool import OWN, WAITING, PoolFigures, judge
from coldstart_bench.rows import rows_of

SIZE = 100_000_000


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        pytest.param({OWN: [5.0], WAITING: [1.0]}, (5.0, True), id="five times sooner is enough"),
        pytest.param({OWN: [4.9], WAITING: [1.0]}, (4.9, False), id="less is not"),
        pytest.param({OWN: [4.9]}, (None, None), id="what was not measured does not pass"),
        pytest.param({OWN: [9.0, 5.0, 1.0], WAITING: [2.0, 1.0, 1.0]}, (5.0, True), id="by medians"),
    ],
)
def test_judge(seconds: dict[str, list[float]], want: tuple[float | None, bool | None]) -> None:
    rows = rows_of({(SIZE, "store", system): each for system, each in seconds.items()})
    (verdict,) = judge(PoolFigures(SIZE, rows))
    assert (verdict.value, verdict.passed) == want
