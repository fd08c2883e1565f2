"""The ring is bounded, and a tenant's own."""

from activator.accounting.timelines import Timelines
from kelvin.contracts.serving.control_messages import TimelineAnswer


def _put(ring: Timelines, tenant: str, name: str) -> None:
    told = TimelineAnswer(request_id=name, model="m", version=None, cold=False, stamps=())
    ring.put(tenant, name, lambda: told)


def test_the_oldest_goes_first() -> None:
    """Of requests within a tenant, and of tenants."""
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
    """The same id under another tenant is not found."""
    ring = Timelines()
    _put(ring, "a", "1")
    assert ring.find("b", "1") is None
