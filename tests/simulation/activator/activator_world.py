"""World: the activator between callers, a control plane and faulty replicas.

Everything inside the ASGI application is the product's. That includes the table, the feed client, queue, slots,
shedding, attempts, hedged requests, idempotency, limits, waking, breakers, usage records and their spool, the stored
feed, and the handover to the next process. TLS and HTTP towards clients are not simulated. `activator_process.py` has
one process, `activator_invariants.py` the invariants.
"""

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any, Final

import msgspec

from activator.queue.policy.admission import QueueLimits
from activator.queue.policy.queue_bounds import QueueLimit
from activator.routing.policy.version_key import VersionKey
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.serving.control_messages import ModelRow, TenantLimits, TenantRow
from kelvin.contracts.wire import decode
from kelvin.spool.leftover_recovery import leftover_records, list_spools
from tests.simulation.activator import activator_invariants as invariants
from tests.simulation.activator.activator_process import ActivatorProcess, Settings
from tests.simulation.activator.fake_control_plane import REPLICAS_MAX, FakeControlPlane
from tests.simulation.activator.fake_replica import DONE, FAULTY_BEHAVIOURS
from tests.simulation.activator.simulated_client import ClientRequest, SimulatedClient
from tests.simulation.core.fake_network import Network
from tests.simulation.core.faulty_spool import COMMIT_S, FaultyDisk
from tests.simulation.core.world import InvariantBroken, World, operation

TENANTS: Final = ("ann", "bob", "cy")
MODELS: Final = (("ann", "small"), ("ann", "large"), ("bob", "own"))
DEADLINES_S: Final = (0.05, 0.5, 3.0, 20.0, 60.0)
CALM_S: Final = 300.0
DISK_S: Final = 10.0  # how long requests wait for a slow disk (activator/dependencies.py, `SPOOL`)
HOUR_S: Final = 3600.0
STEPS_S: Final = (-26 * HOUR_S, -5 * HOUR_S, -HOUR_S, -90.0, 90.0, HOUR_S, 5 * HOUR_S, 26 * HOUR_S)  # of the wall clock
ERRANDS_S: Final = 40.0  # how long background tasks, resting replicas and wakes take
BUCKET_S: Final = 61.0  # after which limits per minute are full again
SYNC_S: Final = 30.0  # how long a restart waits for the next process to be ready
ASK_AGAIN_S: Final = 3.0  # within which callers repeat a request
PROBES: Final = (("ann", "ann", "small"), ("bob", "bob", "own"), ("cy", "ann", "small"))  # tenant, owner, model
PROBE_MICROS: Final = 400  # the largest budget hold of one probe


class ActivatorWorld(World):
    """Three tenants, three models of one version each, and as many replicas as are requested."""

    name = "door"
    steps_max = 36

    async def start(self) -> None:
        """Create a control plane, some models, and a first activator process."""
        random = self.random
        self.network = Network(Random(random.random()))
        self.control = FakeControlPlane(self.network, self.clocks, Random(random.random()))
        self.disk = FaultyDisk()
        entries = random.choice((2, 4, 12, 50))
        bound = QueueLimit(entries, 64 << 10, random.choice((2000, 100_000)))
        limits = QueueLimits(
            bound, QueueLimit(max(1, entries - 1), 64 << 10, 100_000), bound, random.choice((2.0, 30.0))
        )
        self.settings = Settings(limits, hedges=random.random() < 0.7)
        self.doors: list[ActivatorProcess] = []  # the live ones, oldest first
        self.made = 0
        self.is_starting = False  # the next process is starting, and no other accepts
        self.tasks: set[asyncio.Task[Any]] = set()  # starts and restarts
        self.restarting: asyncio.Task[Any] | None = None
        self.callers: list[SimulatedClient] = []
        self.waiting: list[SimulatedClient] = []  # in the queue of the listening socket: no process accepts
        self.forgot_s: list[float] = []  # when stored responses of idempotency keys may have been lost
        self.owed: set[str] = set()  # requests whose durable records a killed process left
        self.disturbed_s = 0.0  # until when faults may have prevented a notification
        self.disk_bad_until_s = 0.0
        self._populate()
        self.start_loop(self.control.beat(), "heartbeats")
        await self._begin_door(random)

    def _populate(self) -> None:
        for tenant in TENANTS:
            self.control.put_tenant(TenantRow(tenant=tenant, suspended=False))
        for tenant, model in MODELS:
            key = self.control.add_version(tenant, model)
            grantees = ("cy",) if model == "small" else ()
            self.control.put_model(
                ModelRow(tenant=tenant, model=model, aliases={"prod": key.version}, created_at_s=1, grantees=grantees)
            )
            for _ in range(self.random.randrange(3)):
                self.control.add_replica(key, self.random.randint(1, 4))

    # Requests.

    def _ask(self, random: Random, model: tuple[str, str] | None = None, tag: str | None = None) -> SimulatedClient:
        owner, name = model or random.choice(MODELS)
        tenant = "cy" if name == "small" and random.random() < 0.3 else owner
        headers = [(b"x-kelvin-priority", random.choice((b"batch", b"standard", b"interactive")))]
        if random.random() < 0.2:
            headers.append((b"x-kelvin-session", f"s{random.randrange(3)}".encode()))
        key = random.randrange(3) if random.random() < 0.25 else None
        if key is not None:
            headers.append((b"idempotency-key", f"key-{key}".encode()))
        called = f"{owner}/{name}" if tenant != owner else name
        request = ClientRequest(
            tag=tag or (f"t{random.randrange(1 << 30)}" if key is None else f"key-{tenant}-{key}"),
            tenant=tenant,
            model=called,
            stream=random.random() < 0.6 if key is None else key != 0,
            max_tokens=random.choice((1, 3, 10, 40)) if key is None else 5,
            deadline_s=random.choice(DEADLINES_S),
            headers=tuple(headers),
            slow_s=random.choice((0.0, 0.0, 0.0, 0.3, 4.0)),
        )
        return self._call(request, random)

    def _call(self, request: ClientRequest, random: Random) -> SimulatedClient:
        """Connect to a process that accepts, or wait for one."""
        caller = SimulatedClient(request, self.record_event)
        self.callers.append(caller)
        accepting = [door for door in self.doors if door.accepts.is_set() and not door.stop.is_set()]
        if accepting:
            random.choice(accepting).take(caller)
        else:
            self.waiting.append(caller)
        return caller

    @operation(10)
    async def ask(self, random: Random) -> None:
        self._ask(random)

    @operation(8)
    async def burst(self, random: Random) -> None:
        """Send several requests for one model."""
        model = random.choice(MODELS)
        for _ in range(random.randint(3, 14)):
            self._ask(random, model)
            if random.random() < 0.3:
                await asyncio.sleep(random.uniform(0.0, 0.1))

    @operation(5)
    async def leave(self, random: Random) -> None:
        """Close some callers' connections."""
        waiting = [caller for caller in self.callers if not caller.is_over]
        for caller in random.sample(waiting, min(len(waiting), random.randint(1, 4))):
            caller.leave()

    # Actions of operators and tenants.

    def _key(self, random: Random) -> VersionKey | None:
        return random.choice(list(self.control.versions)) if self.control.versions else None

    @operation(3)
    async def deploy(self, random: Random) -> None:
        """Deploy a new version. The earlier ones drain or stay."""
        tenant, model = random.choice(MODELS)
        before = [each for each in self.control.versions if (each.tenant, each.model) == (tenant, model)]
        key = self.control.add_version(tenant, model)
        known = self.control.models.get((tenant, model))
        row = known or ModelRow(tenant=tenant, model=model, aliases={}, created_at_s=1)
        self.control.put_model(msgspec.structs.replace(row, aliases={"prod": key.version}, split={}))
        if random.random() < 0.5:
            self.control.add_replica(key, random.randint(1, 3))
        if random.random() < 0.6:
            for each in before:
                for name in self.control.names_of(each):
                    self.control.drain(name)

    @operation(2)
    async def split(self, random: Random) -> None:
        """Split a model between two versions."""
        tenant, model = random.choice(MODELS)
        versions = [each.version for each in self.control.versions if (each.tenant, each.model) == (tenant, model)]
        row = self.control.models.get((tenant, model))
        if row is not None and len(versions) > 1:
            chosen = random.sample(versions, 2)
            self.control.put_model(
                msgspec.structs.replace(row, aliases={"prod": chosen[0]}, split={chosen[0]: 70, chosen[1]: 30})
            )

    @operation(3)
    async def delete(self, random: Random) -> None:
        """Delete a version or a whole model."""
        key = self._key(random)
        if key is None:
            return
        row = self.control.models.get((key.tenant, key.model))
        if row is not None and (random.random() < 0.4 or key.version in row.aliases.values()):
            self.control.delete_model(key.tenant, key.model)
        else:
            if row is not None and key.version in row.split:
                self.control.put_model(msgspec.structs.replace(row, split={}))
            self.control.delete_version(key)

    @operation(1)
    async def suspend(self, random: Random) -> None:
        """Suspend or resume a tenant."""
        row = self.control.tenants[random.choice(TENANTS)]
        self.control.put_tenant(msgspec.structs.replace(row, suspended=not row.suspended))

    @operation(2)
    async def limit(self, random: Random) -> None:
        """Set or remove a tenant's limits."""
        row = self.control.tenants[random.choice(TENANTS)]
        limits = TenantLimits(
            requests=random.choice((None, 1, 5)),
            rpm=random.choice((None, None, 5, 100)),
            tpm=random.choice((None, None, 500, 10_000)),
            budget_micros=random.choice((None, None, 200, 20_000)),
            weight=random.choice((None, 1, 5)),
            priority=random.choice((None, "batch", "standard")),
            deadline_max_s=random.choice((None, None, 2)),
        )
        self.control.put_tenant(msgspec.structs.replace(row, limits=limits))

    # Replicas.

    @operation(4)
    async def scale(self, random: Random) -> None:
        """Add a replica of a version."""
        key = self._key(random)
        if key is not None and len(self.control.names_of(key)) < REPLICAS_MAX:
            self.control.add_replica(key, random.randint(1, 4))

    @operation(4)
    async def drain(self, random: Random) -> None:
        """Drain some or all replicas of a version."""
        key = self._key(random)
        names = [] if key is None else self.control.names_of(key)
        for name in names if random.random() < 0.6 else names[:1]:
            self.control.drain(name)

    @operation(3)
    async def kill(self, random: Random) -> None:
        """Kill a replica. The feed publishes it soon."""
        if self.control.rows:
            name = random.choice(list(self.control.rows))
            self.control.kill(name, self.control.rows[name].address)
            self.loop.call_later(random.choice((0.0, 0.3, 8.0)), self.control.lose, name)

    @operation(5)
    async def degrade_replicas(self, random: Random) -> None:
        """Let some replicas answer badly for a while."""
        names = list(self.control.replicas)
        for name in random.sample(names, min(len(names), random.randint(1, 3))):
            replica = self.control.replicas[name]
            replica.behaviour = random.choice(FAULTY_BEHAVIOURS)
            replica.ignores_connections = random.random() < 0.1
            if random.random() < 0.7:
                self.loop.call_later(random.uniform(0.1, 20.0), self._heal, name)

    def _heal(self, name: str) -> None:
        if (replica := self.control.replicas.get(name)) is not None:
            replica.behaviour, replica.ignores_connections = "well", False

    @operation(2)
    async def break_starts(self, random: Random) -> None:
        """Let starts fail, or work again."""
        self.control.start_fails = random.choice((0.0, 0.5, 1.0))

    # The control plane, the disk, and the process.

    @operation(4)
    async def lose_control(self, random: Random) -> None:
        """Let the control plane be away for some time. Its next snapshot has the changes."""
        self.control.is_away = True
        self.control.cut_feed()
        self._begin_fault(random.choice((0.1, 3.0, 30.0)))

    @operation(1)
    async def cut_feed(self, random: Random) -> None:
        """Break the feed's connection."""
        self.control.cut_feed()

    @operation(3)
    async def exhaust_descriptors(self, random: Random) -> None:
        """Let nothing be opened for a moment."""
        for door in self.doors:
            door.send_wake.fails = True
        self._begin_fault(random.uniform(0.05, 3.0))

    @operation(1)
    async def fill_disk(self, random: Random) -> None:
        """Let the spool's disk be full, fail, or be slow for a moment."""
        match random.randrange(3):
            case 0:
                self.disk.is_full = True
            case 1:
                self.disk.fails = True
            case _:
                self.disk.commit_s = random.choice((0.2, 3.0))
        for_s = random.uniform(0.05, 5.0)
        self.disk_bad_until_s = max(self.disk_bad_until_s, self.loop.time() + for_s + DISK_S)
        self._begin_fault(for_s)

    def _begin_fault(self, for_s: float) -> None:
        self.disturbed_s = max(self.disturbed_s, self.loop.time() + for_s)
        self.loop.call_later(for_s, self._end_fault)

    def _end_fault(self) -> None:
        if self.loop.time() >= self.disturbed_s - 1e-6:
            self.control.is_away = False
            for door in self.doors:
                door.send_wake.fails = False
            self.disk.is_full = self.disk.fails = False
            self.disk.commit_s = COMMIT_S

    # The life of the activator.

    @operation(2)
    async def kill_door(self, random: Random) -> None:
        """Kill an activator process. The next one starts soon, and some callers repeat their requests."""
        if self.doors:
            await self._kill(random.choice(self.doors), random)

    @operation(2)
    async def restart_door(self, random: Random) -> None:
        """Restart the activator. The next process starts before the old one ends, or after it."""
        if self.restarting is None or self.restarting.done():
            self.restarting = self._spawn(self._restart(random))

    @operation(2)
    async def step_clock(self, random: Random) -> None:
        """Step the wall clock by up to a day, or correct it."""
        self.clocks.ahead_s = 0.0 if self.clocks.ahead_s else random.choice(STEPS_S)

    async def _begin_door(self, random: Random, after_s: float = 0.0) -> ActivatorProcess:
        await asyncio.sleep(after_s)
        self.made += 1
        door = ActivatorProcess(self, self.made, self.settings, self.network, self.control, self.disk, random)
        self.doors.append(door)
        self.is_starting = False
        self.record_event(f"{door} begins")
        await door.start()
        if not door.is_dead:
            waiting, self.waiting = self.waiting, []
            for caller in waiting:
                door.take(caller)
        return door

    async def _kill(self, door: ActivatorProcess, random: Random) -> None:
        self.record_event(f"{door} is killed")
        self.forgot_s.append(self.loop.time())
        self.doors.remove(door)
        cut = [caller.request for caller in door.callers if not caller.is_over]
        await door.kill()
        for payload in leftover_records(door.spools, lambda source: source == door.name):
            self.owed.add(decode(payload, RequestRecord).request_id)
        self._ask_again([request for request in cut if random.random() < 0.5], random)
        self._ensure_door(random)

    def _ask_again(self, wishes: list[ClientRequest], random: Random) -> None:
        for request in wishes:
            self.loop.call_later(random.uniform(0.0, ASK_AGAIN_S), self._call, request, Random(random.random()))

    def _ensure_door(self, random: Random) -> None:
        """Start a process if none accepts, as the supervisor does."""
        if not self.is_starting and all(door.stop.is_set() for door in self.doors):
            self.is_starting = True
            self._spawn(self._begin_door(Random(random.random()), random.choice((0.05, 0.5, 3.0))))

    async def _restart(self, random: Random) -> None:
        old = next((door for door in self.doors if not door.stop.is_set()), None)
        if old is None:
            return
        drain_s = random.choice((0.5, 5.0, 30.0))
        if random.random() < 0.4:
            self.forgot_s.append(self.loop.time())
        else:
            new = await self._begin_door(Random(random.random()))
            try:
                async with asyncio.timeout(SYNC_S):
                    await new.feed.synced.wait()
            except TimeoutError:
                if not new.is_dead:
                    await self._kill(new, random)
            if new.is_dead or old.is_dead:
                return
        keyed = [caller.request for caller in old.callers if caller.request.tag.startswith("key-")]
        self._ask_again(random.sample(keyed, min(len(keyed), 2)), random)
        self.record_event(f"{old} ends")
        old.begin_end(drain_s)
        await old.ended()
        if not old.is_dead:
            self.doors.remove(old)
        self._ensure_door(random)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self.loop.create_task(work, name="life of the door")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # Rest.

    async def quiesce(self) -> None:
        """End all faults and wait for all deadlines. Then check that each tenant is served, also after a restart."""
        self.disturbed_s = 0.0
        self._end_fault()
        self.control.start_fails = 0.0
        for name in self.control.replicas:
            self._heal(name)
        await self._rest()
        await asyncio.sleep(BUCKET_S - ERRANDS_S)
        await self._probe("before the last restart")
        random = Random(self.random.random())
        if random.random() < 0.4:
            await self._kill(self.doors[0], random)
        else:
            await self._restart(random)
        await self._settle()
        await self._probe("after the last restart")
        await self._rest()

    async def _rest(self) -> None:
        """Wait until no request is in flight, and check the invariants at rest."""
        await self._settle()
        await asyncio.sleep(ERRANDS_S)
        await self.rounds()
        self.check((*self.always, *self.at_rest))

    async def _settle(self) -> None:
        await asyncio.sleep(ASK_AGAIN_S)
        for _ in range(int(CALM_S)):
            await asyncio.sleep(1.0)
            if not self.tasks and all(caller.is_over for caller in self.callers) and self._is_shipped():
                break

    def _is_shipped(self) -> bool:
        left = any(acknowledged < last for _, (acknowledged, last) in list_spools(self.directory / "spool"))
        return not left and all(door.feed.connected and door.shipper.backlog == 0 for door in self.doors)

    async def _probe(self, when: str) -> None:
        """Send one request of each tenant. Only a spent budget may refuse it."""
        for tenant, owner, model in PROBES:
            tenant_row = self.control.tenants[tenant]
            self.control.put_tenant(msgspec.structs.replace(tenant_row, suspended=False))
            versions = [each for each in self.control.versions if (each.tenant, each.model) == (owner, model)]
            key = versions[-1] if versions else self.control.add_version(owner, model)
            row = ModelRow(tenant=owner, model=model, aliases={"prod": key.version}, created_at_s=1, grantees=("cy",))
            self.control.put_model(row)
            self.control.add_replica(key, 2)
            await asyncio.sleep(1.0)
            called = model if tenant == owner else f"{owner}/{model}"
            request = ClientRequest(
                f"probe-{tenant} {when}", tenant, called, stream=True, max_tokens=3, deadline_s=60.0
            )
            # The first request after a disk error is refused. Its record shows that the disk works again.
            for _ in range(1 + any(door.spool.failure is not None for door in self.doors)):
                caller = self._call(request, Random(0))
                while not caller.is_over:
                    await asyncio.sleep(1.0)
                    self.check(self.always)
            budget_micros = tenant_row.limits.budget_micros
            is_spent = budget_micros is not None and self.control.spent(tenant) + PROBE_MICROS > budget_micros
            is_served = caller.status == 200 and DONE in bytes(caller.body)
            if not is_served and not (is_spent and b"budget" in caller.body):
                raise InvariantBroken(
                    "each_tenant_is_served", f"{tenant} {when}: {caller.status} {bytes(caller.body)[:300]!r}"
                )

    async def stop(self) -> None:
        """End all activator processes in order."""
        for task in (*self.tasks,):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for door in self.doors:
            door.begin_end(0.0)
            await door.ended()
        await self.end_loops()
        self.control.close()


ActivatorWorld.always = (
    invariants.each_caller_is_answered_once, invariants.deadlines_hold, invariants.answers_are_of_one_run,
    invariants.no_failure_is_internal, invariants.parts_of_the_door_are_sound,
    invariants.nobody_waits_for_what_is_deleted, invariants.versions_that_are_wanted_are_asked_for,
    invariants.the_next_process_knows_the_table,
)  # fmt: skip
ActivatorWorld.at_rest = (
    invariants.nothing_is_left_of_requests, invariants.replicas_are_free, invariants.every_answer_is_recorded,
    invariants.no_record_is_lost_or_doubled, invariants.a_key_runs_once,
)  # fmt: skip
