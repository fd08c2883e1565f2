"""Older backups are kept less densely, and the newest ones are always kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.backup.retention_policy import DAY_S, HOUR_S, MIN_BACKUPS, choose_kept_backups

NOW_S = 1_800_000_000 // DAY_S * DAY_S + DAY_S // 2  # noon


@pytest.mark.parametrize(
    ("ages_s", "kept"),
    [
        pytest.param([], [], id="no backups"),
        pytest.param([0, 240, 480, 3599], [0, 240, 480, 3599], id="all of the last hour"),
        pytest.param(
            [0, 60, 120, 2 * HOUR_S + 10, 2 * HOUR_S + 20], [0, 60, 120, 2 * HOUR_S + 10], id="then one an hour"
        ),
        pytest.param(
            [0, 60, 120, 3 * DAY_S + 10, 3 * DAY_S + 20], [0, 60, 120, 3 * DAY_S + 10], id="then one a day"
        ),
        pytest.param([0, 60, 120, 8 * DAY_S], [0, 60, 120], id="then none"),
        pytest.param([90 * DAY_S, 91 * DAY_S, 92 * DAY_S, 93 * DAY_S], [90 * DAY_S, 91 * DAY_S, 92 * DAY_S],
                     id="the newest stay, however old"),
        pytest.param([-500, -400, 0, 10], [-500, -400, 0, 10], id="a clock that went back loses none"),
    ],
)  # fmt: skip
def test_kept_backups(ages_s: list[int], kept: list[int]) -> None:
    """Backups are kept for seven days."""
    found = choose_kept_backups([NOW_S - age for age in ages_s], NOW_S, 7)
    assert sorted(NOW_S - moment for moment in found) == sorted(kept)


@given(st.sets(st.integers(NOW_S - 20 * DAY_S, NOW_S), max_size=60), st.integers(1, 30))
def test_thinning_again_takes_nothing_more(moments: set[int], days: int) -> None:
    """The result is a subset that holds the newest backups. Applying the policy again removes nothing more."""
    kept = choose_kept_backups(moments, NOW_S, days)
    assert kept <= moments
    assert set(sorted(moments)[-MIN_BACKUPS:]) <= kept
    assert choose_kept_backups(kept, NOW_S, days) == kept
