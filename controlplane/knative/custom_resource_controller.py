"""Reconcile Model and Tenant objects of the cluster. Specs are applied through the same stores as the admin API's, and
statuses show what holds. Each version of a declared model gets a ModelVersion object, which only mirrors it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Final

from controlplane.audit.audit_rows import Actor
from controlplane.clock import Clock
from controlplane.knative.apply.applier import BATCH_SIZE, Applier
from controlplane.knative.apply.cluster import ClusterApi, ClusterError, Json, Ref, timestamp
from controlplane.knative.apply.object_cache import ObjectCache
from controlplane.knative.custom_resource_stores import ModelResourceStore, TenantResourceStore
from controlplane.knative.policy import custom_resources as policy
from controlplane.knative.policy import object_labels
from controlplane.knative.policy.custom_resources import TenantFacts, new_events
from controlplane.knative.policy.knative_service import service_name
from controlplane.registry.policy.domain import VersionKey
from kelvin.contracts.backoff import should_log
from kelvin.contracts.errors import Failure, InvalidRequest, ModelNotFound, NotFound, Refused
from kelvin.process.loops import record_error

log = logging.getLogger(__name__)

RESYNC_S: Final = 2.0  # until a change through the admin API shows in a status
MAX_LOG_LINES: Final = 20  # per pass: without the database, every object fails


class CustomResourceController:
    """Reconciles all objects while this process leads. `namespace_of` returns a tenant's namespace."""

    def __init__(
        self,
        api: ClusterApi,
        models: ModelResourceStore,
        tenants: TenantResourceStore,
        clock: Clock,
        namespace_of: Callable[[str], str],
        installation: str,
        *,
        period_s: float = RESYNC_S,
    ) -> None:
        self._api = api
        self._models = models
        self._tenants = tenants
        self._clock = clock
        self._namespace_of = namespace_of
        self._period_s = period_s
        self._caches = {policy.MODEL: ObjectCache(), policy.TENANT: ObjectCache()}
        self._mirror = Applier(api, policy.API_VERSION, policy.MODEL_VERSION, clock, installation)
        self._mirrored: dict[Ref, list[Json]] = {}  # ModelVersion objects, by their Model object
        self._changed = asyncio.Event()
        self._failures: dict[object, int] = {}  # objects that failed in the last pass, and how often in a row
        self._failing: dict[object, int] = {}  # the same for this pass
        self._lines = 0  # log lines of this pass

    def __repr__(self) -> str:
        counts = {kind: len(cache.objects) for kind, cache in self._caches.items()}
        return f"<CustomResourceController {counts} failing={len(self._failures)}>"

    async def run(self) -> None:
        """Reconcile until cancelled: after each change of an object, and every `period_s` seconds."""
        self._caches = {kind: ObjectCache() for kind in self._caches}
        async with asyncio.TaskGroup() as tasks:
            for kind in self._caches:
                tasks.create_task(self._watch(kind), name=f"watch {kind}")
            tasks.create_task(self._mirror.run(), name="mirror versions")
            while True:
                self._changed.clear()
                await self._reconcile_all()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._period_s):
                        await self._changed.wait()

    async def _watch(self, kind: str) -> None:
        async with aclosing(self._api.watch(policy.API_VERSION, kind)) as changes:
            async for change in changes:
                self._caches[kind].apply_change(change)
                self._changed.set()

    async def _reconcile_all(self) -> None:
        """Reconcile every object once. The next pass retries what the cluster refuses."""
        if not all(cache.synced for cache in self._caches.values()):
            return
        self._failing, self._lines = {}, 0
        if tenants := tuple(self._caches[policy.TENANT].objects.values()):
            with self._contain_errors("tenants"):
                facts_by_name = await self._tenants.list_facts()
                for number, obj in enumerate(tenants, 1):
                    await _yield_every_batch(number)
                    with self._contain_errors(Ref.of(obj)):
                        await self._reconcile_tenant(obj, facts_by_name.get(obj["metadata"]["name"]))
        models = self._caches[policy.MODEL]
        for number, obj in enumerate(tuple(models.objects.values()), 1):
            await _yield_every_batch(number)
            with self._contain_errors(Ref.of(obj)):
                await self._reconcile_model(obj)
        for number, (ref, obj) in enumerate(tuple(models.objects.items()), 1):  # the objects that still exist
            await _yield_every_batch(number)
            with self._contain_errors(ref):  # a model that can't be read keeps its mirrors
                self._mirrored[ref] = self._render_versions(obj)
        self._mirrored = {ref: each for ref, each in self._mirrored.items() if ref in models.objects}
        mirrored = [wanted for each in self._mirrored.values() for wanted in each]
        self._mirror.set_wanted(mirrored)
        for number, wanted in enumerate(mirrored, 1):
            await _yield_every_batch(number)
            with self._contain_errors(Ref.of(wanted)):
                await self._reconcile_version(wanted)
        self._failures = self._failing

    @contextmanager
    def _contain_errors(self, subject: object) -> Iterator[None]:
        """Leave an object that the cluster or the database refuses now to a later pass. Its status stays as it is."""
        try:
            yield
        except (ClusterError, Refused) as error:
            failures = self._failures.get(subject, 0) + 1
            self._failing[subject] = failures
            if should_log(failures) and self._lines < MAX_LOG_LINES:
                self._lines += 1
                log.warning("%s was not reconciled: %s", subject, error, extra={"failures": failures})
        except Exception as error:  # a defect in one object must not stop the others
            record_error(error, subject)

    # -- models --

    async def _reconcile_model(self, obj: Json) -> None:
        try:
            spec = policy.model_spec(obj)
            self._check_namespace(obj, spec.tenant)
        except Refused as refused:
            await self._write_refusal(obj, refused.failure)
            return
        name, actor = obj["metadata"]["name"], _actor(obj, spec.tenant)
        is_owned = spec.deletion_policy == "Delete"
        if policy.is_being_deleted(obj):
            await self._finalize(obj, (lambda: self._models.delete(actor, spec.tenant, name)) if is_owned else None)
            return
        await self._set_finalizer(obj, is_owned)
        facts, applied = self._models.find_facts(spec.tenant, name), policy.applied_generation(obj)
        if facts is None:
            not_pushed = (policy.applied_condition(NotFound("model", name)), policy.model_ready_condition(None))
            await self._write_conditions(obj, applied, not_pushed, **policy.model_status(None))
            return
        drift = policy.model_drift(spec, facts)
        applied, failure = await self._apply_spec(obj, lambda: self._models.apply_spec(actor, spec, name, drift))
        facts = self._models.find_facts(spec.tenant, name) or facts
        conditions = (
            policy.applied_condition(failure),
            policy.model_ready_condition(facts),
            policy.in_sync_condition(policy.model_drift(spec, facts)),
        )
        await self._write_conditions(obj, applied, conditions, **policy.model_status(facts))

    def _check_namespace(self, obj: Json, tenant: str) -> None:
        """Raise Refused unless the object is in the tenant's namespace: a writer there speaks for that tenant only."""
        if self._namespace_of(tenant) != obj["metadata"].get("namespace"):
            raise Refused(InvalidRequest("spec.tenant", repr(tenant[:80]), "must be the tenant of the namespace"))

    # -- versions, which are only mirrored --

    def _render_versions(self, obj: Json) -> list[Json]:
        """Return the objects of a model's versions. The Model object owns them, so they are deleted with it."""
        try:
            spec = policy.model_spec(obj)
            self._check_namespace(obj, spec.tenant)
        except Refused:
            return []
        keys = () if policy.is_being_deleted(obj) else self._models.list_versions(spec.tenant, obj["metadata"]["name"])
        owner = {
            "apiVersion": obj["apiVersion"],
            "kind": obj["kind"],
            "name": obj["metadata"]["name"],
            "uid": obj["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        return [_mirrored(key, obj["metadata"]["namespace"], owner) for key in keys]

    async def _reconcile_version(self, wanted: Json) -> None:
        observed = self._mirror.find_observed(Ref.of(wanted))
        spec = wanted["spec"]
        status = self._models.version_status(VersionKey(spec["tenant"], spec["model"], spec["version"]))
        if observed is not None and status is not None:
            await self._write_status(observed, status)

    # -- tenants --

    async def _reconcile_tenant(self, obj: Json, facts: TenantFacts | None) -> None:
        try:
            spec = policy.tenant_spec(obj)
        except Refused as refused:
            await self._write_refusal(obj, refused.failure)
            return
        name, actor = obj["metadata"]["name"], _actor(obj, obj["metadata"]["name"])
        is_owned = spec.deletion_policy == "Delete"
        if policy.is_being_deleted(obj):
            await self._finalize(obj, (lambda: self._tenants.delete(actor, name)) if is_owned else None)
            return
        await self._set_finalizer(obj, is_owned)
        applied, failure = await self._apply_spec(obj, lambda: self._tenants.apply_spec(actor, spec, name, facts))
        if applied != policy.applied_generation(obj) or failure is not None:
            facts = (await self._tenants.list_facts()).get(name)
        conditions = [policy.applied_condition(failure), policy.tenant_ready_condition(facts)]
        if facts is not None:
            conditions.append(policy.in_sync_condition(policy.tenant_drift(spec, facts)))
        await self._write_conditions(obj, applied, conditions, models=0 if facts is None else facts.models)

    # -- both --

    async def _apply_spec(self, obj: Json, apply_spec: Callable[[], Awaitable[None]]) -> tuple[int, Failure | None]:
        """Apply the spec. Return the applied generation, and why it is not the current one. Raises Refused to retry."""
        applied = policy.applied_generation(obj)
        if applied == policy.generation_of(obj):
            return applied, None
        try:
            await apply_spec()
        except Refused as refused:
            if refused.failure.retryable:
                raise
            return applied, refused.failure
        return policy.generation_of(obj), None

    async def _set_finalizer(self, obj: Json, wanted: bool) -> None:
        """Set or remove the finalizer, which keeps a deleted object until its model or tenant is deleted."""
        if policy.has_finalizer(obj) is not wanted:
            await self._write(self._api.apply, policy.finalizer_patch(obj, finalizer=wanted))

    async def _finalize(self, obj: Json, delete: Callable[[], Awaitable[object]] | None) -> None:
        """Finish the deletion of an object. `delete` deletes its model or tenant; None if that stays.

        A refusal is shown in the status until `delete` succeeds. The finalizer does not tell the deletion policy: it
        may be older than a spec that now says Retain.
        """
        if not policy.has_finalizer(obj):
            return
        try:
            if delete is not None:
                await delete()
        except Refused as refused:
            if refused.failure.retryable:
                raise
            if not _is_not_found(refused.failure):
                await self._write_refusal(obj, refused.failure)
                return
        await self._write(self._api.apply, policy.finalizer_patch(obj, finalizer=False))

    async def _write_refusal(self, obj: Json, failure: Failure) -> None:
        await self._write_conditions(obj, policy.applied_generation(obj), (policy.applied_condition(failure),))

    async def _write_conditions(
        self, obj: Json, applied: int, conditions: Iterable[policy.Condition], **rest: object
    ) -> None:
        await self._write_status(
            obj, policy.build_status(obj, applied, conditions, timestamp(self._clock.wall_s()), **rest)
        )

    async def _write_status(self, obj: Json, status: Mapping[str, object]) -> None:
        # A status is written by name. If the object was recreated meanwhile, this status would claim that the new spec
        # is applied.
        if obj.get("status") != status and self._is_there(obj):
            await self._write(
                self._api.apply_status, {**policy.finalizer_patch(obj, finalizer=False), "status": status}
            )
            for each in new_events(obj.get("status") or {}, status):
                await self._api.record(obj, each.reason, each.message, warning=each.is_warning)

    def _is_there(self, obj: Json) -> bool:
        """Return whether the watch still shows this object, and not another one with its name."""
        if (cache := self._caches.get(obj["kind"])) is None:
            return True
        observed = cache.objects.get(Ref.of(obj))
        return observed is not None and observed["metadata"].get("uid") == obj["metadata"].get("uid")

    async def _write(self, call: Callable[[Json], Awaitable[Json]], obj: Json) -> None:
        """Write the object, and put the response into the cache at once. Mirrors are only read by their own watch."""
        if (cache := self._caches.get(obj["kind"])) is None:
            await call(obj)
            return
        with cache.track_call(Ref.of(obj)) as store:
            store(await call(obj))


async def _yield_every_batch(number: int) -> None:
    """Yield to the event loop before every BATCH_SIZE-th object. Thousands at once would block it."""
    if number % BATCH_SIZE == 0:
        await asyncio.sleep(0)


def _actor(obj: Json, tenant: str) -> Actor:
    """Return an actor without a key: the audit log names the object and its generation instead."""
    uid = obj["metadata"].get("uid", "")
    return Actor(key_id="", tenant=tenant, scopes=(), request_id=f"{uid}.{policy.generation_of(obj)}")


def _mirrored(key: VersionKey, namespace: str, owner: Json) -> Json:
    return {
        "apiVersion": policy.API_VERSION,
        "kind": policy.MODEL_VERSION,
        "metadata": {
            "name": service_name(key.model, key.version),
            "namespace": namespace,
            "labels": {**object_labels.OURS, object_labels.MODEL: key.model},
            "ownerReferences": [owner],
        },
        "spec": {"tenant": key.tenant, "model": key.model, "version": key.version},
    }


def _is_not_found(failure: Failure) -> bool:
    return isinstance(failure, NotFound | ModelNotFound)
