"""Change models and tenants, and have the decider look again.

The admin API and a cluster's objects both make these changes here. What the decider need not hear of goes to its store
alone. Every step of a deletion may be repeated: what a crash cut off, the same call goes on with. The books are not
touched: the ledger's rows stay, and so do the store's bytes until a collection.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.audit.audit_rows import Actor
from controlplane.clock import Clock
from controlplane.registry.key_store import KeyStore
from controlplane.registry.policy.access import TenantState
from controlplane.registry.policy.domain import VersionKey
from controlplane.registry.registry import Registry
from controlplane.registry.tenant_store import Tenant, TenantStore
from controlplane.scaling.interfaces import ReplicaLookup, Scaler
from controlplane.scaling.policy.scale_settings import ScaleSettings, changed


@dataclass(frozen=True, slots=True)
class Changes:
    """Over the stores, what runs, and the decider."""

    registry: Registry
    tenants: TenantStore
    keys: KeyStore
    replicas: ReplicaLookup
    decider: Scaler
    clock: Clock

    async def deploy(self, by: Actor, tenant: str, model: str, prefix: str) -> str:
        """Name another version `prod`, and return it. Raises as `Registry.deploy`."""
        version = await self.registry.deploy(by, tenant, model, prefix, self.clock.wall_s())
        self.decider.tick()  # a minimum moves with the alias
        return version

    async def split(self, by: Actor, tenant: str, model: str, weights: Mapping[str, int]) -> dict[str, int]:
        """Split requests between versions, and return the shares by whole digest. Raises as `Registry.split`."""
        split = await self.registry.split(by, tenant, model, weights, self.clock.wall_s())
        self.decider.tick()  # a minimum is every version's that is named
        return split

    async def scale(self, by: Actor, tenant: str, model: str, change: Mapping[str, Any]) -> ScaleSettings:
        """Change the model's scale, and return what holds now. Raises as `Registry.rescale`; InvalidRequest for what
        can't be done where versions run.
        """
        found = self.registry.model(tenant, model)
        self.decider.check_scale(found, changed(found.scale, change))
        scale = await self.registry.rescale(by, tenant, model, change, self.clock.wall_s())
        self.decider.tick()  # bounds hold from now on, not from the next beat
        return scale

    async def suspend(self, by: Actor, tenant: str) -> Tenant:
        """Suspend the tenant: its keys are refused, and its replicas end. Raises as `TenantStore.move`."""
        found = await self.tenants.move(by, tenant, TenantState.SUSPENDED, self.clock.wall_s())
        self.decider.stop(tuple(version.key for model in self.registry.models(tenant) for version in model.versions))
        return found

    async def resume(self, by: Actor, tenant: str) -> Tenant:
        """End the suspension: the tenant's keys are good again, and its minimums hold. Raises as `TenantStore.move`."""
        found = await self.tenants.move(by, tenant, TenantState.ACTIVE, self.clock.wall_s())
        self.decider.tick()
        return found

    async def delete_model(self, by: Actor, tenant: str, model: str, force: bool) -> tuple[VersionKey, ...]:
        """Forget it and drain its replicas; the versions that it had. Raises as `Registry.delete_model`."""
        is_present = self.replicas.is_present
        keys = await self.registry.delete_model(by, tenant, model, self.clock.wall_s(), is_present, force)
        self.decider.stop(tuple(filter(is_present, keys)))
        return keys

    async def delete_tenant(self, by: Actor, tenant: str, force: bool) -> None:
        """With `force` its keys are refused first, then its models go, then its keys, then it. Raises Refused:
        NotFound, Conflict for the operators' tenant, and without `force` for one that is not empty.
        """
        if force:
            await self.tenants.move(by, tenant, TenantState.SUSPENDED, self.clock.wall_s())
            for model in self.registry.models(tenant):
                await self.delete_model(by, tenant, model.model, force=True)
            await self.keys.revoke_all(by, tenant, self.clock.wall_s())
        await self.tenants.delete(by, tenant, self.clock.wall_s())
        await self.registry.forget_grantee(tenant)
