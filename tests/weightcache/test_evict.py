"""Eviction takes the least recently used, and no more than it needs."""

import pytest

from weightcache.policy.evict import Candidate, choose

OLD, MIDDLE, YOUNG = Candidate("old", 1, 1.0), Candidate("middle", 5, 2.0), Candidate("young", 2, 3.0)


@pytest.mark.parametrize(
    ("need", "want"),
    [
        pytest.param(-3, (), id="nothing is needed"),
        pytest.param(0, (), id="nothing more is needed"),
        pytest.param(1, ("old",), id="the oldest alone will do"),
        pytest.param(2, ("old", "middle"), id="then the next, though another would fit better"),
        pytest.param(8, ("old", "middle", "young"), id="everything"),
        pytest.param(9, None, id="more than there is: nobody goes"),
    ],
)
def test_choose(need: int, want: tuple[str, ...] | None) -> None:
    assert choose([YOUNG, OLD, MIDDLE], need) == want
