"""Choose the versions that have a Knative Service, and render them. `applier.py` writes the Services."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from controlplane.knative.apply.cluster import Json
from controlplane.knative.policy.knative_service import (
    ClusterSpec,
    PodVersion,
    namespace_of,
    render_service,
    service_name,
)
from controlplane.knative.policy.object_labels import NamespacedName
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.scaling.policy.device_share import DeviceClaim, divide_devices
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.errors import Conflict, Failure, Internal, InvalidRequest, Refused
from kelvin.process.loops import record_error

log = logging.getLogger(__name__)


def namespaced_service_name(key: VersionKey, cluster: ClusterSpec) -> NamespacedName:
    """Return namespace and name of the version's Service. Raises Refused(InvalidRequest)."""
    return namespace_of(key.tenant, cluster), service_name(key.model, key.version)


def versions_with_service(
    models: Iterable[Model],
    has_service: Callable[[VersionKey], bool],
    is_ready: Callable[[VersionKey], bool],
    has_ready_pod: Callable[[VersionKey], bool],
    is_report_window_over: Callable[[Model], bool],
) -> Iterator[tuple[Model, Version]]:
    """Yield the versions that should have a Service: those with an alias or split, and some old versions.

    An old version keeps its Service

    1. until every named version was ready once;
    2. then, while it has pods and takes requests in place of a named version, so that it finishes its work;
    3. while it has pods and a takeover is not over: activators that have not reconnected may still send it requests.
    """
    for model in models:
        named = [version for version in model.live_versions if version.registration.version in model.named]
        yield from ((model, version) for version in named)
        is_settled = all(is_ready(version.key) for version in named)
        for version in model.live_versions:
            if version not in named and has_service(version.key):
                answers = version.registration.version in model.meanwhile.values() or not is_report_window_over(model)
                if not is_settled or (answers and has_ready_pod(version.key)):
                    yield model, version


def device_claims(versions: Iterable[tuple[Model, Version]]) -> Iterator[DeviceClaim[VersionKey]]:
    """Yield each version's claim to devices: the oldest model first, and within a model the earliest version."""

    def age_order(each: tuple[Model, Version]) -> tuple[int, str, str, int]:
        model, version = each
        return model.created_at_s, model.tenant, model.model, model.versions.index(version)

    for model, version in sorted(versions, key=age_order):
        leaving = version.registration.version not in model.named
        yield DeviceClaim(version.key, model.scale.min, model.scale.max, leaving)


@dataclass(slots=True)
class ServiceRenderer:
    """Renders Services, again only if their facts changed. Kelvin itself runs in `own_namespace`. `devices` bounds all
    versions together, if it is set.
    """

    cluster: ClusterSpec
    own_namespace: str
    kv_bytes: int
    devices: int | None = None
    key_by_service: dict[NamespacedName, VersionKey] = field(default_factory=dict)  # of the last rendering
    _last_rendered: dict[VersionKey, tuple[PodVersion, Json]] = field(default_factory=dict)

    def render_all(
        self, versions: Iterable[tuple[Model, Version]], has_no_minimum: Callable[[str], bool]
    ) -> tuple[list[Json], dict[VersionKey, Failure]]:
        """Return the Services, and the reasons for versions that can't have one."""
        found: dict[VersionKey, tuple[PodVersion, Json]] = {}
        key_by_service: dict[NamespacedName, VersionKey] = {}
        failed: dict[VersionKey, Failure] = {}
        versions = tuple(versions)
        parts = {} if self.devices is None else divide_devices(self.devices, device_claims(versions))
        for model, version in versions:
            key = version.key
            try:
                pod = self._pod(model, version, has_no_minimum(key.tenant), parts.get(key, model.scale.max))
                found[key] = self._render(key, pod)
                holder = key_by_service.setdefault(namespaced_service_name(key, self.cluster), key)
                if holder != key:
                    del found[key]
                    raise Refused(Conflict("its Service", "another version has the same name within its namespace"))
            except Refused as refused:
                failed[key] = refused.failure
            except Exception as error:  # a defect in one version must not stop the others
                record_error(error, key)
                failed[key] = Internal()
        self._last_rendered, self.key_by_service = found, key_by_service
        return [each for _, each in found.values()], failed

    def check(self, model: Model, scale: ScaleSettings) -> None:
        """Raise Refused(InvalidRequest) if a cluster can't scale the model that way."""
        if scale.idle != "zero":
            raise Refused(InvalidRequest("idle", scale.idle, "must be zero on a cluster; `min` keeps replicas"))
        if self.devices is not None and scale.min > self.devices:
            rule = f"must be {self.devices} or less: there are no more devices"
            raise Refused(InvalidRequest("min", str(scale.min), rule))
        for version in model.versions[-1:]:
            pod = self._pod(replace(model, scale=scale), version, has_no_minimum=False, max_scale=scale.max)
            render_service(pod, self.cluster)

    def _render(self, key: VersionKey, pod: PodVersion) -> tuple[PodVersion, Json]:
        known = self._last_rendered.get(key)
        if known is not None and known[0] == pod:
            return known
        if namespace_of(key.tenant, self.cluster) == self.own_namespace:
            raise Refused(Conflict("the tenant's namespace", "is the one in which Kelvin itself runs"))
        return pod, render_service(pod, self.cluster)

    def _pod(self, model: Model, version: Version, has_no_minimum: bool, max_scale: int) -> PodVersion:
        registration, scale = version.registration, model.scale
        return PodVersion(
            tenant=registration.tenant,
            model=registration.model,
            version=registration.version,
            weight_bytes=registration.total_bytes,
            kv_bytes=self.kv_bytes,
            max_streams=registration.limits.max_streams,
            min_scale=0 if has_no_minimum else scale.min,
            max_scale=max_scale,
            target=scale.target,
            window_s=scale.window_s,
            grace_s=scale.grace_s,
            average=scale.average,
        )
