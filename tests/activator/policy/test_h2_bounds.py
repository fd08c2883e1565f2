"""Frames that cost more than they carry: how many of each kind may come, and when there is room again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.policy.h2_bounds import ACK, END_HEADERS, END_STREAM, Bucket, FrameBounds, Http2Limits, Kind, Rate

LIMITS = Http2Limits(streams=10, stall_s=1, block_bytes=1000, continuations=2)


def _passed(bounds: FrameBounds, kind: int, flags: int = 0, length: int = 0, *, at_s: float = 0.0) -> int:
    """How many of the same kind may come at once, for one stream."""
    for count in range(10_000):
        if bounds.too_much(kind, flags, 1, length, at_s) is not None:
            return count
    return 10_000


@pytest.mark.parametrize(("kind", "flags", "length", "at_once", "a_second"), [
    pytest.param(Kind.RST_STREAM, 0, 4, 200, 20, id="resets"),
    pytest.param(Kind.SETTINGS, 0, 0, 16, 1, id="settings"),
    pytest.param(Kind.SETTINGS, ACK, 0, 2000, 500, id="acknowledged settings"),
    pytest.param(Kind.PING, 0, 8, 64, 10, id="pings"),
    pytest.param(Kind.PING, ACK, 8, 64, 10, id="answers to pings that nobody sent"),
    pytest.param(Kind.PRIORITY, 0, 5, 2000, 500, id="priorities"),
    pytest.param(Kind.WINDOW_UPDATE, 0, 4, 2000, 500, id="room for what was not sent"),
    pytest.param(Kind.GOAWAY, 0, 8, 2000, 500, id="goodbyes"),
    pytest.param(0xEE, 0, 16_000, 2000, 500, id="what nobody knows, however long"),
    pytest.param(Kind.DATA, 0, 0, 2000, 500, id="empty data"),
    pytest.param(Kind.DATA, 0, 511, 2000, 500, id="little data"),
    pytest.param(Kind.DATA, 0, 512, 10_000, 10_000, id="data is bounded elsewhere"),
    pytest.param(Kind.DATA, END_STREAM, 0, 2000, 500, id="the end of a body that was not begun"),
    pytest.param(Kind.HEADERS, END_HEADERS, 99, 1 + 2000, 500, id="headers of one stream, of which the first begin it"),
    pytest.param(Kind.HEADERS, END_HEADERS | END_STREAM, 99, 1 + 2000, 500, id="such headers that end it as well"),
])  # fmt: skip
def test_so_many_may_come(kind: int, flags: int, length: int, at_once: int, a_second: int) -> None:
    """At once, and a second later."""
    bounds = FrameBounds(LIMITS)
    assert _passed(bounds, kind, flags, length) == at_once
    assert _passed(bounds, kind, flags, length, at_s=1.0) == a_second


@pytest.mark.parametrize(("kind", "flags", "length"), [
    pytest.param(Kind.DATA, END_STREAM, 0, id="with nothing"),
    pytest.param(Kind.DATA, END_STREAM, 16_000, id="with much"),
    pytest.param(Kind.HEADERS, END_HEADERS | END_STREAM, 9, id="with trailers"),
])  # fmt: skip
def test_the_end_of_each_body_is_free(kind: int, flags: int, length: int) -> None:
    """Once for each that was begun, however many are open; those that never come are not saved up without bound."""
    bounds = FrameBounds(LIMITS)
    for first in range(1, 10_000, 20):
        numbers = range(first, first + 20, 2)
        begun = [bounds.too_much(Kind.HEADERS, END_HEADERS, number, 99, 0.0) for number in numbers]
        ended = [bounds.too_much(kind, flags, number, length, 0.0) for number in numbers]
        assert begun + ended == [None] * 20
    assert _passed(bounds, Kind.DATA, END_STREAM) == 2000
    for number in range(10_001, 20_000, 2):
        assert bounds.too_much(Kind.HEADERS, END_HEADERS, number, 99, 100.0) is None
    assert _passed(bounds, Kind.DATA, END_STREAM, at_s=100.0) == 2 * LIMITS.streams + 2000


def test_room_that_answers_our_data_is_free() -> None:
    """Two for each frame that was sent, and not kept without bound."""
    bounds = FrameBounds(LIMITS)
    for _ in range(1000):
        bounds.sent_data()
    assert _passed(bounds, Kind.WINDOW_UPDATE, 0, 4) == 2000 + 2000
    for _ in range(1_000_000):
        bounds.sent_data()
    assert _passed(bounds, Kind.WINDOW_UPDATE, 0, 4) == 4000


@pytest.mark.parametrize(("frames", "why"), [
    pytest.param([(Kind.HEADERS, END_HEADERS, 1000)], None, id="as long as may be"),
    pytest.param([(Kind.HEADERS, END_HEADERS, 1001)], "a header list", id="a byte longer"),
    pytest.param([(Kind.HEADERS, 0, 500), (Kind.CONTINUATION, END_HEADERS, 501)], "a header list", id="in two parts"),
    pytest.param([(Kind.HEADERS, 0, 1), (Kind.CONTINUATION, 0, 0), (Kind.CONTINUATION, 0, 0)], None, id="in three"),
    pytest.param([(Kind.HEADERS, 0, 1), *[(Kind.CONTINUATION, 0, 0)] * 3], "CONTINUATION", id="in one too many"),
    pytest.param([(Kind.HEADERS, END_HEADERS, 900)] * 50, None, id="each list for itself"),
])  # fmt: skip
def test_a_header_list_is_bounded(frames: list[tuple[int, int, int]], why: str | None) -> None:
    """With all that continues it."""
    bounds = FrameBounds(LIMITS)
    told = [bounds.too_much(kind, flags, 1, length, 0.0) for kind, flags, length in frames]
    assert [said for said in told if said] == ([why] if why else [])
    assert bounds.in_block == (not frames[-1][1] & END_HEADERS)


@given(st.lists(st.floats(0, 0.2), max_size=400), st.floats(0.5, 50), st.integers(1, 30))
def test_no_span_of_time_has_more_than_its_rate(steps: list[float], per_s: float, burst: int) -> None:
    """And a burst beyond it."""
    bucket, now_s, passed = Bucket(Rate(per_s, burst)), 0.0, []
    for step in steps:
        now_s += step
        if bucket.try_take(now_s):
            passed.append(now_s)
    for first, begun_s in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= burst + per_s * (passed[last] - begun_s) + 1e-6
