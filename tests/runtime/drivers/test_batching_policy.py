"""Forwards respect the token limit, no request is held up, and waiting stops where it does not pay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.drivers.batching_policy import FIRST_WAIT_S, MAX_WAIT_S, BatchingWindow, BatchObservation, choose_rows


@pytest.mark.parametrize(
    ("queues", "max_tokens", "want"),
    [
        pytest.param([], 10, (), id="nothing waits"),
        pytest.param([[5]], 10, (1,), id="one alone"),
        pytest.param([[50]], 10, (1,), id="the first is taken whatever its length"),
        pytest.param([[50], [1]], 10, (1, 0), id="no other row beside one that is too long"),
        pytest.param([[2], [2], [2]], 6, (1, 1, 1), id="all that fit exactly"),
        pytest.param([[2], [2], [2]], 5, (1, 1, 0), id="not one more"),
        pytest.param([[2], [3]], 5, (1, 0), id="padding counts"),
        pytest.param([[1] * 9, [1], [1, 1]], 6, (3, 1, 2), id="one of each in turn"),
        pytest.param([[1] * 9, [1]], 4, (3, 1), id="many sequences hold no other up"),
    ],
)  # fmt: skip
def test_choose_rows(queues: list[list[int]], max_tokens: int, want: tuple[int, ...]) -> None:
    assert choose_rows(queues, max_tokens) == want


@given(st.lists(st.lists(st.integers(1, 20), max_size=6), max_size=6), st.integers(1, 100))
def test_chosen_rows_fit_and_progress(queues: list[list[int]], max_tokens: int) -> None:
    """At least one row is taken, never more than fits, and always from the front."""
    taken = choose_rows(queues, max_tokens)
    rows = [length for lengths, count in zip(queues, taken, strict=True) for length in lengths[:count]]
    assert bool(rows) == any(queues)
    assert len(rows) <= 1 or len(rows) * max(rows) <= max_tokens


ALONE = BatchObservation(requests=1, joined=0, waited_s=0.0, compute_s=0.010)


@pytest.mark.parametrize(
    ("wait_s", "batch", "want_s"),
    [
        pytest.param(0.0, BatchObservation(4, 3, 0.0, 0.012), FIRST_WAIT_S, id="sharing that saved opens it"),
        pytest.param(0.0, BatchObservation(4, 3, 0.0, 0.041), 0.0, id="sharing that saved nothing does not"),
        pytest.param(0.001, BatchObservation(4, 3, 0.001, 0.012), 0.002, id="more was saved than waited: doubled"),
        pytest.param(0.004, BatchObservation(4, 3, 0.004, 0.012), MAX_WAIT_S, id="never past its cap"),
        pytest.param(0.004, BatchObservation(2, 1, 0.004, 0.018), 0.002, id="less was saved than waited: halved"),
        pytest.param(
            0.004, BatchObservation(4, 0, 0.0, 0.012), 0.004 / 2, id="company that was there anyway is no reason"
        ),
        pytest.param(0.004, BatchObservation(1, 0, 0.004, 0.010), 0.002, id="none joined: halved"),
        pytest.param(FIRST_WAIT_S, BatchObservation(1, 0, FIRST_WAIT_S, 0.010), 0.0, id="none joined again: closed"),
    ],
)
def test_window_doubles_if_sharing_paid(wait_s: float, batch: BatchObservation, want_s: float) -> None:
    assert BatchingWindow(wait_s=wait_s, single_request_s=0.010).next_window(batch).wait_s == pytest.approx(want_s)


def test_without_a_measure_nothing_pays() -> None:
    """The saving of sharing is unknown until a request was alone."""
    unknown = BatchingWindow().next_window(BatchObservation(4, 3, 0.0, 0.001))
    assert (unknown.wait_s, unknown.single_request_s) == (0.0, None)
    known = unknown.next_window(ALONE)
    assert known.single_request_s == 0.010
    assert known.next_window(BatchObservation(1, 0, 0.0, 0.020)).single_request_s == pytest.approx(0.012)


BATCHES = st.builds(
    BatchObservation, requests=st.integers(1, 50), joined=st.integers(0, 49), waited_s=st.floats(0, 0.01),
    compute_s=st.floats(1e-6, 1.0),
)  # fmt: skip


@given(st.lists(BATCHES, max_size=30), st.floats(0.0005, 0.05))
def test_window_stays_within_its_cap(batches: list[BatchObservation], cap_s: float) -> None:
    """The window stays within its cap, and closes after a few lone requests."""
    window = BatchingWindow(cap_s=cap_s)
    for batch in batches:
        window = window.next_window(batch)
        assert 0 <= window.wait_s <= cap_s
    for _ in range(8):
        window = window.next_window(ALONE)
    assert window.wait_s == 0
