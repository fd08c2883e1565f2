"""Change models and tenants, and make the scaler react at once.

The admin API and the controller of custom resources both call these methods. A change that does not affect scaling goes
straight to its store instead. Each step of a deletion can be repeated, so a call that a crash interrupted is simply
made again. A deletion never touches the ledger's rows. The store keeps the bytes until the next garbage collection.
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
from controlplane.scaling.policy.scale_settings import ScaleSettings, apply_change


@dataclass(frozen=True, slots=True)
class AdminOperations:
    """Changes that affect both the stores and the scaler."""

    registry: Registry
    tenants: TenantStore
    keys: KeyStore
    replicas: ReplicaLookup
    scaler: Scaler
    clock: Clock

    async def deploy(self, actor: Actor, tenant: str, model: str, prefix: str) -> str:
        """Move the alias `prod` to another version, and return that version. Raises as `Registry.deploy`."""
        version = await self.registry.deploy(actor, tenant, model, prefix, self.clock.wall_s())
        self.scaler.tick()  # a minimum moves with the alias
        return version

    async def split(self, actor: Actor, tenant: str, model: str, weights: Mapping[str, int]) -> dict[str, int]:
        """Split requests between versions. Return the weights by full digest. Raises as `Registry.split`."""
        split = await self.registry.split(actor, tenant, model, weights, self.clock.wall_s())
        self.scaler.tick()  # a minimum holds for each version that has a share
        return split

    async def scale(self, actor: Actor, tenant: str, model: str, change: Mapping[str, Any]) -> ScaleSettings:
        """Change the model's scale settings, and return the new ones. Raises as `Registry.rescale`, and
        Refused(InvalidRequest) for settings that this installation can't follow.
        """
        found = self.registry.model(tenant, model)
        self.scaler.check_scale(found, apply_change(found.scale, change))
        scale = await self.registry.rescale(actor, tenant, model, change, self.clock.wall_s())
        self.scaler.tick()  # new bounds hold now, not only from the next tick
        return scale

    async def suspend(self, actor: Actor, tenant: str) -> Tenant:
        """Suspend the tenant: refuse its keys and end its replicas. Raises as `TenantStore.set_state`."""
        found = await self.tenants.set_state(actor, tenant, TenantState.SUSPENDED, self.clock.wall_s())
        self.scaler.stop(tuple(version.key for model in self.registry.models(tenant) for version in model.versions))
        return found

    async def resume(self, actor: Actor, tenant: str) -> Tenant:
        """End the suspension: accept the tenant's keys, keep its minimums again. Raises as `TenantStore.set_state`."""
        found = await self.tenants.set_state(actor, tenant, TenantState.ACTIVE, self.clock.wall_s())
        self.scaler.tick()
        return found

    async def delete_model(self, actor: Actor, tenant: str, model: str, force: bool) -> tuple[VersionKey, ...]:
        """Delete the model and drain its replicas. Return its versions. Raises as `Registry.delete_model`."""
        is_present = self.replicas.is_present
        keys = await self.registry.delete_model(actor, tenant, model, self.clock.wall_s(), is_present, force)
        self.scaler.stop(tuple(filter(is_present, keys)))
        return keys

    async def delete_tenant(self, actor: Actor, tenant: str, force: bool) -> None:
        """Delete the tenant. With `force`, first suspend it, delete its models and revoke its keys. Raises Refused:
        NotFound; Conflict for the operators' tenant, and without `force` if the tenant is not empty.
        """
        if force:
            await self.tenants.set_state(actor, tenant, TenantState.SUSPENDED, self.clock.wall_s())
            for model in self.registry.models(tenant):
                await self.delete_model(actor, tenant, model.model, force=True)
            await self.keys.revoke_all(actor, tenant, self.clock.wall_s())
        await self.tenants.delete(actor, tenant, self.clock.wall_s())
        await self.registry.forget_grantee(tenant)
