"""Which version answers beside one that was only just named, as a table."""

import pytest

from controlplane.policy.overlap import meanwhile

OVERLAP_S = 120.0


@pytest.mark.parametrize(
    ("named", "since_s", "want"),
    [
        pytest.param("b", {"a": 0.0}, {"b": "a"}, id="it was never ready: the one before it"),
        pytest.param("b", {"a": 0.0, "b": 900.0}, {"b": "a"}, id="it was ready just now"),
        pytest.param("b", {"a": 0.0, "b": 880.0}, {}, id="it has been for long enough"),
        pytest.param("a", {"a": 0.0, "b": 900.0}, {}, id="back to the one before, which is no new one"),
        pytest.param("b", {}, {}, id="there is no other"),
        pytest.param("b", {"b": 900.0}, {}, id="nor any more"),
        pytest.param("ab", {"a": 0.0}, {"b": "a"}, id="of those that share, the one that is there"),
        pytest.param("ab", {"a": 0.0, "c": 800.0}, {"b": "a"}, id="before a later one that is not named"),
        pytest.param("d", {"a": 0.0, "c": 800.0}, {"d": "c"}, id="of those that are not named the latest"),
        pytest.param("bc", {"a": 0.0}, {"b": "a", "c": "a"}, id="both are new"),
        pytest.param("b", {"a": 900.0, "b": 900.0}, {}, id="seen at once, as by a control plane that begins"),
    ],
)
def test_meanwhile(named: str, since_s: dict[str, float], want: dict[str, str]) -> None:
    """At second 1000, of versions with one letter each."""
    assert meanwhile(frozenset(named), since_s, 1000.0, OVERLAP_S) == want


@pytest.mark.parametrize(("since_s", "want"), [({"a": 0.0}, {"b": "a"}), ({"a": 0.0, "b": 1000.0}, {})])
def test_no_overlap(since_s: dict[str, float], want: dict[str, str]) -> None:
    """Until its first replica, and no longer."""
    assert meanwhile("b", since_s, 1000.0, 0.0) == want
