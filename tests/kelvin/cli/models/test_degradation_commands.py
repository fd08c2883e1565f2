"""`kelvin models ladder`: the meaning of its options. The API checks the values."""

import click
import pytest
from click.testing import CliRunner

from kelvin.cli.models.degradation_commands import (
    degradation_command,
    degradation_lines,
    read_steps,
    replace_plan_steps,
    step_lines,
)


def test_degradation_steps_are_sorted_by_wait() -> None:
    """Steps are sorted by wait. With equal waits, the step that gives up least comes first."""
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
def test_invalid_step_is_refused_with_its_text(bad: str) -> None:
    """The error quotes the step."""
    with pytest.raises(click.UsageError, match="must be"):
        read_steps((bad,), ())


def test_each_step_is_printed_with_its_wait() -> None:
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


CAP = {"step": "cap-output", "tokens": 64, "wait_s": 2.5}
SMALL = {"step": "fallback", "model": "small", "wait_s": None}
SET = {"steps": [CAP], "plans": {"free": [SMALL]}}


@pytest.mark.parametrize(
    ("steps", "plan", "want"),
    [
        pytest.param(
            [SMALL], None, {"steps": [SMALL], "plans": {"free": [SMALL]}}, id="default steps: plans keep theirs"
        ),
        pytest.param([CAP], "free", {"steps": [CAP], "plans": {"free": [CAP]}}, id="steps of a plan"),
        pytest.param([], "pro", {"steps": [CAP], "plans": {"free": [SMALL], "pro": []}}, id="a plan gives up nothing"),
        pytest.param(None, "free", {"steps": [CAP], "plans": {}}, id="a plan without steps of its own"),
        pytest.param(None, "pro", SET, id="a plan that had none"),
    ],
)
def test_other_plans_keep_their_steps(steps: list[dict[str, object]] | None, plan: str | None, want: object) -> None:
    """A change of one plan, or of the default steps, keeps the others."""
    assert replace_plan_steps(SET, steps, plan) == want


def test_default_steps_are_printed_before_plans() -> None:
    """The default steps are printed first, then those of each plan."""
    assert list(degradation_lines("m", SET | {"plans": {"pro": [], "free": [SMALL]}})) == [
        "cap-output 64: from 2.5 s of expected wait",
        "plan free:",
        "  fallback small: instead of a refusal",
        "plan pro:",
        "  gives up nothing",
    ]
    assert list(degradation_lines("m", {"steps": [], "plans": {}})) == ["m: gives up nothing"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--as-others"], "--as-others: give a --plan", id="as others, without a plan"),
        pytest.param(["--plan", "free", "--as-others", "--off"], "and no --off", id="as others, with off"),
        pytest.param(["--plan", "a", "--as-others", "--cached", "9"], "--as-others: give no steps", id="with steps"),
        pytest.param(["--off", "--cached", "9"], "--off: give no steps", id="off, with steps"),
    ],
)
def test_contradictory_options_are_refused(options: list[str], message: str) -> None:
    """Contradictory options are refused before any request."""
    found = CliRunner().invoke(degradation_command, ["m", *options])
    assert found.exit_code == 2
    assert message in found.output
