"""The pause that `ExponentialBackoff` returns for a number of failures."""

import pytest

from kelvin.contracts.backoff import ExponentialBackoff, should_log


@pytest.mark.parametrize(("failures", "jitter", "want"), [
    pytest.param(1, 0.0, 0.1, id="the first failure"),
    pytest.param(2, 0.0, 0.2, id="the second pause is twice as long"),
    pytest.param(5, 0.0, 1.6, id="the fifth pause doubles four times"),
    pytest.param(6, 0.0, 2.0, id="the maximum"),
    pytest.param(10**9, 0.0, 2.0, id="the maximum after many failures"),
    pytest.param(2, 0.5, 0.15, id="jitter shortens the pause"),
    pytest.param(6, 1.0, 1.0, id="jitter halves the maximum at most"),
])  # fmt: skip
def test_delay_doubles_within_bounds(failures: int, jitter: float, want: float) -> None:
    """The pause doubles up to its maximum. Jitter shortens it by at most a half."""
    assert ExponentialBackoff(0.1, 2.0).delay_s(failures, jitter) == pytest.approx(want)


def test_failures_are_logged_at_powers_of_two() -> None:
    """A failure is logged when its count is a power of two."""
    assert [failures for failures in range(1, 1025) if should_log(failures)] == [2**power for power in range(11)]
