"""World: the front door between callers, a control plane and replicas that misbehave.

Everything from the ASGI application inwards is the product's: table, feed client, queue, slots, shedding, attempts,
hedged requests, idempotency, limits, waking, breakers, usage records and their spool. TLS and HTTP towards clients are
not simulated.
"""

import asyncio
import errno
import json
from random import Random
from typing import Final

import msgspec

from activator.allowances import Allowances
from activator.attempts import Attempts
from activator.authenticate import Authenticator
from activator.backlogs import Backlogs
from activator.budgets import Budgets
from activator.cache import ResponseCache
from activator.completions import Completions
from activator.door import Door
from activator.endings import Endings
from activator.errands import Errands
from activator.feed import FeedClient
from activator.hedges import Hedges
from activator.kept_answers import OwnAnswers
from activator.key_uses import KeyUses
from activator.keys import VersionKey
from activator.ladder import Ladders
from activator.lists import Lists
from activator.meters import Meters
from activator.once import Once
from activator.open_inference import OpenInference
from activator.passthrough import Passthrough
from activator.policy.admission import QueueLimits
from activator.policy.bounds import Bound
from activator.policy.once import CACHE_LIMITS, DEFAULT_LIMITS
from activator.policy.retries import LIMITS as RETRY_LIMITS
from activator.policy.retries import Budgets as RetryBudgets
from activator.proxy import Upstreams
from activator.rates import Rates
from activator.reporter import Reporter
from activator.sending import Sender
from activator.settings import RequestLimits
from activator.shares import Room, Shares
from activator.sinks import ControlSink
from activator.table import Table
from activator.throttler import Throttler
from activator.timelines import Timelines
from activator.under_way import UnderWay
from activator.usage import Usage, poster
from activator.wake import AGAIN_S, Waker
from contracts.control import Feed, ModelRow, TenantLimits, TenantRow
from spool import Shipper
from telemetry.telemetry import local
from tests.simulation.door_caller import Caller, Wish
from tests.simulation.door_control import REPLICAS_MAX, ControlClient, FakeControl
from tests.simulation.door_replicas import DONE, MOODS
from tests.simulation.network import Network
from tests.simulation.spools import COMMIT_S, FaultyDisk, open_spool
from tests.simulation.world import InjectedError, World, operation

TENANTS: Final = ("ann", "bob", "cy")
MODELS: Final = (("ann", "small"), ("ann", "large"), ("bob", "own"))
DEADLINES_S: Final = (0.05, 0.5, 3.0, 20.0, 60.0)
REQUEST_LIMITS: Final = RequestLimits(
    body_bytes=4096, body_bytes_in_all=64 << 10, upload_bytes=4096, body_s=5.0, deadline_s=60.0, stall_s=20.0,
    requests=200,
)  # fmt: skip
# After its deadline a request may still tell a replica, have its record written, and have its last bytes taken.
SLACK_S: Final = 2.5
PATIENCE_S: Final = 2 * AGAIN_S + 1.0  # within which a version that is wanted is asked for again
CALM_S: Final = 300.0
DISK_S: Final = 10.0  # that requests wait for a disk that is slow (activator/dependencies.py, `SPOOL`)
LOOK_S: Final = 1.0


class _FaultyPoke:
    """What tells the decider, out of descriptors at times."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.fails = False
        self.poked_s: dict[VersionKey, float] = {}

    async def poke(self, key: VersionKey) -> bool:
        self.poked_s[key] = asyncio.get_running_loop().time()
        if self.fails:
            raise InjectedError(errno.EMFILE, "Too many open files")
        return await self._reporter.poke(key)


class DoorWorld(World):
    """Three tenants, three models of one version each, and as many replicas as are asked for."""

    name = "door"
    steps_max = 36

    async def start(self) -> None:
        """As `activator.app.run` puts it together."""
        random = self.random
        self.network = Network(Random(random.random()))
        self.control = FakeControl(self.network, self.clocks, Random(random.random()))
        client = ControlClient(self.control)
        self.disk = FaultyDisk()
        self.spool = open_spool(self.directory / "spool", "activator-1", self.disk)
        telemetry = local("activator")
        page = telemetry.page
        self.shipper = Shipper(self.spool, poster(client))
        errands = Errands()
        self.errands = errands
        self.upstreams = Upstreams(self.network, errands)  # type: ignore[arg-type]
        self.table, timelines, self.under_way = Table(), Timelines(), UnderWay()
        backlogs = Backlogs(
            self.table.backlog_s, lambda key: self.throttler.queued(key), lambda key: self.throttler.pace(key)
        )
        self.reporter = Reporter(ControlSink(client, "activator-1"), backlogs, clock=self.clocks.monotonic)
        self.poke = _FaultyPoke(self.reporter)
        self.waker = Waker(self.poke, clock=self.clocks.monotonic)
        entries = random.choice((2, 4, 12, 50))
        bound = Bound(entries, 64 << 10, random.choice((2000, 100_000)))
        limits = QueueLimits(bound, Bound(max(1, entries - 1), 64 << 10, 100_000), bound, random.choice((2.0, 30.0)))
        self.throttler = Throttler(
            limits, self.waker, longest_rest_s=5.0, clock=self.clocks.monotonic, draw=Random(random.random()).randrange
        )
        meters = Meters(page)
        self.budgets = Budgets(self.spool.source, wall_s=self.clocks.wall)
        usage = Usage(self.spool, timelines, ended=Endings(meters, telemetry), wall=self.clocks.wall)
        self.feed = FeedClient(client, self._hear, "activator-1")
        uses = KeyUses(client)
        authenticator = Authenticator(self.table, uses, wall_s=self.clocks.wall)
        sender, retries = Sender(self.upstreams, usage.source), RetryBudgets[tuple[str, VersionKey]](RETRY_LIMITS)
        hedges = Hedges(self.throttler, sender, retries, meters) if random.random() < 0.7 else None
        attempts = Attempts(self.throttler, sender, retries, meters, hedges, draw=Random(random.random()).random)
        answers = OwnAnswers(DEFAULT_LIMITS, self.clocks.monotonic)
        self.cache = ResponseCache(b"s" * 32, CACHE_LIMITS, page)
        self.once = Once(b"s" * 32, answers, DEFAULT_LIMITS, page)
        self.shares = Shares()
        allowances = Allowances(self.shares, Rates(), self.budgets)
        unread = Room(REQUEST_LIMITS.requests, "the room for unread request bodies")
        completions = Completions(
            authenticator, self.table, self.throttler, self.reporter, attempts, usage, REQUEST_LIMITS, allowances,
            self.under_way, self.once, self.cache,
            Ladders(self.table, self.throttler, self.reporter, self.cache.last, self.clocks.monotonic), unread,
        )  # fmt: skip
        self.door = Door(
            completions, Lists(authenticator, self.table, timelines, client, self.under_way, unread),
            Passthrough(authenticator, {}, REQUEST_LIMITS), OpenInference(authenticator, self.table, unread),
            "kelvin.local", REQUEST_LIMITS, meters,
        )  # fmt: skip
        self.callers: list[Caller] = []
        self.over: list[Caller] = []
        self.wanted_since_s: dict[VersionKey, float] = {}
        self.disturbed_s = 0.0  # until when faults may have kept something from being told
        self.disk_bad_until_s = 0.0
        self._populate()
        for name, loop in (
            ("feed", self.feed.run()), ("reporter", self.reporter.run()), ("key uses", uses.run()),
            ("answers", answers.run()), ("cache", self.cache.run()), ("shipper", self.shipper.run()),
            ("heartbeats", self.control.beat()), ("look", self._look()),
        ):  # fmt: skip
            self.live(loop, name)
        await self.feed.synced.wait()

    def _hear(self, line: Feed) -> None:
        self.throttler.apply(line)
        self.table.apply(line)
        self.budgets.apply(line)
        if line.full or line.removed_replicas:
            self.upstreams.retain(self.throttler.addresses())

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

    async def _look(self) -> None:
        """Note since when versions are wanted."""
        while True:
            now_s = self.loop.time()
            wanted = {key for key in self.control.versions if self.throttler.is_wanted(key)}
            self.wanted_since_s = {key: self.wanted_since_s.get(key, now_s) for key in wanted}
            await asyncio.sleep(LOOK_S)

    # Requests.

    def _ask(self, random: Random, model: tuple[str, str] | None = None, tag: str | None = None) -> Caller:
        owner, name = model or random.choice(MODELS)
        tenant = "cy" if name == "small" and random.random() < 0.3 else owner
        headers = [(b"x-kelvin-priority", random.choice((b"batch", b"standard", b"interactive")))]
        if random.random() < 0.2:
            headers.append((b"x-kelvin-session", f"s{random.randrange(3)}".encode()))
        key = random.randrange(3) if random.random() < 0.25 else None
        if key is not None:
            headers.append((b"idempotency-key", f"key-{key}".encode()))
        called = f"{owner}/{name}" if tenant != owner else name
        wish = Wish(
            tag=tag or (f"t{random.randrange(1 << 30)}" if key is None else f"key-{tenant}-{key}"),
            tenant=tenant,
            model=called,
            stream=random.random() < 0.6 if key is None else key != 0,
            max_tokens=random.choice((1, 3, 10, 40)) if key is None else 5,
            deadline_s=random.choice(DEADLINES_S),
            headers=tuple(headers),
            slow_s=random.choice((0.0, 0.0, 0.0, 0.3, 4.0)),
        )
        caller = Caller(wish, self.note)
        caller.begin(self.door)
        self.callers.append(caller)
        return caller

    @operation(10)
    async def ask(self, random: Random) -> None:
        """One request."""
        self._ask(random)

    @operation(8)
    async def burst(self, random: Random) -> None:
        """Several requests for one model."""
        model = random.choice(MODELS)
        for _ in range(random.randint(3, 14)):
            self._ask(random, model)
            if random.random() < 0.3:
                await asyncio.sleep(random.uniform(0.0, 0.1))

    @operation(5)
    async def leave(self, random: Random) -> None:
        """Some callers close their connections."""
        waiting = [caller for caller in self.callers if not caller.is_over]
        for caller in random.sample(waiting, min(len(waiting), random.randint(1, 4))):
            caller.leave()

    # What operators and tenants do.

    def _key(self, random: Random) -> VersionKey | None:
        return random.choice(list(self.control.versions)) if self.control.versions else None

    @operation(3)
    async def deploy(self, random: Random) -> None:
        """A new version, which `prod` names at once. The ones before drain, or stay."""
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
        """Two versions share what is asked of `prod`."""
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
        """A version or a whole model is deleted."""
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
        """A tenant is suspended, or in force again."""
        row = self.control.tenants[random.choice(TENANTS)]
        self.control.put_tenant(msgspec.structs.replace(row, suspended=not row.suspended))

    @operation(2)
    async def limit(self, random: Random) -> None:
        """A tenant's limits are set or lifted."""
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
        """A version has one more replica."""
        key = self._key(random)
        if key is not None and len(self.control.names_of(key)) < REPLICAS_MAX:
            self.control.add_replica(key, random.randint(1, 4))

    @operation(4)
    async def drain(self, random: Random) -> None:
        """Some or all replicas of a version drain."""
        key = self._key(random)
        names = [] if key is None else self.control.names_of(key)
        for name in names if random.random() < 0.6 else names[:1]:
            self.control.drain(name)

    @operation(3)
    async def kill(self, random: Random) -> None:
        """A replica dies; the feed says so soon."""
        if self.control.rows:
            name = random.choice(list(self.control.rows))
            self.control.kill(name, self.control.rows[name].address)
            self.loop.call_later(random.choice((0.0, 0.3, 8.0)), self.control.lose, name)

    @operation(5)
    async def sour(self, random: Random) -> None:
        """Some replicas answer badly, for a while."""
        names = list(self.control.replicas)
        for name in random.sample(names, min(len(names), random.randint(1, 3))):
            replica = self.control.replicas[name]
            replica.mood = random.choice(MOODS)
            replica.is_deaf = random.random() < 0.1
            if random.random() < 0.7:
                self.loop.call_later(random.uniform(0.1, 20.0), self._heal, name)

    def _heal(self, name: str) -> None:
        if (replica := self.control.replicas.get(name)) is not None:
            replica.mood, replica.is_deaf = "well", False

    @operation(2)
    async def break_starts(self, random: Random) -> None:
        """Starts come to nothing, or work again."""
        self.control.start_fails = random.choice((0.0, 0.5, 1.0))

    # The control plane, the disk, the process.

    @operation(4)
    async def lose_control(self, random: Random) -> None:
        """The control plane is away for some time; what changes meanwhile is in its next snapshot."""
        self.control.is_away = True
        self.control.cut_feed()
        self._disturb(random.choice((0.1, 3.0, 30.0)))

    @operation(1)
    async def cut_feed(self, random: Random) -> None:
        """The feed's connection breaks."""
        self.control.cut_feed()

    @operation(3)
    async def exhaust_descriptors(self, random: Random) -> None:
        """For a moment nothing more can be opened."""
        self.poke.fails = True
        self._disturb(random.uniform(0.05, 3.0))

    @operation(1)
    async def fill_disk(self, random: Random) -> None:
        """The spool's disk is full, fails, or is slow for a moment."""
        match random.randrange(3):
            case 0:
                self.disk.is_full = True
            case 1:
                self.disk.fails = True
            case _:
                self.disk.commit_s = random.choice((0.2, 3.0))
        for_s = random.uniform(0.05, 5.0)
        self.disk_bad_until_s = max(self.disk_bad_until_s, self.loop.time() + for_s + DISK_S)
        self._disturb(for_s)

    def _disturb(self, for_s: float) -> None:
        self.disturbed_s = max(self.disturbed_s, self.loop.time() + for_s)
        self.loop.call_later(for_s, self._undisturb)

    def _undisturb(self) -> None:
        if self.loop.time() >= self.disturbed_s - 1e-6:
            self.control.is_away = self.poke.fails = False
            self.disk.is_full = self.disk.fails = False
            self.disk.commit_s = COMMIT_S

    # Rest.

    async def calm(self) -> None:
        """All faults end; then all deadlines pass."""
        self.disturbed_s = 0.0
        self._undisturb()
        self.control.start_fails = 0.0
        for name in self.control.replicas:
            self._heal(name)
        for _ in range(int(CALM_S)):
            await asyncio.sleep(1.0)
            if all(caller.is_over for caller in self.callers) and self.shipper.backlog == 0 and self.feed.connected:
                break
        await asyncio.sleep(40.0)  # errands, resting replicas and what was nudged

    async def stop(self) -> None:
        """As an activator ends."""
        for caller in self.callers:
            if caller.task is not None:
                caller.task.cancel()
        await asyncio.gather(*(caller.task for caller in self.callers if caller.task), return_exceptions=True)
        await self.once.close()
        await self.waker.close()
        await self.end_loops()
        await self.errands.close()
        await self.upstreams.close()
        self.control.close()
        self.spool.close()


# Invariants.


def each_caller_is_answered_once(world: DoorWorld) -> None:
    """One head, one end; a request that has ended was answered, cut, or left by its caller."""
    for caller in world.callers:
        assert not caller.answers, f"{caller.wish.tag} was answered more than once"
        if caller.is_over:
            assert caller.is_complete or caller.is_aborted or caller.has_left, f"{caller.wish.tag} was never answered"


def deadlines_hold(world: DoorWorld) -> None:
    """Nobody waits beyond the deadline, nor does one who has left go on."""
    for caller in world.callers:
        wish = caller.wish
        until_s = caller.asked_s + wish.deadline_s + (30.0 if wish.slow_s else 0.0)
        ended_s = world.loop.time() if caller.ended_s is None else caller.ended_s
        late_s = ended_s - max(until_s, world.disk_bad_until_s) - SLACK_S
        assert late_s <= 0, f"{wish.tag} is {late_s:.1f} s late"


def answers_are_of_one_run(world: DoorWorld) -> None:
    """A whole answer has all parts, in order, of one run of what its caller asked."""
    for caller in world.callers:
        if not (caller.is_over and caller.is_complete and caller.status == 200) or caller.wish.stream is None:
            continue
        parts = _parts(caller)
        tags = {str(part["tag"]) for part in parts}
        wish = caller.wish
        assert len(tags) <= 1, f"{wish.tag} got parts of {sorted(tags)}"
        assert all(tag.startswith(f"{wish.tag}/") for tag in tags), f"{wish.tag} got the answer of {tags}"
        if wish.stream:
            numbers = [part["number"] for part in parts]
            ended = DONE in bytes(caller.body) or b'"error"' in bytes(caller.body)
            assert numbers == list(range(1, len(numbers) + 1)), f"{wish.tag} got parts {numbers}"
            assert ended, f"{wish.tag} ends without its end"


def _parts(caller: Caller) -> list[dict[str, object]]:
    if not caller.wish.stream:
        return [json.loads(caller.body)]
    events = bytes(caller.body).split(b"\n\n")
    return [json.loads(event[6:]) for event in events if event.startswith(b"data: {") and b'"tag"' in event]


def no_failure_is_internal(world: DoorWorld) -> None:
    """No caller is told of a defect of ours: here no replica says that it has one."""
    for caller in world.callers:
        if caller.is_over and b'"internal"' in caller.body:
            raise AssertionError(f"{caller.wish.tag} was told of an internal error")


def the_throttler_is_sound(world: DoorWorld) -> None:
    world.throttler.check_integrity()


def the_table_is_sound(world: DoorWorld) -> None:
    world.table.check_integrity()


def requests_under_way_are_sound(world: DoorWorld) -> None:
    world.under_way.check_integrity()


def nobody_waits_for_what_is_deleted(world: DoorWorld) -> None:
    """Once the feed is connected and read, no caller waits for a version that is no more."""
    if not world.feed.connected or world.table.revision != world.control.revision:
        return
    for key in world.control.deleted:
        assert not world.throttler.queued(key), f"{world.throttler.queued(key)} wait for a version that was deleted"


def versions_that_are_wanted_are_asked_for(world: DoorWorld) -> None:
    """While callers wait for a start, the decider is told again and again."""
    for key, since_s in world.wanted_since_s.items():
        if not world.throttler.is_wanted(key):
            continue
        silent_s = world.loop.time() - max(since_s, world.poke.poked_s.get(key, 0.0), world.disturbed_s)
        assert silent_s <= PATIENCE_S, f"a version is wanted, and nobody asked for it in {silent_s:.1f} s"


def nothing_is_left_of_requests(world: DoorWorld) -> None:
    """No slot, place in a queue, permit, budget hold or entry is left behind."""
    assert all(caller.is_over for caller in world.callers), "a caller still waits"
    left = (
        (world.throttler, "running=0 queued=0"), (world.under_way, "requests=0 named=0"),
        (world.shares, "inside=0"), (world.once, "runs=0 tasks=0"), (world.waker, "waking=0 nudging=0"),
        (world.errands, "running=0"), (world.door, "inside=0/"), (world.reporter, "running=0"),
    )  # fmt: skip
    for what, said in left:
        assert said in repr(what), f"{what!r} at rest"
    for name, spent in world.budgets._spent.items():
        assert not spent.held_micros, f"{spent.held_micros} micro-units of {name} are held at rest"


def replicas_are_free(world: DoorWorld) -> None:
    """No replica computes for anybody."""
    for name, replica in world.control.replicas.items():
        assert not replica.running, f"{name} still runs {len(replica.running)} requests"


def every_answer_is_recorded(world: DoorWorld) -> None:
    """A whole answer has a record in the ledger that says so, and records are shipped."""
    assert world.shipper.backlog == 0, repr(world.shipper)
    by_id = world.control.records
    for caller in world.callers:
        is_whole = not caller.wish.stream or DONE in bytes(caller.body)
        if caller.is_complete and caller.status == 200 and is_whole:
            request_id = caller.headers[b"x-request-id"].decode()
            assert request_id in by_id, f"the answer of {caller.wish.tag} was not recorded"


DoorWorld.always = (
    each_caller_is_answered_once, deadlines_hold, answers_are_of_one_run, no_failure_is_internal,
    the_throttler_is_sound, the_table_is_sound,
    requests_under_way_are_sound, nobody_waits_for_what_is_deleted, versions_that_are_wanted_are_asked_for,
)  # fmt: skip
DoorWorld.at_rest = (nothing_is_left_of_requests, replicas_are_free, every_answer_is_recorded)
