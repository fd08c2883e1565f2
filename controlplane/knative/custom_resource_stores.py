"""What objects of the cluster declare, done through the stores that the admin API writes to; and what holds there."""

from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.api.types.access_types import SetLimits
from controlplane.audit.audit_rows import Actor
from controlplane.knative.policy import custom_resources as policy
from controlplane.knative.policy.custom_resources import ModelFacts, ModelSpec, TenantFacts, TenantSpec
from controlplane.registry.policy.access import TenantState
from controlplane.registry.policy.domain import VersionKey
from controlplane.registry.policy.version_lifecycle import VersionState
from controlplane.registry.registry import Registry
from controlplane.scaling.changes import Changes
from controlplane.scaling.policy.scale_settings import ScaleChange
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.names import DEFAULT_ALIAS
from kelvin.contracts.patches import Patch
from kelvin.contracts.wire import convert


@dataclass(frozen=True, slots=True)
class ModelResourceStore:
    """Models and their versions."""

    changes: Changes

    @property
    def registry(self) -> Registry:
        """What is known of them."""
        return self.changes.registry

    def facts(self, tenant: str, name: str) -> ModelFacts | None:
        """None where none was pushed."""
        try:
            model = self.registry.model(tenant, name)
        except Refused:
            return None
        prod = model.aliases.get(DEFAULT_ALIAS, "")
        version = model.version(prod)
        return ModelFacts(
            prod=prod,
            split=model.split,
            scale={field: getattr(model.scale, field) for field in policy.Scale.__struct_fields__},
            is_servable=version is not None and version.state is VersionState.READY,
            versions=len(model.live_versions),
            replicas=sum(self.changes.replicas.ready(each.key) for each in model.versions),
        )

    async def apply_spec(self, by: Actor, spec: ModelSpec, name: str, drift: tuple[str, ...]) -> None:
        """What differs, in an order in which no step undoes another: a deploy ends a split. Raises Refused."""
        if any(field.startswith("scale") for field in drift):
            change = _checked(spec.scale, ScaleChange, "spec.scale")
            await self.changes.scale(by, spec.tenant, name, change)
        if spec.prod is not None and "prod" in drift:
            await self.changes.deploy(by, spec.tenant, name, spec.prod)
        if spec.split and ("split" in drift or "prod" in drift):
            await self.changes.split(by, spec.tenant, name, spec.split)

    async def delete(self, by: Actor, tenant: str, name: str) -> None:
        """With all its versions, whatever runs of it. Raises Refused: ModelNotFound."""
        await self.changes.delete_model(by, tenant, name, force=True)

    def versions(self, tenant: str, name: str) -> tuple[VersionKey, ...]:
        """Those that may be asked for."""
        try:
            model = self.registry.model(tenant, name)
        except Refused:
            return ()
        return tuple(version.key for version in model.live_versions)

    def version(self, key: VersionKey) -> dict[str, object] | None:
        """What is told of one; None where it is gone."""
        found = self.registry.find(key)
        if found is None:
            return None
        model, version = found
        return {
            "state": str(version.state),
            "prod": model.aliases.get(DEFAULT_ALIAS) == key.version,
            "readyReplicas": self.changes.replicas.ready(key),
        }


@dataclass(frozen=True, slots=True)
class TenantResourceStore:
    """Tenants and their limits."""

    changes: Changes

    async def every(self) -> dict[str, TenantFacts]:
        """What holds of all that there are, by name. Raises Refused(Unavailable)."""
        found = await self.changes.tenants.all(self.changes.clock.wall_s())
        return {
            tenant.tenant: TenantFacts(
                tenant.state is TenantState.SUSPENDED,
                {field: getattr(tenant.limits, field) for field in policy.Limits.__struct_fields__},
                tenant.models,
            )
            for tenant in found
        }

    async def apply_spec(self, by: Actor, spec: TenantSpec, name: str, facts: TenantFacts | None) -> None:
        """Make it where there is none, then what differs. Raises Refused."""
        now_s, limits = self.changes.clock.wall_s(), _checked(spec.limits, SetLimits, "spec.limits")
        if facts is None:
            await self.changes.tenants.create(by, name, now_s)
            facts = TenantFacts(suspended=False, limits={}, models=0)
        if news := {field: value for field, value in limits.items() if facts.limits.get(field) != value}:
            await self.changes.tenants.limit(by, name, news, now_s)
        if spec.suspended not in (None, facts.suspended):
            await (self.changes.suspend if spec.suspended else self.changes.resume)(by, name)

    async def delete(self, by: Actor, name: str) -> None:
        """Raises Refused: NotFound; Conflict while it has models or keys."""
        await self.changes.delete_tenant(by, name, force=False)


def _checked(declared: Patch, kind: type[Patch], what: str) -> dict[str, Any]:
    """Return what an object declares, within the bounds that the admin API holds it to. Raises Refused."""
    try:
        return convert(declared.given(), kind).given()
    except msgspec.ValidationError as error:
        raise Refused(InvalidRequest(what, "(object)", str(error))) from error
