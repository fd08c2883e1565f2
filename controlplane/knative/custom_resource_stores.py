"""Apply the specs of cluster objects through the stores that the admin API writes to, and read the facts there."""

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
from controlplane.scaling.admin_operations import AdminOperations
from controlplane.scaling.policy.scale_settings import ScaleChange
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.names import DEFAULT_ALIAS
from kelvin.contracts.patches import Patch
from kelvin.contracts.wire import convert


@dataclass(frozen=True, slots=True)
class ModelResourceStore:
    """Applies and reads models and their versions."""

    operations: AdminOperations

    @property
    def registry(self) -> Registry:
        """Return the registry of models."""
        return self.operations.registry

    def find_facts(self, tenant: str, name: str) -> ModelFacts | None:
        """Return the facts of a model; None if it was never pushed."""
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
            replicas=sum(self.operations.replicas.ready_count(each.key) for each in model.versions),
        )

    async def apply_spec(self, actor: Actor, spec: ModelSpec, name: str, drift: tuple[str, ...]) -> None:
        """Apply the fields that differ. In this order no step undoes another: a deploy ends a split. Raises Refused."""
        if any(field.startswith("scale") for field in drift):
            change = _checked(spec.scale, ScaleChange, "spec.scale")
            await self.operations.scale(actor, spec.tenant, name, change)
        if spec.prod is not None and "prod" in drift:
            await self.operations.deploy(actor, spec.tenant, name, spec.prod)
        if spec.split and ("split" in drift or "prod" in drift):
            await self.operations.split(actor, spec.tenant, name, spec.split)

    async def delete(self, actor: Actor, tenant: str, name: str) -> None:
        """Delete the model with all its versions, even if they run. Raises Refused(ModelNotFound)."""
        await self.operations.delete_model(actor, tenant, name, force=True)

    def list_versions(self, tenant: str, name: str) -> tuple[VersionKey, ...]:
        """Return the model's versions that are not deleted; none if the model is unknown."""
        try:
            model = self.registry.model(tenant, name)
        except Refused:
            return ()
        return tuple(version.key for version in model.live_versions)

    def version_status(self, key: VersionKey) -> dict[str, object] | None:
        """Return the status of a version; None if it is gone."""
        found = self.registry.find(key)
        if found is None:
            return None
        model, version = found
        return {
            "state": str(version.state),
            "prod": model.aliases.get(DEFAULT_ALIAS) == key.version,
            "readyReplicas": self.operations.replicas.ready_count(key),
        }


@dataclass(frozen=True, slots=True)
class TenantResourceStore:
    """Applies and reads tenants and their limits."""

    operations: AdminOperations

    async def list_facts(self) -> dict[str, TenantFacts]:
        """Return the facts of all tenants by name. Raises Refused(Unavailable)."""
        found = await self.operations.tenants.all_tenants(self.operations.clock.wall_s())
        return {
            tenant.tenant: TenantFacts(
                suspended=tenant.state is TenantState.SUSPENDED,
                limits={field: getattr(tenant.limits, field) for field in policy.Limits.__struct_fields__},
                models=tenant.models,
            )
            for tenant in found
        }

    async def apply_spec(self, actor: Actor, spec: TenantSpec, name: str, facts: TenantFacts | None) -> None:
        """Create the tenant if it does not exist, then apply the fields that differ. Raises Refused."""
        now_s, limits = self.operations.clock.wall_s(), _checked(spec.limits, SetLimits, "spec.limits")
        if facts is None:
            await self.operations.tenants.create(actor, name, now_s)
            facts = TenantFacts(suspended=False, limits={}, models=0)
        if news := {field: value for field, value in limits.items() if facts.limits.get(field) != value}:
            await self.operations.tenants.set_limits(actor, name, news, now_s)
        if spec.suspended not in (None, facts.suspended):
            await (self.operations.suspend if spec.suspended else self.operations.resume)(actor, name)

    async def delete(self, actor: Actor, name: str) -> None:
        """Delete the tenant. Raises Refused: NotFound; Conflict while it has models or keys."""
        await self.operations.delete_tenant(actor, name, force=False)


def _checked(declared: Patch, kind: type[Patch], what: str) -> dict[str, Any]:
    """Return the declared fields, checked against the bounds of the admin API. Raises Refused."""
    try:
        return convert(declared.stated_values(), kind).stated_values()
    except msgspec.ValidationError as error:
        raise Refused(InvalidRequest(what, "(object)", str(error))) from error
