"""Timelines: the number of kept timelines is bounded, and each tenant finds its own only."""

from activator.accounting.timelines import Timelines
from kelvin.contracts.serving.control_messages import TimelineAnswer


def _keep(timelines: Timelines, tenant: str, name: str) -> None:
    answer = TimelineAnswer(request_id=name, model="m", version=None, cold=False, stamps=())
    timelines.put(tenant, name, lambda: answer)


def test_oldest_request_and_tenant_are_dropped_first() -> None:
    """The oldest request of a tenant is dropped first. The oldest tenant is dropped first."""
    timelines = Timelines(per_tenant=2, tenants=2)
    for name in ("1", "2", "3"):
        _keep(timelines, "a", name)
    assert [timelines.find("a", name) is not None for name in ("1", "2", "3")] == [False, True, True]
    _keep(timelines, "b", "4")
    _keep(timelines, "a", "5")
    _keep(timelines, "c", "6")
    assert timelines.find("b", "4") is None
    assert timelines.find("a", "5") is not None


def test_timeline_is_hidden_from_other_tenants() -> None:
    """A timeline is not found under another tenant."""
    timelines = Timelines()
    _keep(timelines, "a", "1")
    assert timelines.find("b", "1") is None
