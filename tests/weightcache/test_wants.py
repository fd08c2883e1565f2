"""Who waits for which chunk is known from both ends, and forgotten from both."""

from weightcache.policy.sharing import Key, Wants, by_position


def key(name: str) -> Key:
    return "acme", name


def test_from_both_ends() -> None:
    """Positions are each flow's own; what nobody wants any more is as if it never was."""
    wants = Wants()
    wants.enter("v", {key("a"): 0, key("both"): 1})
    wants.enter("w", {key("both"): 0})
    assert wants.by("v") == {key("a"): 0, key("both"): 1}
    assert wants.of(key("both")) == {"v": 1, "w": 0}
    wants.leave("v")
    assert "v" not in wants
    assert "w" in wants
    assert wants.of(key("both")) == {"w": 0}
    assert not wants.of(key("a"))
    wants.leave("w")
    assert repr(wants) == "<Wants flows=0 chunks=0>"


def test_by_position() -> None:
    """The order of the linear space."""
    assert by_position(["x", "y"], "acme") == {key("x"): 0, key("y"): 1}
