"""`kelvin models ladder`: what its options mean. What is right of them is the API's to say."""

import click
import pytest

from kelvin.ladder import read_steps, step_lines


def test_read_steps() -> None:
    """In the order of their waits; of those with one wait, what gives up least first."""
    assert read_steps(("64@2", "16"), ("small@8", "other/tiny"), ("3600", "60@8")) == [
        {"step": "cap-output", "tokens": 64, "wait_s": 2.0},
        {"step": "fallback", "model": "small", "wait_s": 8.0},
        {"step": "cached", "age_s": 60, "wait_s": 8.0},
        {"step": "cap-output", "tokens": 16},
        {"step": "fallback", "model": "other/tiny"},
        {"step": "cached", "age_s": 3600},
    ]
    assert read_steps((), ()) == []


@pytest.mark.parametrize("bad", ["x", "", "-1", "1.5", "64@", "64@soon", "64@nan", "64@inf", "\u0661"])
def test_what_is_no_step(bad: str) -> None:
    """Told by its text."""
    with pytest.raises(click.UsageError, match="must be"):
        read_steps((bad,), ())


def test_step_lines() -> None:
    """Each step, and when."""
    steps: list[dict[str, object]] = [
        {"step": "cap-output", "tokens": 64, "wait_s": 2.5},
        {"step": "fallback", "model": "small", "wait_s": None},
        {"step": "cached", "age_s": 60, "wait_s": None},
    ]
    assert list(step_lines(steps)) == [
        "cap-output 64: from 2.5 s of expected wait",
        "fallback small: instead of a refusal",
        "cached 60: instead of a refusal",
    ]
