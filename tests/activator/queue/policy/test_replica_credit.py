"""How many requests an activator sends a replica: what it was told, for as long as that stands, and never in a spin."""

import pytest

from activator.queue.policy.replica_credit import CREDIT_VALID_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, TRY_S, ReplicaCredit

STREAMS = 8


def told(credit: int | None, at_s: float = 0.0) -> ReplicaCredit:
    """One that sent a request, and was answered at once."""
    found = ReplicaCredit()
    found.record_sent(at_s)
    found.record_answer(credit, at_s)
    return found


@pytest.mark.parametrize(
    ("credit", "members", "running", "now_s", "want"),
    [
        pytest.param(ReplicaCredit(), 1, 0, 0.0, 8, id="alone and not told it has all"),
        pytest.param(ReplicaCredit(), 3, 0, 0.0, 2, id="not told it has its share"),
        pytest.param(ReplicaCredit(), 20, 0, 0.0, 1, id="and one at least"),
        pytest.param(told(5), 3, 2, 1.0, 5, id="told it has that"),
        pytest.param(told(20), 3, 2, 1.0, 8, id="and no more than there are"),
        pytest.param(told(5), 3, 1, CREDIT_VALID_S, 2, id="told too long ago it has its share"),
        pytest.param(told(5), 3, 5, TRY_S - 0.1, 5, id="at its credit it waits"),
        pytest.param(told(5), 3, 5, TRY_S, 6, id="and tries one more when it has sent nothing for a while"),
        pytest.param(told(2), 3, 5, TRY_S, 6, id="also beyond what it was told"),
        pytest.param(told(8), 3, 8, TRY_S, 8, id="but no more than there are"),
        pytest.param(
            told(None), 3, 2, CREDIT_VALID_S, 2, id="a replica that tells nothing is not tried: it would not refuse"
        ),
    ],
)
def test_limit_follows_credit_refusals_and_pauses(
    credit: ReplicaCredit, members: int, running: int, now_s: float, want: int
) -> None:
    """Of a replica with eight streams."""
    assert credit.limit(STREAMS, members, running, now_s) == want


def test_refusal_pauses_the_replica_then_allows_one_request() -> None:
    """What is inside may be replaced; each refusal doubles the pause; an answer ends it."""
    credit, now_s = told(4), 0.0
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
        credit.record_refusal(4, now_s)  # sent together with it
        assert credit.limit(STREAMS, 1, 2, now_s) == 2
        assert credit.next_change_s(now_s) == now_s + pause_s
        now_s += pause_s
        assert credit.limit(STREAMS, 1, 2, now_s) == 3
    credit.record_sent(now_s)
    credit.record_answer(4, now_s)
    assert credit.limit(STREAMS, 1, 3, now_s) == 4


def test_an_answer_to_an_earlier_request_ends_no_pause() -> None:
    """It may have been on its way when the replica was full."""
    credit = told(4)
    credit.record_refusal(4, 0.0)
    credit.record_answer(4, 0.01)
    assert credit.limit(STREAMS, 1, 2, 0.01) == 2
    assert credit.limit(STREAMS, 1, 2, FIRST_PAUSE_S) == 3


def test_full_replica_is_tried_a_few_times_a_second() -> None:
    """However many requests wait, of a replica that is full for a minute."""
    credit, now_s, record_sent = ReplicaCredit(), 0.0, 0
    while now_s < 60.0:
        if credit.limit(STREAMS, 1, 0, now_s) > 0:
            credit.record_sent(now_s)
            credit.record_refusal(1, now_s)
            record_sent += 1
        now_s = credit.next_change_s(now_s)
    assert record_sent <= 4 + 60.0 / LONGEST_PAUSE_S
