"""Custom resources and the admin API change the same state: each write takes effect, and both show the result."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from controlplane.audit.audit_rows import Actor
from controlplane.clock import SystemClock
from controlplane.db.database import Database, sqlite_engine
from controlplane.knative.apply.cluster import Denied, Json, Ref, Upsert
from controlplane.knative.custom_resource_controller import CustomResourceController
from controlplane.knative.custom_resource_stores import ModelResourceStore, TenantResourceStore
from controlplane.knative.policy.custom_resources import TenantFacts, TenantSpec
from controlplane.knative.policy.knative_service import service_name
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.key_store import KeyStore
from controlplane.registry.policy.access import TenantState
from controlplane.registry.policy.domain import Model, VersionKey
from controlplane.registry.registry import Registry
from controlplane.registry.tenant_store import Tenant, TenantStore
from controlplane.scaling.admin_operations import AdminOperations
from controlplane.scaling.policy.scale_settings import ScaleSettings
from controlplane.scaling.replicas import ReplicaTable
from kelvin.contracts.errors import InvalidRequest, Refused, Unavailable
from kelvin.contracts.numbers import MAX_LIMIT
from kelvin.contracts.serving.control_messages import Stats
from tests.controlplane.builders import BY, NOW_S, digest, registration
from tests.controlplane.knative.fake_cluster import FakeCluster
from tests.controlplane.virtual_time import settle

A, B = digest("a"), digest("b")
LIMIT_S = 20.0


@dataclass
class RecordingScaler:
    """An autoscaler that only records calls."""

    ticks: int = 0
    most: int = 5
    stopped: list[VersionKey] = field(default_factory=list)

    def observe(self, stats: Stats) -> None: ...

    def tick(self) -> None:
        self.ticks += 1

    def stop(self, keys: tuple[VersionKey, ...]) -> None:
        self.stopped.extend(keys)

    def resume(self, keys: tuple[VersionKey, ...]) -> None: ...

    def check_scale(self, model: Model, scale: ScaleSettings) -> None:
        if scale.max > self.most:
            raise Refused(InvalidRequest("max", str(scale.max), f"must be {self.most} or less"))


@dataclass
class StoreScenario:
    """The cluster, the registry and the tenants that the controller connects."""

    cluster: FakeCluster
    registry: Registry
    tenants: TenantStore
    scaler: RecordingScaler
    running: asyncio.Task[None]

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not true():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def world(data: Path, cluster: FakeCluster | None = None) -> AsyncIterator[StoreScenario]:
    feed, clock, cluster = FeedHub(), SystemClock(), cluster or FakeCluster()
    database = Database(sqlite_engine(data / "kelvin.db"))
    try:
        registry, tenants, scaler = Registry(database, feed), TenantStore(database, feed), RecordingScaler()
        await registry.load()
        changes = AdminOperations(registry, tenants, KeyStore(database, feed), ReplicaTable(4), scaler, clock)
        declarations = CustomResourceController(
            cluster,
            ModelResourceStore(changes),
            TenantResourceStore(changes),
            clock,
            lambda tenant: f"kelvin-{tenant}",
            "kelvin",
            period_s=0.01,
        )
        running = asyncio.create_task(declarations.run())
        try:
            yield StoreScenario(cluster, registry, tenants, scaler, running)
        finally:
            running.cancel()
            await asyncio.wait([running])
    finally:
        database.close()


async def acme(w: StoreScenario, *letters: str) -> None:
    """Create a tenant with pushed versions of a model."""
    await w.tenants.create(BY, "acme", NOW_S)
    for letter in letters:
        await w.registry.register(registration("chat", letter, tenant="acme"), NOW_S)


async def test_model_follows_its_object(tmp_path: Path) -> None:
    """A Model declared before its push gets its version and scale after it. Its versions are mirrored."""

    async with world(tmp_path) as w:
        spec = {"tenant": "acme", "prod": B[:12], "scale": {"min": 1, "max": 4}}
        chat = w.cluster.declare("Model", "chat", "kelvin-acme", **spec)
        await w.until(lambda: w.cluster.conditions(chat).get("Ready") == ("False", "NotPushed"))
        await acme(w, "a", "b")
        await w.until(lambda: w.cluster.conditions(chat).get("Applied") == ("True", "Applied"))
        model = w.registry.model("acme", "chat")
        assert (model.aliases["prod"], model.scale.min, model.scale.max) == (B, 1, 4)
        await w.until(lambda: len(w.cluster.of("ModelVersion")) == 2)
        await w.until(lambda: all(each.get("status") for each in w.cluster.of("ModelVersion")))
        shown = {each["spec"]["version"]: each["status"]["prod"] for each in w.cluster.of("ModelVersion")}
        assert shown == {A: False, B: True}
        status = w.cluster.objects[chat]["status"]
        assert (status["prod"], status["versions"], status["appliedGeneration"]) == (B, 2, 1)
        assert w.scaler.ticks > 0


async def test_last_write_wins_between_object_and_api(tmp_path: Path) -> None:
    """A change by the API stays, and the object reports the drift. A new generation of the object is applied."""

    async with world(tmp_path) as w:
        await acme(w, "a", "b")
        chat = w.cluster.declare("Model", "chat", "kelvin-acme", tenant="acme", scale={"max": 2})
        await w.until(lambda: w.cluster.conditions(chat).get("InSync") == ("True", "InSync"))
        await w.registry.rescale(BY, "acme", "chat", {"max": 3}, NOW_S)
        await w.until(lambda: w.cluster.conditions(chat).get("InSync") == ("False", "ChangedElsewhere"))
        assert w.registry.model("acme", "chat").scale.max == 3
        w.cluster.declare("Model", "chat", "kelvin-acme", tenant="acme", scale={"max": 4})
        await w.until(lambda: w.cluster.conditions(chat).get("InSync") == ("True", "InSync"))
        assert w.registry.model("acme", "chat").scale.max == 4


async def test_new_leader_applies_no_generation_twice(tmp_path: Path) -> None:
    """The applied generation is in the object's status, so a later API change stays and nothing is written."""

    cluster = FakeCluster()
    async with world(tmp_path, cluster) as w:
        await acme(w, "a")
        chat = cluster.declare("Model", "chat", "kelvin-acme", tenant="acme", scale={"max": 2})
        await w.until(lambda: cluster.conditions(chat).get("InSync") == ("True", "InSync"))
        await w.registry.rescale(BY, "acme", "chat", {"max": 3}, NOW_S)
        await w.until(lambda: cluster.conditions(chat).get("InSync") == ("False", "ChangedElsewhere"))
        await w.until(lambda: any(each.get("status") for each in cluster.of("ModelVersion")))
    cluster.calls.clear()
    before = deepcopy(cluster.objects)
    async with world(tmp_path, cluster) as w:
        other = cluster.declare("Model", "other", "kelvin-acme", tenant="acme")
        await w.until(lambda: "Ready" in cluster.conditions(other))
        assert w.registry.model("acme", "chat").scale.max == 3
    assert {ref: obj for ref, obj in cluster.objects.items() if ref != other} == before
    assert {ref.name for _, ref in cluster.calls if ref.kind == "Model"} == {"other"}


async def test_refused_spec_is_in_the_status(tmp_path: Path) -> None:
    """The reason is in the status and nothing is applied. A namespace may only declare its own tenant's models."""

    async with world(tmp_path) as w:
        await acme(w, "a")
        many = w.cluster.declare("Model", "chat", "kelvin-acme", tenant="acme", scale={"max": 6}, prod="c" * 12)
        thief = w.cluster.declare("Model", "chat", "kelvin-other", tenant="acme", scale={"max": 1})
        await w.until(lambda: w.cluster.conditions(many).get("Applied") == ("False", "InvalidRequest"))
        await w.until(lambda: w.cluster.conditions(thief).get("Applied") == ("False", "InvalidRequest"))
        assert w.registry.model("acme", "chat").scale == ScaleSettings()
        assert "appliedGeneration" in w.cluster.objects[many]["status"]
        assert w.cluster.objects[many]["status"]["appliedGeneration"] == 0
        assert w.cluster.conditions(many)["InSync"] == ("False", "ChangedElsewhere"), "the model differs from the spec"
        assert "InSync" not in w.cluster.conditions(thief)
        w.scaler.most = 6
        await w.registry.register(registration("chat", "c", tenant="acme"), NOW_S)
        await w.until(lambda: w.cluster.conditions(many).get("Applied") == ("True", "Applied"))
        assert w.registry.model("acme", "chat").aliases["prod"] == digest("c")


def _is_held(w: StoreScenario, ref: Ref, wanted: bool) -> bool:
    return bool(w.cluster.objects[ref]["metadata"].get("finalizers")) is wanted


async def test_failures_of_each_object_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Repeated failures of one object hide neither another's first failure nor its next failure after a success."""
    async with world(tmp_path) as w:
        chat = w.cluster.declare("Model", "chat", "kelvin-acme", tenant="acme")
        w.cluster.refuse[chat] = deque([Denied("no")] * 100_000)
        await w.until(lambda: len(w.cluster.refuse[chat]) < 100_000 - 20)
        other = replace(chat, name="other")
        for policy in ("Delete", "Retain"):  # with a finalizer, and without
            w.cluster.refuse[other] = deque([Denied("no")])
            w.cluster.declare("Model", "other", "kelvin-acme", tenant="acme", deletionPolicy=policy)
            await w.until(lambda: not w.cluster.refuse[other])
            await w.until(partial(_is_held, w, other, policy == "Delete"))
        messages = [each.getMessage() for each in caplog.records if "kelvin-acme/other" in each.getMessage()]
        assert messages == [f"{other} was not reconciled: Denied: no"] * 2


async def test_delete_policy_deletes_the_model(tmp_path: Path) -> None:
    """Its versions go with it. Control: a model without the policy stays."""

    async with world(tmp_path) as w:
        await acme(w, "a")
        await w.registry.register(registration("stays", "a", tenant="acme"), NOW_S)
        goes = w.cluster.declare("Model", "chat", "kelvin-acme", tenant="acme", deletionPolicy="Delete")
        stays = w.cluster.declare("Model", "stays", "kelvin-acme", tenant="acme")
        await w.until(lambda: len(w.cluster.of("ModelVersion")) == 2)
        await w.until(lambda: w.cluster.objects[goes]["metadata"].get("finalizers") == ["kelvin.dev/deletion"])
        w.cluster.request_deletion(goes)
        w.cluster.request_deletion(stays)
        await w.until(lambda: not w.cluster.of("Model") and not w.cluster.of("ModelVersion"))
        assert [model.model for model in w.registry.models("acme")] == ["stays"]


async def test_retain_keeps_the_model(tmp_path: Path) -> None:
    """The finalizer may still be there from an earlier Delete. Control: the other model is deleted."""

    async with world(tmp_path) as w:
        await acme(w, "a")
        await w.registry.register(registration("goes", "a", tenant="acme"), NOW_S)
        names = [
            w.cluster.declare("Model", name, "kelvin-acme", tenant="acme", deletionPolicy="Delete")
            for name in ("chat", "goes")
        ]
        await w.until(lambda: all(w.cluster.objects[name]["metadata"].get("finalizers") for name in names))
        w.cluster.declare("Model", "chat", "kelvin-acme", tenant="acme", deletionPolicy="Retain")
        for name in names:
            w.cluster.request_deletion(name)
        await w.until(lambda: not w.cluster.of("Model"))
        assert [model.model for model in w.registry.models("acme")] == ["chat"]


async def test_retain_releases_a_tenant_with_models(tmp_path: Path) -> None:
    """The object waits until the tenant has no models, or until the policy is Retain."""

    async with world(tmp_path) as w:
        name = w.cluster.declare("Tenant", "acme", deletionPolicy="Delete")
        await w.until(lambda: w.cluster.conditions(name).get("Ready") == ("True", "Active"))
        await w.registry.register(registration("chat", "a", tenant="acme"), NOW_S)
        w.cluster.request_deletion(name)
        await w.until(lambda: w.cluster.conditions(name).get("Applied") == ("False", "Conflict"))
        w.cluster.declare("Tenant", "acme", deletionPolicy="Retain")
        await w.until(lambda: name not in w.cluster.objects)
        assert (await w.tenants.tenant_status("acme", NOW_S)).models == 1


async def test_recreated_object_is_applied_itself(tmp_path: Path) -> None:
    """The result for a deleted object of the same name and generation is not recorded on the new one."""

    async with world(tmp_path) as w:
        await acme(w, "a")
        settled, spec = w.registry.rescale, {"tenant": "acme"}

        async def replaced(
            actor: Actor, tenant: str, model: str, change: Mapping[str, Any], now_s: int
        ) -> ScaleSettings:
            w.registry.rescale = settled  # type: ignore[method-assign]
            scale = await settled(actor, tenant, model, change, now_s)
            w.cluster.remove(chat)
            w.cluster.declare("Model", "chat", "kelvin-acme", **spec, scale={"max": 3})
            await settle()  # the watch delivers both
            return scale

        w.registry.rescale = replaced  # type: ignore[method-assign]
        chat = w.cluster.declare("Model", "chat", "kelvin-acme", **spec, scale={"max": 2})
        await w.until(lambda: w.cluster.conditions(chat).get("Applied") == ("True", "Applied"))
        await w.until(lambda: w.cluster.conditions(chat).get("InSync") == ("True", "InSync"))
        assert w.registry.model("acme", "chat").scale.max == 3


async def test_late_answer_revives_no_deleted_object(tmp_path: Path) -> None:
    """The deletion arrives before the response to a write. No ModelVersion is written for a deleted owner, since it
    would be collected and written again for ever.
    """

    async with world(tmp_path) as w:
        await acme(w, "a")
        await w.registry.register(registration("other", "a", tenant="acme"), NOW_S)
        w.cluster.answered.clear()
        chat = w.cluster.declare("Model", "chat", "kelvin-acme", tenant="acme")
        await w.until(lambda: ("status", chat) in w.cluster.calls)
        w.cluster.request_deletion(chat)
        w.cluster.declare("Model", "other", "kelvin-acme", tenant="acme")
        await settle()  # the watch delivers both
        w.cluster.answered.set()
        await w.until(lambda: any(each["spec"]["model"] == "other" for each in w.cluster.of("ModelVersion")))
        assert {ref.name for what, ref in w.cluster.calls if what == "apply"} == {service_name("other", A)}


async def test_tenant_follows_its_object(tmp_path: Path) -> None:
    """The tenant is created, limited and suspended. It is deleted once it has no models."""

    async with world(tmp_path) as w:
        name = w.cluster.declare("Tenant", "acme", limits={"rpm": 60, "weight": 3}, deletionPolicy="Delete")
        await w.until(lambda: w.cluster.conditions(name).get("Ready") == ("True", "Active"))
        limits = (await w.tenants.tenant_status("acme", NOW_S)).limits
        assert (limits.rpm, limits.weight, limits.tpm) == (60, 3, None)
        await w.registry.register(registration("first", "a", tenant="acme"), NOW_S)
        w.cluster.declare("Tenant", "acme", suspended=True, deletionPolicy="Delete")
        await w.until(lambda: w.cluster.conditions(name).get("Ready") == ("False", "Suspended"))
        assert (await w.tenants.tenant_status("acme", NOW_S)).state is TenantState.SUSPENDED
        assert [key.model for key in w.scaler.stopped] == ["first"], "its replicas end"
        await w.registry.register(registration("chat", "a", tenant="acme"), NOW_S)
        w.cluster.request_deletion(name)
        await w.until(lambda: w.cluster.conditions(name).get("Applied") == ("False", "Conflict"))
        await w.tenants.create(BY, "owner", NOW_S)
        await w.registry.register(registration("lent", "b", tenant="owner"), NOW_S)
        await w.registry.grant(BY, "owner", "lent", "acme", NOW_S)
        for model in ("chat", "first"):
            await w.registry.delete_model(BY, "acme", model, NOW_S, lambda _: False, force=True)
        await w.until(lambda: name not in w.cluster.objects)
        assert w.registry.model("owner", "lent").grantees == (), "its grants are gone"


@pytest.mark.parametrize("limits", [{"weight": 0}, {"outputTokens": MAX_LIMIT + 1}])
async def test_tenant_limits_are_validated(tmp_path: Path, limits: dict[str, int]) -> None:
    """The schema allows these values, the admin API does not."""

    async with world(tmp_path) as w:
        name = w.cluster.declare("Tenant", "acme", limits=limits)
        await w.until(lambda: w.cluster.conditions(name).get("Applied") == ("False", "InvalidRequest"))
        assert w.cluster.conditions(name)["Ready"] == ("False", "NotMade")


async def test_unreachable_cluster_is_retried(tmp_path: Path) -> None:
    """The spec is applied meanwhile, and the status is written once the cluster is back."""

    async with world(tmp_path) as w:
        await acme(w, "a")
        w.cluster.away = True
        chat = w.cluster.declare("Model", "chat", "kelvin-acme", tenant="acme", scale={"max": 2})
        await w.until(lambda: w.registry.model("acme", "chat").scale.max == 2)
        w.cluster.away = False
        await w.until(lambda: w.cluster.conditions(chat).get("Applied") == ("True", "Applied"))


async def test_unreachable_database_changes_no_status(tmp_path: Path) -> None:
    """The tenant's state is unknown, so the status stays. The new generation is applied once the database is back."""

    async with world(tmp_path) as w:
        name = w.cluster.declare("Tenant", "acme", limits={"rpm": 60})
        await w.until(lambda: w.cluster.conditions(name).get("Ready") == ("True", "Active"))
        status, all_tenants, calls = w.cluster.objects[name]["status"], w.tenants.all_tenants, 0

        async def away(now_s: int) -> list[Tenant]:
            nonlocal calls
            calls += 1
            raise Refused(Unavailable("the database"))

        w.tenants.all_tenants = away  # type: ignore[method-assign]
        w.cluster.declare("Tenant", "acme", limits={"rpm": 61})
        await w.until(lambda: calls > 2)
        assert w.cluster.objects[name]["status"] == status
        w.tenants.all_tenants = all_tenants  # type: ignore[method-assign]
        await w.until(lambda: w.cluster.objects[name]["status"].get("appliedGeneration") == 2)
        assert (await w.tenants.tenant_status("acme", NOW_S)).limits.rpm == 61


async def test_deleted_object_is_not_recreated(tmp_path: Path) -> None:
    """The last apply comes too late. It names the uid, so the cluster refuses it."""

    async with world(tmp_path) as w:
        name = w.cluster.declare("Tenant", "acme", deletionPolicy="Delete")
        await w.until(lambda: w.cluster.conditions(name).get("Ready") == ("True", "Active"))
        apply, removed = w.cluster.apply, asyncio.Event()

        async def late(obj: Json) -> Json:
            if not obj["metadata"].get("finalizers"):
                w.cluster.remove(name)  # an operator removed the finalizer by hand
                removed.set()
            return await apply(obj)

        w.cluster.apply = late  # type: ignore[method-assign]
        w.cluster.request_deletion(name)
        await asyncio.wait_for(removed.wait(), LIMIT_S)
        other = w.cluster.declare("Tenant", "other")
        await w.until(lambda: "Ready" in w.cluster.conditions(other))
        assert name not in w.cluster.objects


async def test_unreadable_object_affects_no_other(tmp_path: Path) -> None:
    """Its mirrors stay as they are. Other models are applied and mirrored."""

    async with world(tmp_path) as w:
        await acme(w, "a")
        first = w.cluster.declare("Model", "chat", "kelvin-acme", tenant="acme", prod=A)
        await w.until(lambda: len(w.cluster.of("ModelVersion")) == 1)
        held = w.cluster.objects[first]
        w.cluster.put({**held, "metadata": {key: each for key, each in held["metadata"].items() if key != "uid"}})
        await w.registry.register(registration("mail", "a", tenant="acme"), NOW_S)
        second = w.cluster.declare("Model", "mail", "kelvin-acme", tenant="acme", prod=A)
        await w.until(lambda: w.running.done() or len(w.cluster.of("ModelVersion")) == 2)
        assert not w.running.done()
        assert w.cluster.conditions(second)["Applied"][0] == "True"


async def test_a_defect_leaves_no_watch_open(tmp_path: Path) -> None:
    """Watches of the mirrors are closed, too."""

    async with world(tmp_path) as w:
        await w.until(lambda: len(w.cluster.open_watches) == 3)
        w.cluster.open_watches[0][1].put_nowait(Upsert({"apiVersion": "v1", "metadata": {}}))
        await asyncio.wait([w.running], timeout=LIMIT_S)
        with pytest.raises(ExceptionGroup) as raised:
            w.running.result()
        assert raised.group_contains(KeyError)
        assert w.cluster.open_watches == []


def _has_ready_condition(cluster: FakeCluster, ref: Ref) -> bool:
    return "Ready" in cluster.conditions(ref)


async def test_events_are_recorded_once(tmp_path: Path) -> None:
    """A second control plane does not record them again."""

    cluster = FakeCluster()
    for _ in range(2):
        async with world(tmp_path, cluster) as w:
            if not cluster.objects:
                await acme(w, "a")
                cluster.declare("Model", "chat", "kelvin-acme", tenant="acme")
            other = cluster.declare("Model", f"other-{len(cluster.events)}", "kelvin-acme", tenant="acme")
            await w.until(partial(_has_ready_condition, cluster, other))
            await w.until(lambda: any(each.get("status") for each in cluster.of("ModelVersion")))
    assert [(ref.kind, ref.name, reason, warning) for ref, reason, _, warning in cluster.events] == [
        ("Model", "chat", "Ready", False),
        ("ModelVersion", service_name("chat", A), "Ready", False),
    ]


class _Stores:
    """Model and tenant stores in one, which never wait and count their calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def find_facts(self, tenant: str, name: str) -> None:
        self.calls["models"] += 1

    def list_versions(self, tenant: str, name: str) -> tuple[VersionKey, ...]:
        self.calls["lists of versions"] += 1
        return (VersionKey(tenant, name, A),)

    def version_status(self, key: VersionKey) -> dict[str, object]:
        self.calls["versions"] += 1
        return {"state": "ready", "prod": True, "readyReplicas": 0}

    async def list_facts(self) -> dict[str, TenantFacts]:
        return {}

    async def apply_spec(self, actor: Actor, spec: TenantSpec, name: str, facts: TenantFacts | None) -> None:
        self.calls["tenants"] += 1


async def test_pass_over_many_objects_lets_other_work_run() -> None:
    """A pass over thousands of objects must not block the loop: at most 100 of each kind are handled per turn."""
    cluster, stores, many = FakeCluster(), _Stores(), 250
    for number in range(many):
        cluster.declare("Tenant", f"t-{number}")
        cluster.declare("Model", f"m-{number}", "kelvin-acme", tenant="acme")
    declarations = CustomResourceController(
        cluster, cast(ModelResourceStore, stores), cast(TenantResourceStore, stores), SystemClock(),
        lambda tenant: f"kelvin-{tenant}", "kelvin", period_s=0.01,
    )  # fmt: skip
    running, most, before = asyncio.create_task(declarations.run()), Counter[str](), Counter[str]()
    try:
        async with asyncio.timeout(LIMIT_S):
            while not running.done() and stores.calls["versions"] < many:
                await asyncio.sleep(0)
                most |= stores.calls - before
                before = stores.calls.copy()
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert most.keys() == {"tenants", "models", "lists of versions", "versions"}
    assert max(most.values()) <= 100, most
