"""The spans of a finished request match its timeline."""

from dataclasses import replace

import pytest

from kelvin.contracts.timeline import Stage, Stamp
from kelvin.contracts.trace_context import TraceContext, span_id_of, trace_id_of
from kelvin.telemetry.policy.spans import (
    RequestFacts,
    RestoreFacts,
    is_sampled,
    is_sampled_for_caller,
    request_spans,
    restore_spans,
)

COLD = RequestFacts(
    request_id="req_1",
    caller=None,
    tenant="acme",
    model="m",
    version="v" * 64,
    runtime_id="r1",
    cold=True,
    outcome="ok",
    status=200,
    prompt_tokens=3,
    cached_tokens=1,
    completion_tokens=2,
    began_at_us=1_000_000,
    stamps=(Stamp(Stage.ROUTED, 10), Stamp(Stage.LEASED, 50), Stamp(Stage.DECIDED, 60), Stamp(Stage.DONE, 90)),
)


def test_each_stage_is_a_span_from_the_one_before_it() -> None:
    """Stage spans follow each other without a gap within the root span, each under the process that stamped it."""
    whole, *stages = request_spans(COLD)
    assert (whole.begin_us, whole.end_us, whole.parent_id, whole.is_server) == (1_000_000, 1_000_090, None, True)
    assert [(span.name, span.begin_us - 1_000_000, span.end_us - 1_000_000) for span in stages] == [
        ("routed", 0, 10),
        ("leased", 10, 50),
        ("decided", 50, 60),
        ("done", 60, 90),
    ]
    processes = [span.attributes["kelvin.process"] for span in stages]
    assert processes == ["activator", "runtime", "controlplane", "activator"]
    assert {span.parent_id for span in stages} == {whole.span_id}
    assert {span.trace_id for span in stages} == {whole.trace_id} == {trace_id_of("req_1")}
    assert len({span.span_id for span in (whole, *stages)}) == 5


def test_root_span_names_caller_model_and_outcome() -> None:
    """Unknown attributes are left out."""
    (whole, *_) = request_spans(replace(COLD, version=None))
    assert whole.attributes == {
        "kelvin.request_id": "req_1",
        "kelvin.tenant": "acme",
        "kelvin.model": "m",
        "kelvin.runtime_id": "r1",
        "kelvin.cold": True,
        "kelvin.outcome": "ok",
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "kelvin.cached_tokens": 1,
    }
    assert whole.failure is None
    assert request_spans(replace(COLD, outcome="overloaded"))[0].failure == "overloaded"


def test_request_trace_belongs_to_the_callers_trace() -> None:
    """The root span's parent is the caller's span."""
    spans = request_spans(replace(COLD, caller=TraceContext(7, 9, True)))
    assert {span.trace_id for span in spans} == {7}
    assert spans[0].parent_id == 9
    assert spans[0].span_id == span_id_of("req_1")


def test_a_cold_start_names_the_restore_that_it_waited_for() -> None:
    """A cold request links to the restore's trace. A warm request links to none."""
    (restore, *stages) = restore_spans(
        RestoreFacts("r1", "acme", "m", "v", "ok", 900_000, (Stamp(Stage.DECIDED, 5),), {"nvme": 12})
    )
    assert request_spans(COLD)[0].linked_span == (restore.trace_id, restore.span_id)
    assert request_spans(replace(COLD, cold=False))[0].linked_span is None
    assert restore.attributes["kelvin.bytes.nvme"] == 12
    assert [span.name for span in stages] == ["decided"]


def test_a_failed_restore_is_a_span_without_length() -> None:
    """Its failure is the error code."""
    (restore,) = restore_spans(RestoreFacts("x", "acme", "m", "v", "chunk_corrupt", 5))
    assert (restore.begin_us, restore.end_us, restore.failure) == (5, 5, "chunk_corrupt")


def test_errors_and_cold_starts_are_notable() -> None:
    """They are sampled at any rate."""
    warm = replace(COLD, cold=False)
    assert (COLD.is_always_sampled, warm.is_always_sampled, replace(warm, outcome="cancelled").is_always_sampled) == (
        True,
        False,
        True,
    )


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
def test_sampling_uses_the_lower_64_bits(trace_id: int, share: float, want: bool) -> None:
    assert is_sampled(trace_id, share) is want


def test_sampled_share_follows_the_setting() -> None:
    """Request ids are sampled evenly, and a larger share includes the smaller one."""
    ids = [trace_id_of(f"req_{number}") for number in range(10_000)]
    tenth = {trace_id for trace_id in ids if is_sampled(trace_id, 0.1)}
    fifth = {trace_id for trace_id in ids if is_sampled(trace_id, 0.2)}
    assert 900 < len(tenth) < 1100
    assert tenth < fifth


@pytest.mark.parametrize(
    ("caller", "share", "want"),
    [
        pytest.param(None, 1.0, True, id="no caller, in the share"),
        pytest.param(True, 1.0, True, id="sampled by the caller, in the share"),
        pytest.param(False, 1.0, False, id="not sampled by the caller"),
        pytest.param(True, 0.0, False, id="a caller can't force sampling"),
    ],
)
def test_caller_may_only_refuse_sampling(caller: bool | None, share: float, want: bool) -> None:
    """The caller can refuse sampling, but can't force it."""
    context = None if caller is None else TraceContext(LOW, 1, caller)
    assert is_sampled_for_caller(LOW, context, share) is want
