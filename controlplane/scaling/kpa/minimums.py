"""Tell how many replicas each version must keep: its model's `min`, bounded by its tenant's share of device slots."""

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.scaling.policy.device_share import cap_minimums, tenant_share
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.errors import InvalidRequest, Refused


class DeviceSlots(Protocol):
    """Running replicas and device slots. `autoscaler.Actuator` implements it."""

    @property
    def slots(self) -> int | None: ...

    def active_versions(self) -> tuple[VersionKey, ...]: ...

    def live_count(self, key: VersionKey) -> int: ...


class Minimums:
    """Minimums of all models. A minimum holds for each version that has an alias or split, and may run.

    While other tenants wait for a device slot, minimums are bounded: see `scaling/policy/device_share.py`.
    """

    def __init__(self, models: Callable[[], Iterable[Model]], devices: DeviceSlots, feed: FeedHub) -> None:
        self._models = models
        self._devices = devices
        self._feed = feed
        self._bounds: dict[VersionKey, int] = {}  # versions whose minimum is bounded now

    def __repr__(self) -> str:
        return f"<Minimums bounded={len(self._bounds)}>"

    def effective_minimum(self, model: Model, version: Version) -> int:
        """Return how many replicas of the version must stay, also without requests."""
        if not _holds(model, version) or self._feed.is_spent(model.tenant):
            return 0
        return self._bounds.get(version.key, model.scale.min)

    def list_all(self) -> list[tuple[VersionKey, int]]:
        """Return all minimums that hold, without bounds, those of the oldest models first."""
        models = [each for each in self._models() if each.scale.min]
        return [
            (version.key, model.scale.min)
            for model in sorted(models, key=lambda each: (each.created_at_s, each.tenant, each.model))
            if not (self._feed.is_suspended(model.tenant) or self._feed.is_spent(model.tenant))
            for version in model.versions
            if _holds(model, version)
        ]

    def apply_bounds(self, waiting: Collection[str]) -> None:
        """Bound each tenant's minimums to its share while another tenant of `waiting` waits for a device slot."""
        self._bounds = {}
        slots = self._devices.slots
        if slots is None or not waiting:
            return
        weights = self._weights(waiting)
        minimums: dict[str, list[tuple[VersionKey, int]]] = {}
        for key, minimum in self.list_all():
            minimums.setdefault(key.tenant, []).append((key, minimum))
        for tenant, own_minimums in minimums.items():
            if any(each != tenant for each in waiting):
                competing = weights | {tenant: self._feed.weight(tenant)}
                self._bounds |= cap_minimums(tenant_share(slots, competing, tenant), own_minimums)

    def is_below_share(self, tenant: str) -> bool:
        """Return whether the tenant has fewer replicas than its share of the device slots."""
        slots = self._devices.slots
        if slots is None:
            return True
        held = sum(self._devices.live_count(key) for key in self._devices.active_versions() if key.tenant == tenant)
        return held < tenant_share(slots, self._weights({tenant}), tenant)

    def check(self, model: Model, scale: ScaleSettings) -> None:
        """Raise Refused(InvalidRequest) if `scale` raises the minimum above the tenant's share of the device slots."""
        slots = self._devices.slots
        if slots is None or scale.min <= model.scale.min:
            return
        tenant, named = model.tenant, max(1, len(model.named))
        own_share = tenant_share(slots, self._weights({tenant}), tenant)
        others = sum(minimum for key, minimum in self.list_all() if key.tenant == tenant and key.model != model.model)
        if scale.min * named + others <= own_share:
            return
        limit = max(0, own_share - others) // named
        rule = f"must be {limit} or less: your tenant's share of {slots} device slots is {own_share} at this moment"
        if others:
            rule += f", and minimums of your other models take {others}"
        if named > 1:
            rule += f"; it holds for each of {named} versions"
        raise Refused(InvalidRequest("min", str(scale.min), rule))

    def _weights(self, tenants: Collection[str]) -> dict[str, int]:
        """Return the weights of these tenants and of all that have a process or a start."""
        competing = {key.tenant for key in self._devices.active_versions()}.union(tenants)
        return {tenant: self._feed.weight(tenant) for tenant in competing}


def _holds(model: Model, version: Version) -> bool:
    """Return whether the model's minimum applies to this version."""
    is_named = version.registration.version in model.named
    return is_named and version.stopped_at_s is None and not version.is_deleted
