"""The choice of replicas that leave when fewer are wanted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaling.policy.replica_lifecycle import LIVE, SERVING, ReplicaState
from controlplane.scaling.policy.scale_down import (
    ScaleDownPlan,
    VersionReplica,
    choose_replicas_to_keep,
    plan_scale_down,
)

S = ReplicaState


def members(*states: ReplicaState) -> list[VersionReplica]:
    """Return replicas `0`, `1`, ... from the oldest to the youngest."""
    return [VersionReplica(str(number), state, number) for number, state in enumerate(states)]


@pytest.mark.parametrize(
    ("starts", "states", "wanted", "want"),
    [
        pytest.param(1, [S.READY], 2, ScaleDownPlan(0, (), ()), id="as many as wanted"),
        pytest.param(2, [S.READY, S.RESTORING], 2, ScaleDownPlan(2, (), ()), id="starts leave first"),
        pytest.param(
            1, [S.READY, S.RESTORING, S.READY], 1, ScaleDownPlan(1, ("2",), ("1",)), id="then restores, then youngest"
        ),
        pytest.param(
            0, [S.RELIEVED, S.RESTORING], 1, ScaleDownPlan(0, (), ()), id="relieved: it stays until the new one serves"
        ),
        pytest.param(0, [S.RELIEVED, S.READY], 1, ScaleDownPlan(0, ("0",), ()), id="relieved: the new one serves"),
        pytest.param(
            0, [S.RELIEVED, S.RELIEVED, S.READY], 2, ScaleDownPlan(0, ("0",), ()), id="relieved: the oldest leaves"
        ),
        pytest.param(1, [S.RELIEVED, S.READY], 1, ScaleDownPlan(1, ("0",), ()), id="one fewer: both of a pair"),
        pytest.param(
            0, [S.RELIEVED, S.RESTORING, S.ASLEEP, S.DEEP_SLEEP, S.DOZING], 0,
            ScaleDownPlan(0, ("0", "4"), ("1", "2", "3")), id="zero: all leave",
        ),
        pytest.param(0, [S.READY, S.ASLEEP], 1, ScaleDownPlan(0, (), ()), id="a sleeper stays above zero"),
        pytest.param(0, [S.DRAINING, S.ENDING], 0, ScaleDownPlan(0, (), ()), id="leaving replicas are left alone"),
    ],
)  # fmt: skip
def test_scale_down_chooses_by_state_then_age(
    starts: int, states: list[ReplicaState], wanted: int, want: ScaleDownPlan
) -> None:
    assert plan_scale_down(starts, members(*states), wanted) == want


@given(st.integers(0, 4), st.lists(st.sampled_from(ReplicaState), max_size=6), st.integers(0, 6))
def test_scale_down_leaves_the_wanted_number(starts: int, states: list[ReplicaState], wanted: int) -> None:
    """While new replicas start, serving ones do not leave. No replica leaves twice."""
    every = members(*states)
    leaving = plan_scale_down(starts, every, wanted)
    gone = [*leaving.drained, *leaving.ended]
    left = [each for each in every if each.runtime_id not in gone]
    assert len(gone) == len(set(gone))
    live, before = sum(each.state in LIVE for each in left) + starts - leaving.starts, sum(s in LIVE for s in states)
    assert live == min(wanted, before + starts)
    serving, served = sum(each.state in SERVING for each in left), sum(state in SERVING for state in states)
    assert serving >= min(served, live)
    assert plan_scale_down(starts - leaving.starts, left, wanted) == ScaleDownPlan(0, (), ())


@pytest.mark.parametrize(
    ("starts", "states", "want"),
    [
        pytest.param(0, [S.RELIEVED, S.READY], ("0",), id="no new one starts"),
        pytest.param(1, [S.RELIEVED], (), id="a start will take its place"),
        pytest.param(
            0, [S.RELIEVED, S.RELIEVED, S.RESTORING], ("1",), id="one new replica for two: the youngest stays"
        ),
    ],
)
def test_relieved_replica_without_successor_stays(
    starts: int, states: list[ReplicaState], want: tuple[str, ...]
) -> None:
    """A relieved replica stays if no new replica will take its place."""
    assert choose_replicas_to_keep(starts, members(*states)) == want
