"""Which traces are told follows from their ids and their callers."""

import pytest

from contracts.trace import TraceContext, trace_id_of
from telemetry.policy.sampling import is_sampled, is_wanted

LOW, HIGH = 1, (1 << 64) - 1


@pytest.mark.parametrize(
    ("trace_id", "share", "want"),
    [
        pytest.param(LOW, 0.0, False, id="a share of nothing"),
        pytest.param(HIGH, 1.0, True, id="a share of all"),
        pytest.param(LOW, 0.01, True, id="an id below the share"),
        pytest.param(HIGH, 0.99, False, id="an id above it"),
        pytest.param((5 << 64) + LOW, 0.01, True, id="only the lower half counts"),
    ],
)
def test_is_sampled(trace_id: int, share: float, want: bool) -> None:
    """By the lower 64 bits."""
    assert is_sampled(trace_id, share) is want


def test_the_share_of_many_is_the_share() -> None:
    """Ids of requests are spread evenly, and a larger share holds the smaller one's."""
    ids = [trace_id_of(f"req_{number}") for number in range(10_000)]
    tenth = {trace_id for trace_id in ids if is_sampled(trace_id, 0.1)}
    fifth = {trace_id for trace_id in ids if is_sampled(trace_id, 0.2)}
    assert 900 < len(tenth) < 1100
    assert tenth < fifth


@pytest.mark.parametrize(
    ("caller", "share", "want"),
    [
        pytest.param(None, 1.0, True, id="nobody's, in the share"),
        pytest.param(True, 1.0, True, id="recorded by the caller, in the share"),
        pytest.param(False, 1.0, False, id="not recorded by the caller"),
        pytest.param(True, 0.0, False, id="a caller can't make us write"),
    ],
)
def test_is_wanted(caller: bool | None, share: float, want: bool) -> None:
    """The caller may say no, and never yes."""
    context = None if caller is None else TraceContext(LOW, 1, caller)
    assert is_wanted(LOW, context, share) is want
