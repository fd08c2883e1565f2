"""Take models and tenants away, with what runs of them. Every step may be repeated: what a crash cut off, the same call
goes on with. The books are not touched: the ledger's rows stay, and so do the store's bytes until a collection.
"""

from dataclasses import dataclass

from controlplane.audit import Actor
from controlplane.clock import Clock
from controlplane.facts import VersionKey
from controlplane.keys import KeyStore
from controlplane.policy.access import TenantState
from controlplane.registry import Registry
from controlplane.running import Decider, Replicas
from controlplane.tenants import TenantStore


@dataclass(frozen=True, slots=True)
class Removal:
    """Over the stores and what runs."""

    registry: Registry
    tenants: TenantStore
    keys: KeyStore
    replicas: Replicas
    decider: Decider
    clock: Clock

    async def model(self, by: Actor, tenant: str, model: str, force: bool) -> tuple[VersionKey, ...]:
        """Forget it and drain its replicas; the versions that it had. Raises as `Registry.delete_model`."""
        is_present = self.replicas.is_present
        keys = await self.registry.delete_model(by, tenant, model, self.clock.wall_s(), is_present, force)
        self.decider.stop(tuple(filter(is_present, keys)))
        return keys

    async def tenant(self, by: Actor, tenant: str, force: bool) -> None:
        """With `force` its keys are refused first, then its models go, then its keys, then it. Raises Refused:
        NotFound, Conflict for the operators' tenant, and without `force` for one that is not empty.
        """
        if force:
            await self.tenants.move(by, tenant, TenantState.SUSPENDED, self.clock.wall_s())
            for model in self.registry.models(tenant):
                await self.model(by, tenant, model.model, force=True)
            await self.keys.revoke_all(by, tenant, self.clock.wall_s())
        await self.tenants.delete(by, tenant, self.clock.wall_s())
        await self.registry.forget_grantee(tenant)
