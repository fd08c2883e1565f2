"""ReplicaCredit: how many requests a replica gets, by the credit that it reported, and pauses after refusals."""

import pytest

from activator.queue.policy.replica_credit import CREDIT_VALID_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, TRY_S, ReplicaCredit

STREAMS = 8


def credit_after_answer(credit: int | None, at_s: float = 0.0) -> ReplicaCredit:
    """Return the credit after one request that was answered at once with this credit."""
    found = ReplicaCredit()
    found.record_sent(at_s)
    found.record_answer(credit, at_s)
    return found


@pytest.mark.parametrize(
    ("credit", "members", "running", "now_s", "want"),
    [
        pytest.param(ReplicaCredit(), 1, 0, 0.0, 8, id="alone, without a credit: all streams"),
        pytest.param(ReplicaCredit(), 3, 0, 0.0, 2, id="without a credit: its share"),
        pytest.param(ReplicaCredit(), 20, 0, 0.0, 1, id="its share is at least one"),
        pytest.param(credit_after_answer(5), 3, 2, 1.0, 5, id="with a credit: the credit"),
        pytest.param(credit_after_answer(20), 3, 2, 1.0, 8, id="a credit above the streams: all streams"),
        pytest.param(credit_after_answer(5), 3, 1, CREDIT_VALID_S, 2, id="an old credit: its share"),
        pytest.param(credit_after_answer(5), 3, 5, TRY_S - 0.1, 5, id="at its credit it waits"),
        pytest.param(credit_after_answer(5), 3, 5, TRY_S, 6, id="after a pause it tries one more"),
        pytest.param(credit_after_answer(2), 3, 5, TRY_S, 6, id="it tries one more beyond the credit too"),
        pytest.param(credit_after_answer(8), 3, 8, TRY_S, 8, id="it never exceeds the streams"),
        pytest.param(credit_after_answer(None), 3, 2, CREDIT_VALID_S, 2, id="a replica without credits is not tried"),
    ],
)
def test_limit_follows_credit_refusals_and_pauses(
    credit: ReplicaCredit, members: int, running: int, now_s: float, want: int
) -> None:
    """The replica has eight streams."""
    assert credit.limit(STREAMS, members, running, now_s) == want


def test_refusal_pauses_the_replica_then_allows_one_request() -> None:
    """Running requests may be replaced during the pause. Each refusal doubles the pause; an answer ends it."""
    credit, now_s = credit_after_answer(4), 0.0
    for pause_s in (
        FIRST_PAUSE_S,
        2 * FIRST_PAUSE_S,
        4 * FIRST_PAUSE_S,
        8 * FIRST_PAUSE_S,
        LONGEST_PAUSE_S,
        LONGEST_PAUSE_S,
    ):
        credit.record_sent(now_s)
        credit.record_refusal(4, now_s)
        credit.record_refusal(4, now_s)  # a second refusal of the same moment
        assert credit.limit(STREAMS, 1, 2, now_s) == 2
        assert credit.next_change_s(now_s) == now_s + pause_s
        now_s += pause_s
        assert credit.limit(STREAMS, 1, 2, now_s) == 3
    credit.record_sent(now_s)
    credit.record_answer(4, now_s)
    assert credit.limit(STREAMS, 1, 3, now_s) == 4


def test_an_answer_to_an_earlier_request_ends_no_pause() -> None:
    """The answer may have been on its way when the replica was full."""
    credit = credit_after_answer(4)
    credit.record_refusal(4, 0.0)
    credit.record_answer(4, 0.01)
    assert credit.limit(STREAMS, 1, 2, 0.01) == 2
    assert credit.limit(STREAMS, 1, 2, FIRST_PAUSE_S) == 3


def test_full_replica_is_tried_a_few_times_a_second() -> None:
    """Many requests wait for a replica that is full for a minute."""
    credit, now_s, sent = ReplicaCredit(), 0.0, 0
    while now_s < 60.0:
        if credit.limit(STREAMS, 1, 0, now_s) > 0:
            credit.record_sent(now_s)
            credit.record_refusal(1, now_s)
            sent += 1
        now_s = credit.next_change_s(now_s)
    assert sent <= 4 + 60.0 / LONGEST_PAUSE_S
