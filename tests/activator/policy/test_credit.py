"""How many requests an activator sends a replica: what it was told, for as long as that stands, and never in a spin."""

import pytest

from activator.policy.credit import FIRST_PAUSE_S, LONGEST_PAUSE_S, TOLD_S, TRY_S, Credit

STREAMS = 8


def told(credit: int | None, at_s: float = 0.0) -> Credit:
    """One that sent a request, and was answered at once."""
    found = Credit()
    found.sent(at_s)
    found.taken(credit, at_s)
    return found


@pytest.mark.parametrize(
    ("credit", "members", "running", "now_s", "want"),
    [
        pytest.param(Credit(), 1, 0, 0.0, 8, id="alone and not told it has all"),
        pytest.param(Credit(), 3, 0, 0.0, 2, id="not told it has its share"),
        pytest.param(Credit(), 20, 0, 0.0, 1, id="and one at least"),
        pytest.param(told(5), 3, 2, 1.0, 5, id="told it has that"),
        pytest.param(told(20), 3, 2, 1.0, 8, id="and no more than there are"),
        pytest.param(told(5), 3, 1, TOLD_S, 2, id="told too long ago it has its share"),
        pytest.param(told(5), 3, 5, TRY_S - 0.1, 5, id="at its credit it waits"),
        pytest.param(told(5), 3, 5, TRY_S, 6, id="and tries one more when it has sent nothing for a while"),
        pytest.param(told(2), 3, 5, TRY_S, 6, id="also beyond what it was told"),
        pytest.param(told(8), 3, 8, TRY_S, 8, id="but no more than there are"),
        pytest.param(told(None), 3, 2, TOLD_S, 2, id="a replica that tells nothing is not tried: it would not refuse"),
    ],
)
def test_limit(credit: Credit, members: int, running: int, now_s: float, want: int) -> None:
    """Of a replica with eight streams."""
    assert credit.limit(STREAMS, members, running, now_s) == want


def test_refused_it_pauses_and_sends_one() -> None:
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
        credit.sent(now_s)
        credit.refused(4, now_s)
        credit.refused(4, now_s)  # sent together with it
        assert credit.limit(STREAMS, 1, 2, now_s) == 2
        assert credit.changes_s(now_s) == now_s + pause_s
        now_s += pause_s
        assert credit.limit(STREAMS, 1, 2, now_s) == 3
    credit.sent(now_s)
    credit.taken(4, now_s)
    assert credit.limit(STREAMS, 1, 3, now_s) == 4


def test_an_answer_to_an_earlier_request_ends_no_pause() -> None:
    """It may have been on its way when the replica was full."""
    credit = told(4)
    credit.refused(4, 0.0)
    credit.taken(4, 0.01)
    assert credit.limit(STREAMS, 1, 2, 0.01) == 2
    assert credit.limit(STREAMS, 1, 2, FIRST_PAUSE_S) == 3


def test_it_is_asked_a_few_times_a_second() -> None:
    """However many requests wait, of a replica that is full for a minute."""
    credit, now_s, sent = Credit(), 0.0, 0
    while now_s < 60.0:
        if credit.limit(STREAMS, 1, 0, now_s) > 0:
            credit.sent(now_s)
            credit.refused(1, now_s)
            sent += 1
        now_s = credit.changes_s(now_s)
    assert sent <= 4 + 60.0 / LONGEST_PAUSE_S
