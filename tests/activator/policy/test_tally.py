"""Tokens by deadline: the sum of what has less time, to the sixteenth of a second, whatever came and went."""

from hypothesis import given
from hypothesis import strategies as st

from activator.policy.tally import FINEST, Tally

ENTRIES = st.lists(st.tuples(st.floats(0, 100_000), st.integers(1, 100)), max_size=40)


@given(ENTRIES, st.floats(0, 100_000), st.integers(0, 40))
def test_it_is_the_sum(entries: list[tuple[float, int]], deadline_s: float, leaving: int) -> None:
    """Of those that are before by a whole sixteenth, after some have left; nothing is kept of who is gone."""
    tally = Tally()
    for at_s, tokens in entries:
        tally.add(at_s, tokens)
    for at_s, tokens in entries[:leaving]:
        tally.add(at_s, -tokens)
    stay = entries[leaving:]
    want = sum(tokens for at_s, tokens in stay if int(at_s * FINEST) < int(deadline_s * FINEST))
    assert tally.before(deadline_s) == want
    assert tally.total() == sum(tokens for _, tokens in stay)
    for at_s, tokens in stay:
        tally.add(at_s, -tokens)
    assert not any(tally._sums)
