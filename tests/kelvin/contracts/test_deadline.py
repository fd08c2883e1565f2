"""A deadline is a point in time. Processes send each other the remaining time."""

from kelvin.contracts.deadline import Deadline


def test_remaining_time_is_never_negative() -> None:
    """After the deadline, the remaining time is zero."""
    deadline = Deadline.after(2.0, now=10.0)
    assert deadline.remaining_ms(10.5) == 1500
    assert deadline.remaining_s(13.0) == 0.0
    assert not deadline.has_passed(11.99)
    assert deadline.has_passed(12.0)
