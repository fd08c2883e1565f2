"""A fake control plane for activators: a feed, an autoscaler and a ledger. It goes away and returns.

It keeps the state (`tenants`, `models`, `versions`, `replicas`), publishes each change once, and sends a snapshot to
each new reader.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from activator.routing.policy.version_key import VersionKey
from kelvin.contracts.accounting.spending import SpendingRow, TokenPrices
from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.serving.control_messages import (
    Feed,
    KeyRow,
    ModelRow,
    ReplicaRow,
    RequestBatch,
    RestoreFailure,
    Scope,
    Stats,
    TenantRow,
    VersionRow,
)
from kelvin.contracts.serving.start_forecast import Forecast
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.wire import decode, encode
from kelvin.ipc.service_client import ServiceClient
from tests.simulation.activator.fake_replica import FakeReplica, start_failure
from tests.simulation.core.determinism import Clocks
from tests.simulation.core.fake_network import Network

T = TypeVar("T")

HEARTBEAT_S: Final = 5.0
START_S: Final = ((0.2, 3.0), (3.0, 25.0))  # a quick start, a slow start
RESTORE: Final = (StageSpan(Stage.DECIDED, 1000), StageSpan(Stage.READY, 30_000))
PRICES: Final = TokenPrices(per_tokens=1, prompt=1, cached=0, completion=2, request=1)
REPLICAS_MAX: Final = 4  # of one version


def secret_of(tenant: str) -> str:
    """Return the tenant's key."""
    return f"kv-{tenant:x<12}-{'s' * 43}"


class _Stream:
    """One reader's connection to the feed, and the `content` of its aiohttp response."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.content = self

    def put(self, line: Feed) -> None:
        self._queue.put_nowait(encode(line) + b"\n")

    def cut(self) -> None:
        self._queue.put_nowait(None)

    async def readany(self) -> bytes:
        data = await self._queue.get()
        if data is None:
            raise aiohttp.ClientPayloadError("the connection broke")
        return data


class _Empty:
    async def read(self) -> bytes:
        return b""


@dataclass(eq=False)
class FakeControlPlane:
    """The fake. It runs on the simulation's loop. `start_fails` is the probability that a start fails."""

    network: Network
    clocks: Clocks
    random: Random
    tenants: dict[str, TenantRow] = field(default_factory=dict)
    models: dict[tuple[str, str], ModelRow] = field(default_factory=dict)
    versions: dict[VersionKey, VersionRow] = field(default_factory=dict)
    rows: dict[str, ReplicaRow] = field(default_factory=dict)
    replicas: dict[str, FakeReplica] = field(default_factory=dict)
    records: dict[str, RequestRecord] = field(default_factory=dict)
    doubled: list[RequestRecord] = field(default_factory=list)  # second records of one request
    deleted: set[VersionKey] = field(default_factory=set)
    is_away: bool = False
    start_fails: float = 0.0
    revision: int = 1
    _spent: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)  # by spool
    _readers: list[_Stream] = field(default_factory=list)
    _starting: dict[VersionKey, asyncio.Task[None]] = field(default_factory=dict)
    _made: int = 0

    # The state, and its changes.

    def publish(self, **rows: Any) -> None:
        self.revision += 1
        self._tell(Feed(revision=self.revision, **rows))

    def _tell(self, line: Feed) -> None:
        for reader in self._readers:
            reader.put(line)

    def snapshot(self) -> Feed:
        """Return the whole state as a feed line."""
        keys = tuple(
            KeyRow(
                key_id=f"k-{tenant}",
                secret_sha256=hashlib.sha256(secret_of(tenant).encode()).hexdigest(),
                tenant=tenant,
                scopes=(Scope.INFER,),
            )
            for tenant in self.tenants
        )
        return Feed(
            revision=self.revision,
            full=True,
            tenants=tuple(self.tenants.values()),
            keys=keys,
            models=tuple(self.models.values()),
            versions=tuple(self.versions.values()),
            replicas=tuple(self.rows.values()),
            spending=tuple(map(self._spending, self.tenants)),
        )

    def put_tenant(self, row: TenantRow) -> None:
        self.tenants[row.tenant] = row
        self.publish(tenants=(row,))

    def put_model(self, row: ModelRow) -> None:
        self.models[row.tenant, row.model] = row
        self.publish(models=(row,))

    def add_version(self, tenant: str, model: str) -> VersionKey:
        """Add a version that was just pushed."""
        self._made += 1
        key = VersionKey(tenant, model, hashlib.sha256(f"version {self._made}".encode()).hexdigest())
        limits = Limits(1024, 1024, 8, 1 << 16)
        row = VersionRow(tenant=tenant, model=model, version=key.version, limits=limits, created_at_s=self._made)
        self.versions[key] = row
        self.publish(versions=(row,))
        return key

    def delete_version(self, key: VersionKey) -> None:
        """Delete a version. Its replicas drain, and no request may wait for it."""
        del self.versions[key]
        self.deleted.add(key)
        if (task := self._starting.pop(key, None)) is not None:
            task.cancel()
        self.publish(removed_versions=(tuple(key),))
        for name in self.names_of(key):
            self.drain(name)

    def delete_model(self, tenant: str, model: str) -> None:
        del self.models[tenant, model]
        for key in [each for each in self.versions if (each.tenant, each.model) == (tenant, model)]:
            self.delete_version(key)
        self.publish(removed_models=((tenant, model),))

    def names_of(self, key: VersionKey) -> list[str]:
        """Return the version's replicas in the feed."""
        return [
            name
            for name, row in self.rows.items()
            if (row.tenant, row.model, row.version) == (key.tenant, key.model, key.version)
        ]

    def add_replica(self, key: VersionKey, max_streams: int) -> None:
        self._made += 1
        name = f"r{self._made}"
        row = ReplicaRow(
            runtime_id=name, tenant=key.tenant, model=key.model, version=key.version, address=f"rt-{name}.sock",
            max_streams=max_streams, draining=False, restore=RESTORE,
        )  # fmt: skip
        self.replicas[name] = FakeReplica(name, Random(self.random.random()), max_streams)
        self.network.servers[row.address] = self.replicas[name]
        self.rows[name] = row
        self.publish(replicas=(row,))

    def drain(self, name: str) -> None:
        """Drain a replica. It accepts nothing new, and ends soon."""
        row = self.rows[name] = msgspec.structs.replace(self.rows[name], draining=True)
        if (replica := self.replicas.get(name)) is not None:  # otherwise it is dead, which the feed does not say yet
            replica.is_draining = True
        self.publish(replicas=(row,))
        asyncio.get_running_loop().call_later(self.random.uniform(0.0, 5.0), self.lose, name)

    def lose(self, name: str) -> None:
        """Kill a replica, and publish its death."""
        if (row := self.rows.pop(name, None)) is not None:
            self.kill(name, row.address)
            self.publish(removed_replicas=(name,))

    def kill(self, name: str, address: str) -> None:
        """Kill a replica's process."""
        self.network.servers.pop(address, None)
        for task in list(self.replicas.pop(name).running.values()) if name in self.replicas else ():
            task.cancel()
        self.network.cut(address)

    # The autoscaler and the ledger.

    def want(self, key: VersionKey) -> None:
        """Start a replica if the version has none."""
        serving = [name for name in self.names_of(key) if not self.rows[name].draining]
        if key in self.versions and key not in self._starting and not serving:
            self._starting[key] = asyncio.get_running_loop().create_task(self._start(key), name="start")

    async def _start(self, key: VersionKey) -> None:
        takes_s = self.random.uniform(*self.random.choice(START_S))
        forecast = Forecast(
            tenant=key.tenant, model=key.model, version=key.version,
            ready_in_ms=int(takes_s * self.random.choice((200, 1000, 3000))),
        )  # fmt: skip
        self.publish(forecasts=(forecast,))
        try:
            await asyncio.sleep(takes_s)
        finally:
            self._starting.pop(key, None)
        if self.random.random() < self.start_fails:
            self.publish(failures=(RestoreFailure.from_failure(key.tenant, key.version, start_failure(self.random)),))
        else:
            self.add_replica(key, self.random.randint(1, 3))

    def spent(self, tenant: str) -> int:
        """Return the spent micro-units in the ledger."""
        return self._spent.get(tenant, 0)

    def _spending(self, tenant: str) -> SpendingRow:
        ends_at_us = int((self.clocks.wall() // 2_592_000 + 1) * 2_592_000e6)
        return SpendingRow(
            tenant=tenant, month="2026-01", ends_at_us=ends_at_us, spent_micros=self._spent.get(tenant, 0),
            prices=PRICES, seen=dict(self._seen),
        )  # fmt: skip

    def _charge(self, record: RequestRecord) -> None:
        self._seen[record.source] = max(self._seen.get(record.source, 0), record.sequence)
        if (known := self.records.get(record.request_id)) is not None:
            if (known.source, known.sequence) != (record.source, record.sequence):
                self.doubled.append(record)
            return
        self.records[record.request_id] = record
        if record.outcome == "ok" or record.completion_tokens:
            micros = PRICES.cost_micros(record.prompt_tokens, record.cached_tokens, record.completion_tokens)
            self._spent[record.tenant] = self._spent.get(record.tenant, 0) + micros

    # Calls of clients.

    def cut_feed(self) -> None:
        """Break all readers' connections."""
        for reader in self._readers:
            reader.cut()
        self._readers.clear()

    def close_feed(self, reader: object) -> None:
        self._readers = [each for each in self._readers if each is not reader]

    async def beat(self) -> None:
        """Publish heartbeats for ever."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._tell(Feed(revision=self.revision))

    async def answer(self, method: str, path: str, body: bytes) -> Any:
        """Answer one call of an activator. Raises Refused while the control plane is away."""
        await asyncio.sleep(self.network.delay_s())
        if self.is_away:
            raise Refused(Unavailable("the control plane"))
        match method, path:
            case "GET", "/internal/v1/feed":
                reader = _Stream()
                reader.put(self.snapshot())
                self._readers.append(reader)
                return reader
            case "POST", "/internal/v1/stats":
                for stat in decode(body, Stats).stats:
                    if stat.concurrency > 0:
                        self.want(VersionKey(stat.tenant, stat.model, stat.version))
            case "POST", "/internal/v1/usage/requests":
                records = decode(body, RequestBatch).records
                for record in records:
                    self._charge(record)
                if records:
                    self.publish(spending=tuple(map(self._spending, {record.tenant: None for record in records})))
                await asyncio.sleep(self.network.delay_s())  # a caller that dies meanwhile gets no answer
        return _Empty()

    def close(self) -> None:
        for task in self._starting.values():
            task.cancel()


class ControlClient(ServiceClient):
    """A client of the fake, as activators use it."""

    def __init__(self, control: FakeControlPlane) -> None:
        self._fake = control
        self._is_dead = False
        self.base_url = ""

    def die(self) -> None:
        """Refuse further calls: the calling process is dead."""
        self._is_dead = True

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: object | None = None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """See ServiceClient. Works for calls without a response body."""
        await self._answer(method, path, b"" if body is None else encode(body))
        return decode(b"null", kind)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        payload: bytes | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        answer = await self._answer(method, path, payload or b"")
        try:
            yield answer
        finally:
            self._fake.close_feed(answer)

    async def _answer(self, method: str, path: str, body: bytes) -> Any:
        if self._is_dead:
            raise Refused(Unavailable("the control plane"))
        return await self._fake.answer(method, path, body)

    async def close(self) -> None:
        """Do nothing: nothing is open."""
