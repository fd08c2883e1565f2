"""A one-time token is known as spent until it could not be used anyway, within bounds."""

from hypothesis import given
from hypothesis import strategies as st

from activator.policy.spent import Spent

_steps = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9), st.integers(0, 3)), max_size=60)


@given(_steps)
def test_any_history(steps: list[tuple[str, int, int]]) -> None:
    """Against a dictionary that forgets nothing."""
    spent, ends, now_s = Spent(3), dict[str, int](), 0
    for jti, lives_s, later_s in steps:
        now_s += later_s
        full = spent.is_full(now_s)
        alive = {name for name, end_s in ends.items() if end_s > now_s}
        assert full == (len(alive) >= 3)
        assert spent.has(("i", jti)) == (jti in alive)
        if not full and jti not in alive:
            spent.spend(("i", jti), now_s + lives_s)
            ends[jti] = now_s + lives_s
        spent.check_integrity()


def test_issuers_are_apart() -> None:
    """The same name of two issuers is two tokens."""
    spent = Spent()
    spent.spend(("a", "1"), 9)
    assert spent.has(("a", "1"))
    assert not spent.has(("b", "1"))
