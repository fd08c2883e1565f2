"""Any series, recorded or written by hand, through the decider and the windows that the control plane decides by."""

from controlplane.policy.kpa import Observed, ScalingSpec, decide
from controlplane.policy.windows import LinearWindow, WeightedWindow
from kelvin.policy.scale_cases import (
    MAX_BUCKETS,
    BadCase,
    Operation,
    ScaleCase,
    ScaleResult,
    ScaleResults,
    Step,
    StepResult,
    WindowCase,
    WindowResult,
    WindowResults,
    read_as,
    read_cases,
)


def replay(raw: bytes) -> ScaleResults:
    """Each case through a decider of its own. Raises BadCase."""
    return ScaleResults(cases=[_decided(case, title) for title, case in read_cases(raw, ScaleCase)])


def average(raw: bytes) -> WindowResults:
    """Each case through a window of its own. Raises BadCase."""
    return WindowResults(cases=[_averaged(case, title) for title, case in read_cases(raw, WindowCase)])


def _decided(case: ScaleCase, title: str) -> ScaleResult:
    spec = ScalingSpec() if case.spec is None else case.spec.over(ScalingSpec())
    memory, results = case.memory(spec), []
    for number, value in enumerate(case.steps, start=1):
        step = read_as(value, Step, f"{title}, step {number}")
        if step.update_spec is not None:
            spec = step.update_spec.over(spec)
        seen = Observed(
            stable=step.stable or 0.0,
            panic=step.panic or 0.0,
            ready_pods=step.ready_pods or 0,
            metric_error=bool(step.metric_error),
            ready_error=bool(step.ready_error),
        )
        decision = decide(spec, seen, memory, step.t_s)
        memory = decision.memory
        results.append(StepResult(desired=decision.desired, ebc=decision.excess_burst_capacity, valid=decision.valid))
    return ScaleResult(name=case.name, steps=results)


def _averaged(case: WindowCase, title: str) -> WindowResult:
    if case.window_s / case.granularity_s > MAX_BUCKETS:
        raise BadCase(f"{title}: window_s={case.window_s:g}: must be {MAX_BUCKETS} buckets or fewer")
    window = (WeightedWindow if case.kind == "weighted" else LinearWindow)(case.window_s, case.granularity_s)
    averages = []
    for number, value in enumerate(case.ops, start=1):
        where = f"{title}, op {number}"
        operation = read_as(value, Operation, where)
        if operation.op == "average":
            averages.append(window.average(operation.t))
        elif operation.v is None:
            raise BadCase(f"{where}: Object missing required field `v`")
        else:
            window.record(operation.t, operation.v)
    return WindowResult(name=case.name, averages=averages)
