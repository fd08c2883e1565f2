"""Read the cases of `kelvin scale replay` and `windows`, and run the control plane's own code on them. Pure.

Errors name the case, the step and the rule.
"""

from dataclasses import replace
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from controlplane.scaling.policy.kpa import KpaState, Observation, ScalingSpec, decide, initial_state
from controlplane.scaling.policy.windows import LinearWindow, WeightedWindow
from kelvin.contracts.wire import MAX_RULE, BadJson, Wire, convert, decode_any

# Knative is in Go: its durations are 64-bit nanoseconds (292 years), its pod counts are 32-bit.
Seconds = Annotated[float, msgspec.Meta(ge=-9e9, le=9e9)]
Pods = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
MAX_BUCKETS: Final = 1_000_000
_LONGEST_NAME: Final = 80
T = TypeVar("T")


class BadCase(Exception):
    """Input that is not in the documented form. The message names case, step and rule."""


class SpecFields(Wire, frozen=True):
    """The given fields of a spec. A null is the same as an absent field, here and in all structs below."""

    scaling_metric: Literal["concurrency", "rps"] | None = None
    target_value: float | None = None
    total_value: float | None = None
    target_burst_capacity: float | None = None
    panic_threshold: float | None = None
    max_scale_up_rate: float | None = None
    max_scale_down_rate: float | None = None
    stable_window_s: Seconds | None = None
    scale_down_delay_s: Seconds | None = None
    activation_scale: Pods | None = None
    initial_scale: Pods | None = None
    reachable: bool | None = None

    def over(self, spec: ScalingSpec) -> ScalingSpec:
        """Return `spec` with the given fields replaced."""
        return replace(
            spec, **{name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        )


class PresetState(Wire, frozen=True):
    """State that the autoscaler has before the first step."""

    panic_time_s: Seconds | msgspec.UnsetType | None = msgspec.UNSET  # null: not in panic mode
    max_panic_pods: Pods | None = None


class ScaleCase(Wire, frozen=True):
    """Input of one autoscaler. Its steps are decoded one by one, so that an error names the step."""

    steps: list[Any]
    name: str = ""
    spec: SpecFields | None = None
    ready_pods_at_create: Pods | None = None
    created_at_s: Seconds | None = None
    preset_state: PresetState | None = None

    def state(self, spec: ScalingSpec) -> KpaState:
        """Return the autoscaler's initial state, with the preset values applied."""
        state = initial_state(self.ready_pods_at_create or 0, self.created_at_s or 0.0, spec.scale_down_delay_s)
        preset = self.preset_state or PresetState()
        if not isinstance(preset.panic_time_s, msgspec.UnsetType):
            state = replace(state, panic_time_s=preset.panic_time_s)
        if preset.max_panic_pods is not None:
            state = replace(state, max_panic_pods=preset.max_panic_pods)
        return state


class ReplayStep(Wire, frozen=True):
    """One tick. `update_spec` changes the spec right before it."""

    t_s: Seconds
    stable: float | None = None
    panic: float | None = None
    ready_pods: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)] | None = None
    metric_error: bool | None = None
    ready_error: bool | None = None
    update_spec: SpecFields | None = None


class StepResult(Wire, frozen=True):
    """The autoscaler's decision. If `valid` is False, it would make none."""

    desired: int
    ebc: int
    valid: bool


class ScaleResult(Wire, frozen=True):
    """The decisions of one case, one per step."""

    name: str
    steps: list[StepResult]


class ScaleResults(Wire, frozen=True):
    """The results of all cases, in input order."""

    cases: list[ScaleResult]


class WindowCase(Wire, frozen=True):
    """Input of one window. Its operations are decoded one by one, so that an error names the operation."""

    ops: list[Any]
    name: str = ""
    kind: Literal["timed", "weighted"] = "timed"
    window_s: Annotated[float, msgspec.Meta(gt=0, le=9e9)] = 60.0
    granularity_s: Annotated[float, msgspec.Meta(ge=1, le=9e9)] = 1.0  # buckets are keyed by whole seconds


class WindowOperation(Wire, frozen=True):
    """Record the value `v`, or compute an average, which has no `v`."""

    op: Literal["record", "average"]
    t: Seconds
    v: float | None = None


class WindowResult(Wire, frozen=True):
    """The averages of one window. An average is null if the sum is not finite."""

    name: str
    averages: list[float]


class WindowResults(Wire, frozen=True):
    """The results of all windows, in input order."""

    cases: list[WindowResult]


def read_cases(raw: bytes, kind: type[T]) -> list[tuple[str, T]]:
    """Return the cases of a file, each with its title for errors. Raises BadCase."""
    try:
        document = decode_any(raw)
    except BadJson as error:
        raise BadCase(f"not JSON: {error}") from error
    if not isinstance(document, dict) or document.keys() != {"cases"} or not isinstance(document["cases"], list):
        raise BadCase('must be {"cases": [...]} and nothing beside')
    named = [(_title(number, case), case) for number, case in enumerate(document["cases"], start=1)]
    return [(title, read_as(case, kind, title)) for title, case in named]


def read_as(value: object, kind: type[T], where: str) -> T:
    """Convert a value. Raises BadCase with `where` and the rule."""
    try:
        return convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadCase(f"{where}: {str(error)[:MAX_RULE]}") from error


def _title(number: int, case: object) -> str:
    name = case.get("name") if isinstance(case, dict) else None
    return f"case {number}" + (f" ({name[:_LONGEST_NAME]!r})" if isinstance(name, str) else "")


def replay_cases(raw: bytes) -> ScaleResults:
    """Run each case through an autoscaler of its own. Raises BadCase."""
    return ScaleResults(cases=[_replay_case(case, title) for title, case in read_cases(raw, ScaleCase)])


def average(raw: bytes) -> WindowResults:
    """Run each case through a window of its own. Raises BadCase."""
    return WindowResults(cases=[_replay_window(case, title) for title, case in read_cases(raw, WindowCase)])


def _replay_case(case: ScaleCase, title: str) -> ScaleResult:
    spec = ScalingSpec() if case.spec is None else case.spec.over(ScalingSpec())
    state, results = case.state(spec), []
    for number, value in enumerate(case.steps, start=1):
        step = read_as(value, ReplayStep, f"{title}, step {number}")
        if step.update_spec is not None:
            spec = step.update_spec.over(spec)
        observation = Observation(
            stable=step.stable or 0.0,
            panic=step.panic or 0.0,
            ready_pods=step.ready_pods or 0,
            metric_error=bool(step.metric_error),
            ready_error=bool(step.ready_error),
        )
        decision = decide(spec, observation, state, step.t_s)
        state = decision.state
        results.append(StepResult(desired=decision.desired, ebc=decision.excess_burst_capacity, valid=decision.valid))
    return ScaleResult(name=case.name, steps=results)


def _replay_window(case: WindowCase, title: str) -> WindowResult:
    if case.window_s / case.granularity_s > MAX_BUCKETS:
        raise BadCase(f"{title}: window_s={case.window_s:g}: must be {MAX_BUCKETS} buckets or fewer")
    window = (WeightedWindow if case.kind == "weighted" else LinearWindow)(case.window_s, case.granularity_s)
    averages = []
    for number, value in enumerate(case.ops, start=1):
        where = f"{title}, op {number}"
        operation = read_as(value, WindowOperation, where)
        if operation.op == "average":
            averages.append(window.average(operation.t))
        elif operation.v is None:
            raise BadCase(f"{where}: Object missing required field `v`")
        else:
            window.record(operation.t, operation.v)
    return WindowResult(name=case.name, averages=averages)
