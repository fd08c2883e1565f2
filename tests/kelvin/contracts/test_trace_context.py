"""A caller's trace is parsed as W3C Trace Context requires. Ids that are derived from a name are always the same."""

import pytest

from kelvin.contracts.trace_context import TraceContext, outgoing_trace_context, parse, span_id_of, trace_id_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KNOWN = TraceContext(int(TRACE, 16), int(SPAN, 16), True)


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        pytest.param(f"00-{TRACE}-{SPAN}-01", KNOWN, id="a sampled trace"),
        pytest.param(
            f"00-{TRACE}-{SPAN}-00",
            TraceContext(KNOWN.trace_id, KNOWN.span_id, False),
            id="a trace that is not sampled",
        ),
        pytest.param(f"00-{TRACE}-{SPAN}-ff", KNOWN, id="unknown flags are ignored"),
        pytest.param(f"cc-{TRACE}-{SPAN}-01-more", KNOWN, id="a later version may have more fields"),
        pytest.param(f"cc-{TRACE}-{SPAN}-01", KNOWN, id="a later version may have no more fields"),
        pytest.param(f"cc-{TRACE}-{SPAN}-01more", None, id="more text without a dash is invalid"),
        pytest.param(f"00-{TRACE}-{SPAN}-01-more", None, id="version 00 has no more fields"),
        pytest.param(f"ff-{TRACE}-{SPAN}-01", None, id="version ff is forbidden"),
        pytest.param(f"00-{'0' * 32}-{SPAN}-01", None, id="a trace id of zeros is invalid"),
        pytest.param(f"00-{TRACE}-{'0' * 16}-01", None, id="a span id of zeros is invalid"),
        pytest.param(f"00-{TRACE.upper()}-{SPAN}-01", None, id="upper case is not allowed"),
        pytest.param(f"00-{TRACE[:-1]}-{SPAN}-01", None, id="too short"),
        pytest.param("", None, id="nothing"),
    ],
)
def test_invalid_traceparent_is_ignored(raw: str, want: TraceContext | None) -> None:
    """An invalid header gives None, as the specification requires it to be ignored."""
    assert parse(raw.encode()) == want


def test_traceparent_round_trips() -> None:
    """`str` of a trace context is the header."""
    assert str(KNOWN) == f"00-{TRACE}-{SPAN}-01"


def test_outgoing_call_carries_our_span_in_the_trace() -> None:
    """The outgoing context has a new parent, and the same trace and flag."""
    outgoing = outgoing_trace_context(KNOWN, "req_1")
    assert outgoing == TraceContext(KNOWN.trace_id, span_id_of("req_1"), True)
    assert outgoing_trace_context(None, "req_1") is None


def test_ids_belong_to_their_names() -> None:
    """Trace and span ids are the same each time, differ by name and stage, and fit their number of bits."""
    assert trace_id_of("req_1") == trace_id_of("req_1") != trace_id_of("req_2")
    assert len({span_id_of("req_1"), span_id_of("req_1", "routed"), span_id_of("req_2")}) == 3
    assert 0 < trace_id_of("req_1") < 1 << 128
    assert 0 < span_id_of("req_1", "a stage with a very long name") < 1 << 64
