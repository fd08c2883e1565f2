"""The cache is bounded in number and size, and one tenant's large values do not evict another tenant's."""

from snapshotter.store.tenant_cache import TenantCache


def test_large_values_are_few() -> None:
    """The size limit holds even if there is room for more values: a few large plans would fill the memory otherwise."""
    recent = TenantCache[str](max_values=100, size_limit=10)
    for number in range(20):
        recent.put("acme", str(number), "plan", 4)
    assert [recent.get("acme", name) for name in ("17", "18", "19")] == [None, "plan", "plan"]
    assert repr(recent) == "<TenantCache kept=2/100 size=8/10>"


def test_small_values_are_bounded_in_number() -> None:
    """The oldest value is evicted. A value that is put again counts once, as the newest."""
    recent = TenantCache[str](max_values=2, size_limit=10)
    for name in ("a", "b", "a", "c"):
        recent.put("acme", name, name, 0)
    assert [recent.get("acme", name) for name in "abc"] == ["a", None, "c"]


def test_tenant_with_most_gives_way() -> None:
    """A tenant that puts one large value after another evicts only its own."""
    recent = TenantCache[str](max_values=100, size_limit=10)
    recent.put("victim", "plan", "plan", 3)
    for number in range(5):
        recent.put("acme", str(number), "large", 4)
    assert recent.get("victim", "plan") == "plan"
    assert recent.get("acme", "4") == "large"
    assert recent.get("acme", "3") is None


def test_newest_value_is_kept_whatever_its_size() -> None:
    """A push could not continue without its plan. Dropping the value frees its size."""
    recent = TenantCache[str](max_values=100, size_limit=10)
    recent.put("acme", "small", "small", 1)
    recent.put("acme", "huge", "huge", 1000)
    assert (recent.get("acme", "small"), recent.get("acme", "huge")) == (None, "huge")
    recent.drop("acme", "huge")
    recent.drop("acme", "huge")
    assert repr(recent) == "<TenantCache kept=0/100 size=0/10>"
