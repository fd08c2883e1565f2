"""World: the control plane of one machine, over processes that start, restore, sleep, hang and die.

Registry, tenants, autoscaler, actuator, pool, fleet, adoption, feed, ledger and budgets are assembled by the product's
own `open_services` and `build_machine_backend`. The database is a file in memory. The control plane restarts while the
other processes live on.
"""

import asyncio
import sqlite3
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from typing import Any, Final
from unittest import mock

import msgspec
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from controlplane.api import machine_api
from controlplane.app import machine_backend as composition
from controlplane.app.control_plane_services import ControlPlaneServices, open_services
from controlplane.app.machine_backend import build_machine_backend
from controlplane.app.settings import Settings
from controlplane.audit.audit_rows import Actor
from controlplane.billing.price_book import read_price_book
from controlplane.clock import SystemClock
from controlplane.ledger.running_replicas import watch_lost_replicas
from controlplane.ledger_check.ledger_verification import verify_all_chains
from controlplane.registry.feed_hub import FeedEnded
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.admin_operations import AdminOperations
from controlplane.scaling.interfaces import ReplicaBackend
from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.local.standby_pool import StandbyPool
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from kelvin.contracts.accounting.usage import RecordOrigin, RequestRecord
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.serving.control_messages import ConcurrencyStat, Feed, RequestBatch, Stats, VersionRegistration
from kelvin.contracts.serving.machine import Machine
from kelvin.contracts.serving.start_forecast import TierPlacement
from kelvin.contracts.wire import decode
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.telemetry.telemetry import open_without_traces
from tests.simulation.core.databases import migrated, opened
from tests.simulation.core.fake_machine import FakeMachine, without_kernel
from tests.simulation.core.world import Injected, InjectedError, Invariant, World, operation

BY: Final = Actor(key_id="k", tenant="default", scopes=(), request_id="req_1")
TENANTS: Final = ("ann", "bob")
MODELS: Final = (("ann", "small"), ("ann", "large"), ("bob", "own"))
REPORT_S: Final = 1.0
SILENT_S: Final = 4.0  # how long an activator may be silent after a control plane has started
SAFE_S: Final = 5.5  # how long a new control plane removes nothing: less than the shortest stable window
LOOK_S: Final = 2.0
NAMED_S: Final = 45.0  # within which a version with a name has its minimum, without faults
WHOLE_S: Final = 150.0  # the same if no room is made (for further replicas, or from other tenants' idle ones)
GONE_S: Final = 60.0  # within which everything that may not run has ended
LOOPS: Final = (
    "standbys", "adopter", "autoscaler", "damages", "spending", "audit", "lives without an end",
)  # fmt: skip
FAULT_S: Final = 90.0  # how long a fault excuses missing replicas


class _DiskError(Injected, sqlite3.OperationalError):
    """An error of SQLite that is not a lock conflict."""


class _Peers:
    """The other processes of the installation. They are healthy, and the cache's state is unknown."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    async def whereabouts(self, key: VersionKey) -> TierPlacement:
        raise Refused(Unavailable("the weight cache"))

    async def damaged_pids(self) -> frozenset[int]:
        return frozenset()

    async def prefetch(self, wish: object) -> None:
        return

    async def zygote_answers(self) -> bool:
        return True

    async def close(self) -> None:
        return


class _Zygote:
    """The source of standbys."""

    pid = None
    machine: FakeMachine

    def __init__(self, directory: SocketDirectory) -> None:
        self.fork = self.machine.fork


@dataclass(frozen=True)
class AdoptedReplicas:
    """The replicas in use when a control plane started, and until when it must keep them. A later step ends this."""

    ready: dict[VersionKey, int]
    until_s: float
    steps: int


@dataclass
class RunningControlPlane:
    """A running control plane."""

    stack: AsyncExitStack
    services: ControlPlaneServices
    running: ReplicaBackend
    changes: AdminOperations
    fleet: Fleet
    pool: StandbyPool
    reader: "asyncio.Task[None]"


class MachineWorld(World):
    """Two tenants, up to three models, few device slots, and two activators that report load."""

    name = "machine"
    steps_max = 26

    async def start(self) -> None:
        """Start an installation for the first time."""
        is_small = self.random.random() < 0.4  # one model on one device slot: its versions replace each other
        self.models = MODELS[: 1 if is_small else len(MODELS)]
        (self.directory / "run").mkdir(mode=0o700)
        (self.directory / "kelvin.db").write_bytes(migrated())
        self.machine = FakeMachine(Random(self.random.random()), self.directory / "run")
        self.settings = Settings(
            data=self.directory, lifeline_fd=None, standbys=self.random.choice((0, 1, 2)),
            device_slots=1 if is_small else self.random.choice((1, 2, 4)), cores=4, threads_cap=1, kv_bytes=64 << 20,
            drain_s=20.0,
            price_book=None,
        )  # fmt: skip
        self.machine.drain_s = self.settings.drain_s
        self.book = read_price_book(self.settings.price_book)
        self.load: dict[VersionKey, float] = {}  # concurrent requests of callers
        self.silent_s = 0.0  # until when the second activator has not returned
        self.fault_s = self.loop.time()  # until when replicas may be missing because of a fault
        self.missing_since_s: dict[tuple[VersionKey, bool], float] = {}  # and whether room is made for it
        self.running_since_s: dict[str, float] = {}  # suspended tenants that still run something
        self.broken: list[str] = []  # minimums that were missing for too long
        self.billed: list[str] = []  # suspended tenants that ran something for too long
        self.suspended: set[str] = set()
        self.serving: set[VersionKey] = set()  # undisputed versions in use that have a replica
        self.lost: list[VersionKey] = []  # such versions that have lost it
        self.kept: dict[VersionKey, int] = {}  # minimums that are met
        self.taken_over: AdoptedReplicas | None = None
        self.released: list[VersionKey] = []  # versions whose replicas in use a new control plane removed
        self.below: list[VersionKey] = []  # versions that fell below a met minimum
        self.broken_s = self.loop.time()  # until when processes may be missing because of a fault
        self.last_number = 0
        self.commit_fails = 0
        self.plane: RunningControlPlane | None = None
        self.patches = AsyncExitStack()
        self.patches.enter_context(without_kernel(self.machine))
        zygote = type("Zygote", (_Zygote,), {"machine": self.machine})
        self.patches.enter_context(mock.patch.object(composition, "ZygoteClient", zygote))
        self.patches.enter_context(mock.patch.object(composition, "SiblingProcesses", _Peers))
        self.made: dict[str, Any] = {}
        self.patches.enter_context(mock.patch.object(machine_api, "router"))  # creating the routes takes long
        for name, kind in (("Fleet", Fleet), ("StandbyPool", StandbyPool)):
            self.patches.enter_context(mock.patch.object(composition, name, self._keep(name, kind)))
        plane = await self._open()
        for tenant in TENANTS:
            await plane.services.access_stores.tenants.create(BY, tenant, self._now_s())
        for tenant, model in self.models[: self.random.randint(1, 3)]:
            await self._push(tenant, model)
            if self.random.random() < 0.5:
                await self._try(plane.changes.scale(BY, tenant, model, {"min": 1, "max": self.random.choice((1, 4))}))
        self.start_loop(self._report(), "activator")
        self.start_loop(self._look(), "look")

    def _keep(self, name: str, kind: type[Any]) -> Any:
        def made(*given: Any, **more: Any) -> Any:
            self.made[name] = kind(*given, **more)
            return self.made[name]

        return made

    def _now_s(self) -> int:
        return int(self.clocks.wall())

    # The life of the control plane.

    async def _open(self) -> RunningControlPlane:
        """Assemble the control plane as `controlplane.app.app` does."""
        stack = AsyncExitStack()
        database = stack.enter_context(closing(opened(self.directory / "kelvin.db")))
        event.listen(database.engine, "begin", self._beginning)
        directory = stack.enter_context(closing(SocketDirectory(self.settings.run)))
        clock, telemetry = SystemClock(), open_without_traces("controlplane")
        machine = Machine(self.settings.device_slots, 4, 1, 64 << 20)
        services = await open_services(stack, self.settings, clock, self.book, telemetry, directory, database, machine)
        running = await build_machine_backend(stack, services)
        since_us = clock.monotonic_us()
        services.tasks.start_loop("spending", services.spending.run)
        services.tasks.start_loop("audit", services.audit_log.run)
        services.tasks.start_loop(
            "lives without an end", lambda: watch_lost_replicas(services.ledger.record_lost_replicas, clock, since_us)
        )
        tenants = services.access_stores.tenants
        self.plane = plane = RunningControlPlane(
            stack, services, running,
            AdminOperations(
                services.registry, tenants, services.access_stores.keys, running.replicas, running.scaler, clock
            ),
            self.made["Fleet"], self.made["StandbyPool"],
            self.loop.create_task(self._read(services), name="feed reader"),
        )  # fmt: skip

        return plane

    async def _close(self) -> None:
        """End the control plane. Runtimes live on."""
        plane, self.plane = self.plane, None
        if plane is not None:
            plane.reader.cancel()
            await asyncio.gather(plane.reader, return_exceptions=True)
            await plane.stack.aclose()

    def _beginning(self, connection: object) -> None:
        if self.commit_fails > 0:
            self.commit_fails -= 1
            fault = _DiskError("disk I/O error") if self.commit_fails % 2 else InjectedError(5, "disk I/O error")
            raise OperationalError("BEGIN", {}, fault)

    async def _read(self, services: ControlPlaneServices) -> None:
        """Read the activators' feeds."""
        await asyncio.gather(self._follow(services, "activator-1"), self._follow(services, "activator-2"))

    async def _follow(self, services: ControlPlaneServices, name: str) -> None:
        with services.feed.subscribe(name) as subscription:
            while True:
                try:
                    decode(await subscription.next_line(), Feed)
                except FeedEnded:
                    return
                subscription.record_sent()

    # The activator.

    async def _report(self) -> None:
        """Report the callers' load each second, and make serving replicas as busy."""
        told: set[VersionKey] = set()
        while True:
            await asyncio.sleep(REPORT_S)
            now = {key: load for key, load in self.load.items() if load > 0}
            for process in self.machine.processes.values():
                of = process.bind if process.serves else None
                busy = int(of is not None and now.get(VersionKey(of.tenant, of.model, of.version), 0) > 0)
                process.busy = min(busy, process.busy) if process.is_ending else busy
            stats = tuple(
                ConcurrencyStat(
                    tenant=key.tenant, model=key.model, version=key.version, concurrency=now.get(key, 0.0),
                    requests=int(now.get(key, 0.0)),
                )
                for key in sorted({*now, *told})
            )  # fmt: skip
            told = set(now)
            if self.plane is not None:
                self.plane.running.scaler.observe(Stats(activator="activator-1", stats=_part(stats, 0.2)))
            if self.plane is not None and self.loop.time() >= self.silent_s:  # otherwise it is still reconnecting
                self.plane.running.scaler.observe(Stats(activator="activator-2", stats=_part(stats, 0.8)))

    async def _look(self) -> None:
        """Note since when replicas are missing, or run although they must not."""
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = self.loop.time()
            if self.plane is None:
                self.missing_since_s.clear()
                continue
            count = self.plane.running.replicas.ready_count
            runs = {replica.key.tenant for replica in self.plane.running.replicas if replica.key is not None}
            missing = {
                (key, not count(key) and runs <= {key.tenant})
                for key, least in self.promised().items()
                if count(key) < least
            }
            self.missing_since_s = {each: self.missing_since_s.get(each, now_s) for each in missing}
            for (key, is_room_made), since_s in self.missing_since_s.items():
                longest_s = NAMED_S if is_room_made else WHOLE_S
                if (missing_s := now_s - max(since_s, self.fault_s)) > longest_s:
                    self.broken.append(f"{key} is below its minimum for {missing_s:.0f} s without a fault")
            self.running_since_s = {name: self.running_since_s.get(name, now_s) for name in self.suspended & runs}
            for tenant, since_s in self.running_since_s.items():
                if (runs_s := now_s - max(since_s, self.fault_s)) > GONE_S:
                    self.billed.append(f"{tenant} is suspended, and runs something for {runs_s:.0f} s")
            serving = self._undisputed()
            if now_s > self.broken_s:
                self.lost += [key for key in self.serving & self._wanted() if not self._serves(key)]
            self.serving = {key for key in serving if self._serves(key)}
            ready, least = self.plane.running.replicas.ready_count, self.minimums()
            if now_s > self.broken_s:
                self.below += [key for key, count in self.kept.items() if least.get(key) == count > ready(key)]
            self.kept = {key: count for key, count in least.items() if ready(key) >= count}
            if (over := self.taken_over) is not None and now_s <= over.until_s and over.steps == self.steps:
                self.released += [key for key, count in over.ready.items() if ready(key) < count]

    def check(self, invariants: tuple[Invariant, ...]) -> None:
        """Before the invariants are checked, forget what a step has revoked.

        A later step may grant it again before the next look, which would see no change at all.
        """
        if self.plane is not None:
            promised, minimums = self.promised(), self.minimums()
            self.missing_since_s = {each: at_s for each, at_s in self.missing_since_s.items() if each[0] in promised}
            self.running_since_s = {name: at_s for name, at_s in self.running_since_s.items() if name in self.suspended}
            self.kept = {key: count for key, count in self.kept.items() if minimums.get(key) == count}
            self.serving &= self._undisputed()
        super().check(invariants)

    def _serves(self, key: VersionKey) -> bool:
        return self.plane is None or self.plane.running.replicas.ready_count(key) > 0

    def _wanted(self) -> set[VersionKey]:
        """Return the versions with requests, of active tenants and models."""
        assert self.plane is not None
        registry, found = self.plane.services.registry, set[VersionKey]()
        for key, load in self.load.items():
            known = registry.find(key)
            if load > 0 and known is not None and known[1].stopped_at_s is None and key.tenant not in self.suspended:
                found.add(key)
        return found

    def _undisputed(self) -> set[VersionKey]:
        """Return the wanted versions if one slot for each of them fits beside all minimums."""
        wanted = self._wanted()
        return wanted if self._needed(wanted) <= self.settings.device_slots else set()

    def _needed(self, wanted: set[VersionKey]) -> int:
        assert self.plane is not None
        least = dict.fromkeys(wanted, 1)
        for model in self.plane.services.registry.all_models():
            for digest in model.named:
                key = VersionKey(model.tenant, model.model, digest)
                least[key] = max(least.get(key, 0), model.scale.min)
        return sum(least.values())

    def promised(self) -> dict[VersionKey, int]:
        """Return the minimums that must hold soon in any case, because no other version has requests."""
        least = self.minimums()
        return least if all(key in least for key, load in self.load.items() if load > 0) else {}

    def minimums(self) -> dict[VersionKey, int]:
        """Return the minimums of named versions of active models, if all fit and no other tenant needs a slot."""
        assert self.plane is not None
        services, found = self.plane.services, dict[VersionKey, int]()
        for model in services.registry.all_models():
            if model.tenant in self.suspended or services.feed.is_spent(model.tenant) or not model.scale.min:
                continue
            for digest in model.named:
                version = model.version(digest)
                if version is not None and version.stopped_at_s is None and not version.is_deleted:
                    found[version.key] = model.scale.min
        tenants = {key.tenant for key in (*found, *self._wanted())}
        return found if len(tenants) == 1 and sum(found.values()) <= self.settings.device_slots else {}

    # Actions of operators.

    async def _push(self, tenant: str, model: str) -> None:
        assert self.plane is not None
        self.last_number += 1
        registration = VersionRegistration(
            tenant=tenant, model=model, version=f"{self.last_number:064x}", limits=Limits(100, 100, 4),
            architecture="LlamaForCausalLM", weight_bytes=1000, total_bytes=4096, kv_bytes_per_token=16,
            max_positions=128,
        )  # fmt: skip
        await self._try(self.plane.services.registry.register(registration, self._now_s()))

    async def _try(self, work: Any) -> bool:
        """Return whether the work was done. A refusal and a database error are expected."""
        try:
            await work
        except Refused as refused:
            self.record_event(f"refused: {refused.failure.message[:80]}")
            return False
        except OperationalError:
            self.record_event("the database failed")
            return False
        return True

    def _keys(self) -> list[VersionKey]:
        if self.plane is None:
            return []
        models = self.plane.services.registry.all_models()
        return [version.key for model in models for version in model.versions if not version.is_deleted]

    @operation(10)
    async def ask(self, random: Random) -> None:
        """Change the load of a version."""
        if keys := self._keys():
            self.load[random.choice(keys)] = random.choice((0.0, 0.0, 1.0, 3.0, 10.0))

    @operation(2)
    async def stop_traffic(self, random: Random) -> None:
        """End all load of all versions."""
        self.load.clear()

    @operation(5)
    async def push(self, random: Random) -> None:
        """Register a new version, and sometimes deploy it."""
        if self.plane is not None:
            tenant, model = random.choice(self.models)
            await self._push(tenant, model)
            if random.random() < 0.6:
                await self._try(self.plane.changes.deploy(BY, tenant, model, f"{self.last_number:064x}"))

    @operation(4)
    async def deploy(self, random: Random) -> None:
        """Deploy another version of a model."""
        if keys := self._keys():
            key = random.choice(keys)
            assert self.plane is not None
            await self._try(self.plane.changes.deploy(BY, key.tenant, key.model, key.version))

    @operation(2)
    async def split(self, random: Random) -> None:
        """Split a model between two versions, or end its split."""
        if self.plane is None:
            return
        for tenant, model in random.sample(self.models, len(self.models)):
            digests = [key.version for key in self._keys() if (key.tenant, key.model) == (tenant, model)]
            if len(digests) > 1:
                weights = dict.fromkeys(random.sample(digests, 2), 50) if random.random() < 0.6 else {}
                await self._try(self.plane.changes.split(BY, tenant, model, weights))
                return

    @operation(6)
    async def scale(self, random: Random) -> None:
        """Change the bounds of a model."""
        if self.plane is None:
            return
        tenant, model = random.choice(self.models)
        least = random.choice((0, 1, 1, 2))
        change = {
            "min": least, "max": max(least, random.choice((1, 2, 4))), "window_s": random.choice((6.0, 60.0)),
            "grace_s": random.choice((0.0, 30.0)), "idle": random.choice(("zero", "zero", "sleep", "sleep2", "auto")),
        }  # fmt: skip
        await self._try(self.plane.changes.scale(BY, tenant, model, change))

    @operation(2)
    async def stop_model(self, random: Random) -> None:
        """Stop a model as an operator."""
        if self.plane is None:
            return
        tenant, model = random.choice(self.models)
        await self._try(self._stop_versions(tenant, model))

    async def _stop_versions(self, tenant: str, model: str) -> None:
        assert self.plane is not None
        plane = self.plane
        found = await plane.services.registry.stop(BY, tenant, model, self._now_s())
        plane.running.scaler.stop(tuple(version.key for version in found.versions))

    @operation(2)
    async def delete(self, random: Random) -> None:
        """Delete a version or a model."""
        if keys := self._keys():
            key, plane = random.choice(keys), self.plane
            assert plane is not None
            if random.random() < 0.5:
                await self._try(plane.changes.delete_model(BY, key.tenant, key.model, force=random.random() < 0.7))
            else:
                await self._try(self._delete_version(plane, key))

    async def _delete_version(self, plane: RunningControlPlane, key: VersionKey) -> None:
        in_use = plane.running.replicas.is_present
        await plane.services.registry.delete(BY, key.tenant, key.model, key.version, self._now_s(), in_use)
        if in_use(key):  # requested while the row was being written
            plane.running.scaler.stop((key,))

    @operation(3)
    async def suspend(self, random: Random) -> None:
        """Suspend or resume a tenant."""
        if self.plane is not None:
            tenant = random.choice(TENANTS)
            is_suspended, changes = tenant in self.suspended, self.plane.changes
            self.serving = {key for key in self.serving if key.tenant != tenant}
            self.suspended.add(tenant)  # its replicas may end from here on, and no minimum holds meanwhile
            is_done = await self._try((changes.resume if is_suspended else changes.suspend)(BY, tenant))
            self.kept = {key: count for key, count in self.kept.items() if key.tenant != tenant}
            if is_done == is_suspended:
                self.suspended.discard(tenant)

    @operation(2)
    async def budget(self, random: Random) -> None:
        """Set a tenant's budget, and charge a request to it."""
        if self.plane is None:
            return
        tenant = random.choice(TENANTS)
        limits: dict[str, int | str | None] = {"budget_micros": random.choice((None, 1, 10**9))}
        await self._try(self.plane.services.access_stores.tenants.set_limits(BY, tenant, limits, self._now_s()))
        record = self._record(random, tenant)
        await self._try(self._charge(record))

    async def _charge(self, record: RequestRecord) -> None:
        assert self.plane is not None
        await self.plane.services.ledger.append_requests(RequestBatch(records=(record,)))
        self.plane.running.record_answers((record,))
        self.plane.services.spending.on_requests_recorded((record,))

    def _record(self, random: Random, tenant: str) -> RequestRecord:
        self.last_number += 1
        at_us = int(self.clocks.wall() * 1e6)
        return RequestRecord(
            request_id=f"req-{self.last_number}", origin=RecordOrigin.ACTIVATOR, source="activator-1",
            sequence=self.last_number, tenant=tenant, model="small", version="f" * 64, key_id="k", runtime_id=None,
            started_at_us=at_us, ended_at_us=at_us, queued_us=0, outcome="ok", status=200, stream=False,
            prompt_tokens=1000, cached_tokens=0, completion_tokens=1000, device_us=0,
        )  # fmt: skip

    # Faults.

    def _excuse(self, for_s: float = 0.0, *, breaks: bool = True) -> None:
        """Allow replicas to be missing from now on. With `breaks`, a serving replica may be missing, too."""
        self.fault_s = max(self.fault_s, self.loop.time() + for_s + FAULT_S)
        if breaks:
            self.broken_s = self.fault_s
            self.serving.clear()
            self.kept.clear()

    @operation(4)
    async def kill(self, random: Random) -> None:
        if self.machine.processes:
            self._excuse()
            self.machine.kill(random.choice(list(self.machine.processes.values())))

    @operation(1)
    async def hang(self, random: Random) -> None:
        """Let a process hang: it answers nothing and ignores SIGTERM for a while."""
        if self.machine.processes:
            process, for_s = random.choice(list(self.machine.processes.values())), random.uniform(1.0, 60.0)
            self._excuse(for_s)
            process.answers.clear()
            process.hangs = True
            self.loop.call_later(for_s, process.answers.set)

    @operation(2)
    async def stall(self, random: Random) -> None:
        """Let a process be too busy to answer for a moment."""
        if self.machine.processes:
            process, for_s = random.choice(list(self.machine.processes.values())), random.uniform(1.0, 10.0)
            self._excuse(for_s)
            process.answers.clear()
            self.loop.call_later(for_s, process.answers.set)

    @operation(4)
    async def break_starts(self, random: Random) -> None:
        """Let restores fail, processes die in them, or forks fail, for a while."""
        machine, for_s = self.machine, random.uniform(1.0, 40.0)
        name = random.choice(("restores_fail", "restores_die", "forks_fail"))
        setattr(machine, name, random.choice((0.5, 1.0)))
        self._excuse(for_s)
        self.loop.call_later(for_s, setattr, machine, name, 0.0)

    @operation(1)
    async def end_slowly(self, random: Random) -> None:
        """Let processes end slowly for a while."""
        for_s = random.uniform(1.0, 60.0)
        self.machine.ends_slowly = True
        self._excuse(for_s)
        self.loop.call_later(for_s, setattr, self.machine, "ends_slowly", False)

    @operation(3)
    async def restart(self, random: Random) -> None:
        """Restart the control plane. The other processes live on."""
        if self.plane is not None:
            await self._restart(random.choice((0.0, 2.0, 40.0)))

    async def _restart(self, after_s: float) -> None:
        self.commit_fails, ready = 0, dict[VersionKey, int]()
        self._excuse(breaks=False)
        if self.plane is not None and self.loop.time() > self.broken_s:
            ready = {key: self.plane.running.replicas.ready_count(key) for key in self._undisputed()}
        await self._close()
        await asyncio.sleep(after_s)
        self.silent_s = self.loop.time() + self.random.uniform(0.0, SILENT_S)
        await self._open()
        self.taken_over = AdoptedReplicas(ready, self.loop.time() + SAFE_S, self.steps)

    @operation(2)
    async def fail_database(self, random: Random) -> None:
        """Let the next transactions fail."""
        self.commit_fails = random.choice((1, 3))
        self._excuse(40.0)

    @operation(1)
    async def step_clock(self, random: Random) -> None:
        """Step the wall clock, sometimes into another month."""
        self.clocks.ahead_s += random.choice((-3600.0, 3600.0, 40 * 86_400.0))

    # Rest.

    async def quiesce(self) -> None:
        """End all load and faults, then restart the control plane once more."""
        self.load.clear()
        self.taken_over = None  # after this, replicas are not in use any more
        machine = self.machine
        machine.restores_fail = machine.restores_die = machine.forks_fail = 0.0
        machine.ends_slowly, self.commit_fails = False, 0
        for process in machine.processes.values():
            process.answers.set()
        await asyncio.sleep(150.0)
        self.before_restart = self._stored_models()
        await self._restart(0.0)
        self.after_restart = self._stored_models()
        await asyncio.sleep(75.0)

    def _stored_models(self) -> list[tuple[Any, ...]]:
        assert self.plane is not None
        models = self.plane.services.registry.all_models()
        said = [
            (m.tenant, m.model, msgspec.json.encode(m.scale), sorted(m.aliases.items()), sorted(m.split.items()),
             sorted((v.registration.version, v.is_deleted, v.stopped_at_s or 0) for v in m.versions))
            for m in models
        ]  # fmt: skip
        return sorted(said)

    async def stop(self) -> None:
        """Switch the machine off."""
        await self.end_loops()
        await self._close()
        self.machine.close()
        await self.patches.aclose()


def _part(stats: tuple[ConcurrencyStat, ...], share: float) -> tuple[ConcurrencyStat, ...]:
    """Return one activator's part of the load."""
    return tuple(msgspec.structs.replace(each, concurrency=each.concurrency * share) for each in stats)


# Invariants.


def fleet_and_pool_are_sound(world: MachineWorld) -> None:
    if world.plane is not None:
        world.plane.fleet.check_integrity()
        world.plane.pool.check_integrity()


def loops_live(world: MachineWorld) -> None:
    """The endless loops of the control plane are still running."""
    if world.plane is not None:
        alive = {task.get_name() for task in asyncio.all_tasks()}
        ended = [name for name in LOOPS if name not in alive]
        assert not ended, f"the loop {ended[0]} has ended"


def the_autoscaler_is_sound(world: MachineWorld) -> None:
    if world.plane is not None:
        decider: Any = world.plane.running.scaler
        decider.check_integrity()


def no_more_slots_are_held_than_there_are(world: MachineWorld) -> None:
    if world.plane is not None:
        table = world.plane.fleet.table
        assert table.held_slots <= table.slots, f"{table!r}"


def minimums_hold(world: MachineWorld) -> None:
    """A named version soon has its minimum if all minimums fit and nothing fails."""
    assert not world.broken, world.broken[0]


def a_new_control_plane_takes_nothing_away(world: MachineWorld) -> None:
    """A new control plane keeps replicas in use until it has heard from all activators."""
    assert not world.released, f"a replica of {world.released[0]} is in use, and was taken away by a new control plane"


def minimums_are_kept(world: MachineWorld) -> None:
    """A met minimum stays met: neither the tenant's other versions nor a restart takes it away."""
    assert not world.below, f"{world.below[0]} has lost its minimum without a fault"


def nothing_runs_of_suspended_tenants(world: MachineWorld) -> None:
    """This holds for any minimum of their models."""
    assert not world.billed, world.billed[0]


def what_is_in_use_goes_on(world: MachineWorld) -> None:
    """A version in use keeps its last replica if no other version competes for its slot and no process fails, also
    across a restart of the control plane.
    """
    assert not world.lost, f"{world.lost[0]} is in use, and nothing of it serves any more"


def streams_have_their_time(world: MachineWorld) -> None:
    """A replica with requests is not ended before its drain time is over, even if it answers late."""
    assert not world.machine.cut, f"{world.machine.cut[0]} has requests, and is ended before its time to drain"


def a_full_machine_is_no_failed_restore(world: MachineWorld) -> None:
    """A start that needs more device slots than there are is not reported as a failed restore."""
    if world.plane is not None:
        for key in world._keys():
            last_attempt = world.plane.running.outcomes.last_attempt(key)
            is_full = (
                last_attempt is not None
                and last_attempt.failure is not None
                and "this machine" in last_attempt.failure[1]
            )
            assert not is_full, f"a restore of {key} that was never tried is told as failed"


def minimums_hold_at_rest(world: MachineWorld) -> None:
    """This holds once all faults are over."""
    assert world.plane is not None
    for key, least in world.promised().items():
        ready = world.plane.running.replicas.ready_count(key)
        assert ready >= least, f"{key} has {ready} of {least} replicas at rest"


def a_restart_forgets_nothing(world: MachineWorld) -> None:
    """Models, versions, aliases, splits and stops are the same after the last restart."""
    for before, after in zip_longest(world.before_restart, world.after_restart):
        assert before == after, f"{before} is {after} after a restart"


def nothing_is_left_behind(world: MachineWorld) -> None:
    """No start waits, no unwanted version runs, and every process is known."""
    assert world.plane is not None
    table, registry = world.plane.fleet.table, world.plane.services.registry
    for key in table.active_versions():
        assert not table.starts_of(key), f"a start of {key} waits at rest"
        found = registry.find(key)
        assert found is not None, f"{key} is deleted, and something of it runs"
    known = {replica.pid for replica in table}
    assert set(world.machine.processes) == known, (
        f"{len(known)} processes are known, {len(world.machine.processes)} live"
    )
    for replica in table:
        assert replica.state not in (ReplicaState.RESTORING, ReplicaState.DRAINING), f"{replica.state} at rest"


def the_ledger_is_sound(world: MachineWorld) -> None:
    assert world.plane is not None
    with world.plane.services.database.engine.connect() as connection:
        fault = verify_all_chains(connection).fault
    assert fault is None, fault


MachineWorld.always = (
    loops_live, fleet_and_pool_are_sound, the_autoscaler_is_sound, no_more_slots_are_held_than_there_are,
    minimums_hold, minimums_are_kept, nothing_runs_of_suspended_tenants, what_is_in_use_goes_on,
    a_full_machine_is_no_failed_restore, a_new_control_plane_takes_nothing_away, streams_have_their_time,
)  # fmt: skip
MachineWorld.at_rest = (a_restart_forgets_nothing, minimums_hold_at_rest, nothing_is_left_behind, the_ledger_is_sound)
