"""Store models, versions, aliases and scale settings, with a copy in memory. This is the only writer of those tables.

Reads are answered from memory, because a cold start must not wait for a disk. A write is committed first, then shown to
readers, then published, so a crash can never take back what was published.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from controlplane.audit.audit_rows import Actor
from controlplane.db.database import Database
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.grants import check_grantee, delete_grant, insert_grant
from controlplane.registry.policy.degradation_rules import check_degradation
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.registry.policy.version_lifecycle import VersionEvent, VersionState, check_unused, next_state
from controlplane.registry.policy.version_naming import (
    check_digest,
    check_split,
    check_unnamed,
    find_servable,
    find_version,
)
from controlplane.registry.registry_rows import (
    delete_model,
    insert_version,
    load_models,
    record_deleted,
    record_published,
    record_stopped,
    set_ladder,
    set_prod,
    set_scale,
    set_split,
    set_state,
    set_stops,
)
from controlplane.registry.tenant_store import DELIVERY_LIMIT_S
from controlplane.scaling.policy.scale_settings import ScaleSettings, apply_change
from kelvin.contracts.artifact_errors import NON_CHUNK_CODES
from kelvin.contracts.errors import Conflict, ModelNotFound, Refused
from kelvin.contracts.names import DEFAULT_ALIAS, require_dns_label
from kelvin.contracts.serving.control_messages import Feed, RegistrationResult, VersionRegistration
from kelvin.contracts.serving.degradation_steps import Ladder


class Registry:
    """Every tenant's models. Load it once before use."""

    def __init__(self, database: Database, feed: FeedHub) -> None:
        self._database = database
        self._feed = feed
        self._models: dict[tuple[str, str], Model] = {}
        self._write_lock = asyncio.Lock()  # each write is decided on the result of the one before
        self._last_stop_s = 0  # the time of the last stop of any model
        self.on_alias_moved: Callable[[VersionKey], None] = lambda _: None  # an alias or a split names this version
        self.on_changed: Callable[[], None] = lambda: None  # called after each change
        self.meanwhile: Callable[[Model], dict[str, str]] = lambda _: {}  # returns `Model.meanwhile` for what runs now

    def __repr__(self) -> str:
        versions = sum(len(model.versions) for model in self._models.values())
        return f"<Registry models={len(self._models)} versions={versions}>"

    async def load(self) -> None:
        """Read all models and publish them. Raises UnreadableColumn."""
        for model in await self._database.read(load_models):
            self._models[model.tenant, model.model] = model
        if self._models:
            models = tuple(model.row() for model in self._models.values())
            versions = tuple(each.row() for model in self._models.values() for each in model.live_versions)
            self._feed.publish(Feed(models=models, versions=versions))

    def models(self, tenant: str) -> tuple[Model, ...]:
        """Return all models of a tenant, by name."""
        own = (model for (owner, _), model in self._models.items() if owner == tenant)
        return tuple(sorted(own, key=lambda model: model.model))

    def models_granted_to(self, tenant: str) -> tuple[Model, ...]:
        """Return the models of other tenants that the tenant may call, by owner and name."""
        granted = (model for model in self._models.values() if tenant in model.grantees)
        return tuple(sorted(granted, key=lambda model: (model.tenant, model.model)))

    def all_models(self) -> tuple[Model, ...]:
        """Return all models of all tenants."""
        return tuple(self._models.values())

    def republish_meanwhile(self) -> None:
        """Publish each model whose `meanwhile` has changed. Call it when the running replicas change."""
        current = ((model, self.meanwhile(model)) for model in self._models.values())
        changed = [replace(model, meanwhile=now) for model, now in current if now != model.meanwhile]
        self._models.update({(model.tenant, model.model): model for model in changed})
        if changed:
            self._feed.publish(Feed(models=tuple(model.row() for model in changed)))

    def model(self, tenant: str, model: str) -> Model:
        """Return the model. Raises Refused(ModelNotFound)."""
        found = self._models.get((tenant, model))
        if found is None:
            raise Refused(ModelNotFound(model[:80]))
        return found

    def find(self, key: VersionKey) -> tuple[Model, Version] | None:
        """Return the version with its model; None if it is unknown or deleted."""
        model = self._models.get((key.tenant, key.model))
        version = model.version(key.version) if model is not None else None
        return None if model is None or version is None or version.is_deleted else (model, version)

    def version_digests(self, tenant: str) -> tuple[str, ...]:
        """Return the digests of all versions of the tenant, sorted, without deleted ones."""
        every = (each for model in self.models(tenant) for each in model.live_versions)
        return tuple(sorted({each.registration.version for each in every}))

    async def register(self, registration: VersionRegistration, now_s: int) -> RegistrationResult:
        """Register a published version, or bring it back after a deletion. A model's first version becomes its `prod`.
        Idempotent. Nothing changes if this push has not verified the version (`checked`), and it is faulty under any
        model of the tenant, or was faulty when it was deleted.

        Like every change of what is served, this returns once activators know it, or after DELIVERY_LIMIT_S. Raises
        Refused(InvalidRequest) for a bad name, NotFound for an unknown tenant.
        """
        tenant, name = registration.tenant, require_dns_label(registration.model, "model")
        check_digest(registration.version)
        async with self._write_lock:
            model = self._models.get((tenant, name))
            before = None if model is None else model.version(registration.version)
            if not registration.checked and (fault := self._fault_of(tenant, registration.version)) is not None:
                return RegistrationResult(is_new=False, fault=fault)
            if before is not None:
                await self._move(
                    before,
                    VersionEvent.PUBLISHED,
                    None,
                    lambda connection: record_published(connection, registration, now_s) if before.is_deleted else None,
                )
                if not before.is_deleted:
                    return RegistrationResult(is_new=False)
                # The deletion removed the version from the feed, so publish it again.
                revision = self._feed.publish(Feed(versions=(before.row(),)))
            else:
                revision = await self._register_new(model, registration, name, now_s)
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)
        return RegistrationResult(is_new=before is None, was_deleted=before is not None)

    def _fault_of(self, tenant: str, digest: str) -> str | None:
        """Return the fault of the digest under any model of the tenant, deleted versions included; None without one."""
        found = (model.version(digest) for model in self.models(tenant))
        return next((version.fault for version in found if version is not None and version.fault is not None), None)

    async def _register_new(self, model: Model | None, registration: VersionRegistration, name: str, now_s: int) -> int:
        """Register a new version. Return the feed revision that has it."""
        state = next_state(VersionState.ABSENT, VersionEvent.PUBLISHED)
        version = Version(registration, now_s, state)
        first = model is None
        if model is None:
            model = Model(registration.tenant, name, now_s, aliases={DEFAULT_ALIAS: registration.version})
        after = replace(model, versions=(*model.versions, version))
        await self._database.write(lambda connection: insert_version(connection, after, version, first=first))
        revision = self._publish_model(after, version)
        if first:
            self.on_alias_moved(version.key)
        return revision

    async def deploy(self, actor: Actor, tenant: str, model: str, prefix: str, now_s: int) -> str:
        """Move `prod` to the version whose digest begins with `prefix`, end a split, and return the digest.

        Raises Refused: ModelNotFound, NotFound (no such version), InvalidRequest (the prefix fits two, or is too
        short), Conflict (the version is faulty or deleted).
        """
        async with self._write_lock:
            found = self.model(tenant, model)
            version = find_servable(found, prefix)
            digest = version.registration.version
            revision = 0
            if found.aliases.get(DEFAULT_ALIAS) != digest or found.split or version.stopped_at_s is not None:
                after = _without_stops(
                    replace(found, aliases={**found.aliases, DEFAULT_ALIAS: digest}, split={}), {digest}
                )

                def write(connection: Connection) -> None:
                    set_prod(connection, actor, found, after, now_s)
                    set_stops(connection, found, after)

                await self._database.write(write)
                revision = self._publish_model(after)
            self.on_alias_moved(version.key)
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)
        return digest

    async def split(
        self, actor: Actor, tenant: str, model: str, weights: Mapping[str, int], now_s: int
    ) -> dict[str, int]:
        """Split requests to `prod` among versions, given by prefixes of their digests. Without any, the split ends.

        Returns the split by full digests. Raises Refused as `deploy`; InvalidRequest for a version that is named twice,
        or alone; Conflict if they are of several kinds.
        """
        async with self._write_lock:
            found = self.model(tenant, model)
            versions = [find_servable(found, prefix) for prefix in weights]
            check_split(versions)
            digests = [version.registration.version for version in versions]
            after = _without_stops(replace(found, split=dict(zip(digests, weights.values(), strict=True))), digests)

            def write(connection: Connection) -> None:
                set_split(connection, actor, found, after, now_s)
                set_stops(connection, found, after)

            await self._database.write(write)
            revision = self._publish_model(after)
            for version in versions:
                self.on_alias_moved(version.key)
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)
        return after.split

    async def set_ladder(self, actor: Actor, tenant: str, model: str, ladder: Ladder, now_s: int) -> Ladder:
        """Set the degradation steps that are tried, in order, before a request is refused. No steps: requests are
        refused at once.

        Raises Refused: ModelNotFound, also for a fallback that the owner may not call; InvalidRequest, Conflict.
        """
        async with self._write_lock:
            found = self.model(tenant, model)
            check_degradation(found, ladder, self._models.get)
            after = replace(found, ladder=ladder.steps, plan_ladders=ladder.plans)
            await self._database.write(lambda connection: set_ladder(connection, actor, found, after, now_s))
            revision = self._publish_model(after)
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)
        return ladder

    async def delete(
        self, actor: Actor, tenant: str, model: str, prefix: str, now_s: int, in_use: Callable[[VersionKey], bool]
    ) -> VersionKey:
        """Stop serving the version whose digest begins with `prefix`. Idempotent. `in_use` tells whether a process runs
        it.

        Raises Refused: ModelNotFound, NotFound, InvalidRequest as `deploy`; Conflict if an alias or a split names it,
        or a process runs it.
        """
        async with self._write_lock:
            found = self.model(tenant, model)
            version = find_version(found, prefix)
            check_unnamed(found, version)
            if in_use(version.key):
                what, rule = (
                    f"version {version.registration.version[:12]}",
                    f"`kelvin stop {model}` ends it, then try again",
                )
                raise Refused(Conflict(what, f"a replica of it runs: {rule}"))
            revision = 0
            if not version.is_deleted:
                # Drop a fault that is not about chunks: only a restore could clear it, and a deleted version has none.
                is_hidden = version.fault in NON_CHUNK_CODES
                await self._move(
                    version,
                    VersionEvent.DELETED,
                    None if is_hidden else version.fault,
                    lambda connection: record_deleted(connection, actor, version.key, now_s),
                )
                gone = (tenant, model, version.registration.version)
                revision = self._feed.publish(Feed(removed_versions=(gone,)))
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)
        return version.key

    async def delete_model(
        self, actor: Actor, tenant: str, model: str, now_s: int, in_use: Callable[[VersionKey], bool], force: bool
    ) -> tuple[VersionKey, ...]:
        """Delete the model with all its versions, and return their keys. Its usage stays in the ledger.

        Raises Refused: ModelNotFound; without `force` Conflict if an alias names a version, or a process runs one.
        """
        async with self._write_lock:
            found = self.model(tenant, model)
            keys = tuple(version.key for version in found.versions)
            if not force:
                check_unused(model, tuple(found.aliases), sum(map(in_use, keys)))
            await self._database.write(lambda connection: delete_model(connection, actor, found, now_s))
            del self._models[tenant, model]
            self.on_changed()
            served = tuple((tenant, model, v.registration.version) for v in found.live_versions)
            revision = self._feed.publish(Feed(removed_models=((tenant, model),), removed_versions=served))
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)
        return keys

    async def rescale(
        self, actor: Actor, tenant: str, model: str, change: Mapping[str, Any], now_s: int
    ) -> ScaleSettings:
        """Apply the change, values by name, and return the new settings. Setting a minimum ends a stop. If activators
        need to know, wait for them up to DELIVERY_LIMIT_S.

        Raises Refused: ModelNotFound, InvalidRequest.
        """
        async with self._write_lock:
            found = self.model(tenant, model)
            after = replace(found, scale=apply_change(found.scale, change))
            if change.get("min"):
                after = _without_stops(after, {version.registration.version for version in found.versions})

            def write(connection: Connection) -> None:
                set_scale(connection, actor, found, after, now_s)
                set_stops(connection, found, after)

            await self._database.write(write)
            if after.row() == found.row():
                self._set_model(after)
                return after.scale
            revision = self._publish_model(after)
        await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)
        return after.scale

    async def grant(self, actor: Actor, tenant: str, model: str, grantee: str, now_s: int) -> bool:
        """Let another tenant call the model; idempotent. Return whether every activator knows it within
        DELIVERY_LIMIT_S; False also if one lost its feed moments ago and is not back.

        Raises Refused: ModelNotFound, NotFound (the grantee), InvalidRequest, CapacityExceeded.
        """
        async with self._write_lock:
            found = self.model(tenant, model)
            check_grantee(found, grantee)
            if grantee not in found.grantees:
                await self._database.write(lambda connection: insert_grant(connection, actor, found, grantee, now_s))
            revision = self._publish_model(replace(found, grantees=tuple(sorted({*found.grantees, grantee}))))
        return await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)

    async def revoke(self, actor: Actor, tenant: str, model: str, grantee: str, now_s: int) -> bool:
        """Revoke a grant of the model. Returns as `grant`. Raises Refused: ModelNotFound, NotFound (the grant)."""
        async with self._write_lock:
            found = self.model(tenant, model)
            await self._database.write(lambda connection: delete_grant(connection, actor, found, grantee, now_s))
            revision = self._publish_model(_without_grantee(found, grantee))
        return await self._feed.wait_until_delivered(revision, DELIVERY_LIMIT_S)

    async def forget_grantee(self, tenant: str) -> None:
        """Publish that a deleted tenant has no grants any more. Its rows are gone already."""
        async with self._write_lock:
            for model in [model for model in self._models.values() if tenant in model.grantees]:
                self._publish_model(_without_grantee(model, tenant))

    async def stop(self, actor: Actor, tenant: str, model: str, now_s: int) -> Model:
        """Record that an operator stopped the model. The decider ends its replicas. Raises Refused(ModelNotFound).

        Each stop has its own time, `now_s` or later, so that `resume` can tell stops apart.
        """
        async with self._write_lock:
            found = self.model(tenant, model)
            before_s = max([self._last_stop_s, *(each.stopped_at_s or 0 for each in found.versions)])
            at_s = self._last_stop_s = max(now_s, before_s + 1)
            versions = (each if each.is_deleted else replace(each, stopped_at_s=at_s) for each in found.versions)
            after = replace(found, versions=tuple(versions))

            def write(connection: Connection) -> None:
                record_stopped(connection, actor, found, now_s)
                set_stops(connection, found, after)

            await self._database.write(write)
            return self._set_model(after)

    async def resume(self, key: VersionKey, stopped_at_s: int) -> None:
        """Record that a version that was stopped at `stopped_at_s` was requested again. Does nothing if the version is
        unknown, or was stopped again since, because the request came before that stop.
        """
        async with self._write_lock:
            found = self.find(key)
            if found is None or found[1].stopped_at_s != stopped_at_s:
                return
            model, after = found[0], _without_stops(found[0], {key.version})
            await self._database.write(lambda connection: set_stops(connection, model, after))
            self._set_model(after)

    async def record_event(self, key: VersionKey, event: VersionEvent, fault: str | None = None) -> None:
        """Record what a restore has shown about the version. Does nothing if the version is unknown or deleted."""
        async with self._write_lock:
            found = self.find(key)
            if found is not None:
                await self._move(found[1], event, fault)

    async def _move(
        self,
        version: Version,
        event: VersionEvent,
        fault: str | None,
        record: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        state = next_state(version.state, event)
        if (state, fault) == (version.state, version.fault):
            return
        after, key = replace(version, state=state, fault=fault), version.key

        def write(connection: Connection) -> None:
            set_state(connection, after)
            record(connection)

        await self._database.write(write)
        model = self._models[key.tenant, key.model]
        versions = tuple(after if each.key == key else each for each in model.versions)
        self._set_model(replace(model, versions=versions))

    def _set_model(self, model: Model) -> Model:
        """Replace the model in memory. Return it with its current `meanwhile`."""
        kept = self._models[model.tenant, model.model] = replace(model, meanwhile=self.meanwhile(model))
        self.on_changed()
        return kept

    def _publish_model(self, model: Model, *versions: Version) -> int:
        rows = tuple(each.row() for each in versions)
        return self._feed.publish(Feed(models=(self._set_model(model).row(),), versions=rows))


def _without_stops(model: Model, versions: Collection[str]) -> Model:
    """Return the model with these versions no longer stopped."""
    every = (replace(v, stopped_at_s=None) if v.registration.version in versions else v for v in model.versions)
    return replace(model, versions=tuple(every))


def _without_grantee(model: Model, grantee: str) -> Model:
    return replace(model, grantees=tuple(each for each in model.grantees if each != grantee))
