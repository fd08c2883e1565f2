"""The autoscaler's decisions and window averages equal Knative's, replayed through the command line.

The golden files hold cases, written by hand for each rule and drawn at random, with the answers of knative/serving
(commit 98e5ef9, Go 1.27, amd64). Each control breaks one rule.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane.scaling.policy import kpa, windows
from controlplane.scaling.policy.kpa import Decision, KpaState, Observation, ScalingSpec, decide
from kelvin.cli.models import scale_replay_policy
from tests.consistency.documented_facts import ROOT

GOLDEN = Path(__file__).parent
LIMIT_S = 120


def recorded(name: str) -> dict[str, Any]:
    """Return the recorded cases and answers of a golden file."""
    found: dict[str, Any] = json.loads((GOLDEN / f"scale_{name}.json").read_bytes())
    assert len(found["cases"]) == len(found["answers"]) > 80
    return found


def cases(name: str) -> bytes:
    """Return the cases as the commands read them."""
    return json.dumps({"cases": recorded(name)["cases"]}).encode()


@pytest.mark.parametrize("name", ["replay", "windows"])
def test_replay_equals_every_recorded_answer(name: str, tmp_path: Path) -> None:
    """Pod counts are equal, and averages are equal to the last digit."""
    file = tmp_path / "cases.json"
    file.write_bytes(cases(name))
    command = [sys.executable, "-m", "kelvin.cli.main", "scale", name, str(file)]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, timeout=LIMIT_S)
    assert json.loads(done.stdout)["cases"] == recorded(name)["answers"]
    assert done.stderr == b""


def wrong(answers: list[dict[str, Any]], name: str) -> list[str]:
    """Return the names of the cases whose answers differ from the recorded ones."""
    return [want["name"] for got, want in zip(answers, recorded(name)["answers"], strict=True) if got != want]


def replayed() -> list[dict[str, Any]]:
    """Return today's autoscaler decisions for the recorded cases."""
    found = scale_replay_policy.replay_cases(cases("replay")).cases
    return [
        {
            "name": case.name,
            "steps": [{"desired": step.desired, "ebc": step.ebc, "valid": step.valid} for step in case.steps],
        }
        for case in found
    ]


def averaged() -> list[dict[str, Any]]:
    """Return today's window averages for the recorded cases."""
    return [
        {"name": case.name, "averages": case.averages} for case in scale_replay_policy.average(cases("windows")).cases
    ]


def forgets_its_panic(spec: ScalingSpec, seen: Observation, memory: KpaState, now: float) -> Decision:
    return decide(spec, seen, replace(memory, max_panic_pods=0), now)


def lets_go_too_soon(spec: ScalingSpec, seen: Observation, memory: KpaState, now: float) -> Decision:
    return decide(replace(spec, stable_window_s=spec.stable_window_s - 1e-9), seen, memory, now)


def remembers_an_error(spec: ScalingSpec, seen: Observation, memory: KpaState, now: float) -> Decision:
    decision = decide(spec, seen, memory, now)
    return decision if decision.valid else replace(decision, state=replace(memory, panic_time_s=now))


def heeds_a_later_delay(spec: ScalingSpec, seen: Observation, memory: KpaState, now: float) -> Decision:
    buckets = kpa.initial_state(0, now, spec.scale_down_delay_s).delay_buckets
    return decide(spec, seen, replace(memory, delay_buckets=buckets), now)


def goes_up_without_end(spec: ScalingSpec, seen: Observation, memory: KpaState, now: float) -> Decision:
    return decide(replace(spec, max_scale_up_rate=1e9), seen, memory, now)


@pytest.mark.parametrize(
    ("broken", "caught"),
    [
        pytest.param(forgets_its_panic, "in panic the scale goes up, never down", id="the scale falls during panic"),
        pytest.param(
            lets_go_too_soon, "panic holds for a stable window and lets go a moment later", id="panic ends too early"
        ),
        pytest.param(remembers_an_error, "an error is not remembered, be it during panic", id="errors start panic"),
        pytest.param(heeds_a_later_delay, "a delay that comes later is not heeded", id="a later delay counts"),
        pytest.param(goes_up_without_end, "rates: one more is always possible", id="the scale-up rate has no limit"),
    ],
)
def test_a_broken_rule_is_caught(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Decision], caught: str) -> None:
    """The case that is named after a rule fails when the rule is broken."""
    assert wrong(replayed(), "replay") == []
    monkeypatch.setattr(scale_replay_policy, "decide", broken)
    assert caught in wrong(replayed(), "replay")


@pytest.mark.parametrize(
    ("name", "other", "caught"),
    [
        pytest.param("round_to_micro", lambda value: round(value, 6), "rounded to six digits", id="rounded to even"),
        pytest.param("_SMOOTHING", {}, "weighted, 24 s", id="a smoothing coefficient is missing"),
        pytest.param("OMITTED_WEIGHT", 0.001, "weighted, 6 s", id="an omitted weight is not zero"),
        pytest.param("_ZERO_TIME_NS", 0, "buckets of seven seconds", id="buckets begin at another time"),
    ],
)
def test_a_broken_window_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, other: object, caught: str) -> None:
    """A case that is named after a detail fails when the detail is broken."""
    assert wrong(averaged(), "windows") == []
    monkeypatch.setattr(windows, name, other)
    assert [case for case in wrong(averaged(), "windows") if case.startswith(caught)]
