"""Timelines: the number of kept timelines is bounded, and each tenant finds its own only."""

from activator.accounting.timelines import Timelines
from kelvin.contracts.serving.control_messages import TimelineAnswer


def _put(ring: Timelines, tenant: str, name: str) -> None:
    answer = TimelineAnswer(request_id=name, model="m", version=None, cold=False, stamps=())
    ring.put(tenant, name, lambda: answer)


def test_the_oldest_goes_first() -> None:
    """The oldest request of a tenant is dropped first. The oldest tenant is dropped first."""
    ring = Timelines(per_tenant=2, tenants=2)
    for name in ("1", "2", "3"):
        _put(ring, "a", name)
    assert [ring.find("a", name) is not None for name in ("1", "2", "3")] == [False, True, True]
    _put(ring, "b", "4")
    _put(ring, "a", "5")
    _put(ring, "c", "6")
    assert ring.find("b", "4") is None
    assert ring.find("a", "5") is not None


def test_another_tenants_is_unknown() -> None:
    """A timeline is not found under another tenant."""
    ring = Timelines()
    _put(ring, "a", "1")
    assert ring.find("b", "1") is None
