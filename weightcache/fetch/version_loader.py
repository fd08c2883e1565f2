"""Load versions into the host tier, once for all callers (single-flight), and pin them while a lease is granted."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final

from kelvin.blobstore.bounded_gather import cancel_and_wait
from kelvin.contracts.artifacts.manifest import Manifest
from kelvin.contracts.errors import CapacityExceeded, Failure, Internal, Refused
from kelvin.contracts.traffic_errors import DeadlineExceeded, Overloaded
from kelvin.process.race import first_completed
from weightcache.client.lease_protocol import MAX_SLABS
from weightcache.fetch.attestation_loader import AttestationLoader
from weightcache.fetch.chunk_loader import ChunkLoader
from weightcache.fetch.manifest_loader import ManifestLoader
from weightcache.fetch.tier_model_policy import TierModel
from weightcache.host.arena import Arena
from weightcache.host.policy.host_index import Reservation
from weightcache.host.resident_version import (
    LoadedVersion,
    LoadProgress,
    ResidentVersion,
    TierTally,
    build_resident,
    build_tally,
)
from weightcache.sources.policy.fair_read_queue import FULL_WEIGHT, PREFETCH_WEIGHT

log = logging.getLogger(__name__)

YIELD_TIMEOUT_S: Final = 5.0  # time for an interrupted prefetch to finish its current reads
RESERVE_POLL_S: Final = 0.01

LoadCallback = Callable[[LoadProgress], Awaitable[None]]


VersionKey = tuple[str, str]  # tenant, version


class LeasePriority:
    """The versions that leases wait for. Leases come first: background loads wait for them, and yield to them."""

    def __init__(self) -> None:
        self._awaited: Counter[VersionKey] = Counter()
        self._changed = asyncio.Event()

    @contextmanager
    def waiting_lease(self, key: VersionKey) -> Iterator[None]:
        """Count a lease as waiting for this version while the block runs."""
        self._awaited[key] += 1
        self._notify()
        try:
            yield
        finally:
            self._awaited[key] -= 1
            if not self._awaited[key]:
                del self._awaited[key]
            self._notify()

    def is_busy(self, except_version: VersionKey | None = None) -> bool:
        """Return whether a lease waits for another version than `except_version`."""
        return any(key != except_version for key in self._awaited)

    async def wait_until_free(self, except_version: VersionKey | None = None) -> None:
        """Wait until no lease waits for another version than `except_version`."""
        while self.is_busy(except_version):
            await self._changed.wait()

    async def try_run(self, work: Callable[[], Awaitable[None]], key: VersionKey) -> bool:
        """Run `work`, which concerns version `key`. Return False if a lease for another version interrupted it. The
        work has ended in both cases. Raises errors of `work`.
        """
        is_done, _ = await first_completed(work(), self._wait_until_busy(key))
        return is_done

    async def _wait_until_busy(self, except_version: VersionKey) -> None:
        while not self.is_busy(except_version):
            await self._changed.wait()

    def _notify(self) -> None:
        """Wake all waiters to check again."""
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(eq=False, slots=True)
class _BandwidthShare:
    """Bandwidth share of one load: its key in the fair queues, and its weight."""

    weight: float


@dataclass(slots=True)
class _Load:
    task: asyncio.Task[LoadedVersion | Failure]
    bandwidth_share: _BandwidthShare
    progress: LoadProgress
    waiter_count: int = 0
    is_lease: bool = False  # a past or present waiter wants a lease


class VersionLoader:
    """Versions in memory. Each is loaded once for all callers; a load without waiting callers is cancelled."""

    def __init__(
        self,
        arena: Arena,
        loader: ChunkLoader,
        manifest_loader: ManifestLoader,
        attestations: AttestationLoader,
        lease_priority: LeasePriority,
        tier_model: TierModel,
    ) -> None:
        self._arena = arena
        self._loader = loader
        self._manifest_loader = manifest_loader
        self._attestations = attestations
        self.tier_model = tier_model
        self._lease_priority = lease_priority
        self._yielded_at_s = float("-inf")
        self._hot: dict[tuple[str, str], ResidentVersion] = {}
        self._loads: dict[tuple[str, str], _Load] = {}
        self._prefetch_tallies: dict[
            tuple[str, str], TierTally
        ] = {}  # tallies of urgent prefetches, for the first lease
        arena.on_slab_end = self.forget_slab

    @property
    def hot_count(self) -> int:
        """Return the number of versions that can be leased at once."""
        return len(self._hot)

    def try_hot_tally(self, tenant: str, version: str) -> TierTally | None:
        """Return the tally of a version that can be leased at once; else None, even if all its bytes are in memory."""
        hot = self._hot.get((tenant, version))
        return None if hot is None else hot.tally

    @asynccontextmanager
    async def pin_version(
        self,
        tenant: str,
        version: str,
        timeout_s: float,
        engines: tuple[tuple[str, str], ...] = (),
        on_loading: LoadCallback | None = None,
    ) -> AsyncIterator[LoadedVersion]:
        """Yield the version for a lease: whole, verified, and pinned while the block runs. During a load, `on_loading`
        runs; it is cancelled when the version is loaded. Raises `Refused`, and errors of `on_loading`.
        """
        key = (tenant, version)
        async with self._join_load(key, timeout_s, engines, is_lease=True, on_loading=on_loading) as loaded:
            prefetch_tally = self._prefetch_tallies.pop(key, None)
            if loaded.was_hot and prefetch_tally is not None:
                loaded = LoadedVersion(loaded.resident, prefetch_tally)
            yield loaded

    async def load(self, tenant: str, version: str, timeout_s: float, *, urgent: bool) -> None:
        """Load the version without a lease. Once this returns, the version may be evicted. Raises `Refused`.

        An urgent call is part of a start: the following lease reports its tiers. Other calls get a small share of each
        source, until a lease waits for the version.
        """
        key = (tenant, version)
        weight = FULL_WEIGHT if urgent else PREFETCH_WEIGHT
        async with self._join_load(key, timeout_s, (), is_lease=False, weight=weight) as loaded:
            self._arena.index.touch(loaded.resident.slabs, time.monotonic())
            if urgent and not loaded.was_hot and key in self._hot:
                self._prefetch_tallies[key] = loaded.tally

    @asynccontextmanager
    async def _join_load(
        self,
        key: tuple[str, str],
        timeout_s: float,
        engines: tuple[tuple[str, str], ...],
        *,
        is_lease: bool,
        weight: float = FULL_WEIGHT,
        on_loading: LoadCallback | None = None,
    ) -> AsyncIterator[LoadedVersion]:
        hot = self._hot.get(key)
        if hot is not None and hot.has_seal_for(engines):
            self._arena.index.pin(hot.slabs)
            try:
                yield LoadedVersion(hot, hot.tally)
            finally:
                self._arena.unpin(hot.slabs)
            return
        load = self._loads.get(key)
        if load is None:
            load = self._start_load(key, weight)
        if weight > load.bandwidth_share.weight:
            load.bandwidth_share.weight = weight
            self._loader.set_weight(load.bandwidth_share, weight)
        load.waiter_count += 1
        load.is_lease |= is_lease
        try:
            with self._lease_priority.waiting_lease(key) if is_lease else nullcontext():
                loaded = await _wait_for_load(load, timeout_s, on_loading)
            yield loaded if is_lease or not load.is_lease else LoadedVersion(loaded.resident, loaded.resident.tally)
        finally:
            load.waiter_count -= 1
            if not load.waiter_count:
                self._end_load(key, load)

    async def close(self) -> None:
        """Cancel all loads and wait for their ends."""
        await cancel_and_wait([load.task for load in self._loads.values()])
        self._hot.clear()

    def _start_load(self, key: tuple[str, str], weight: float) -> _Load:
        bandwidth_share, progress = _BandwidthShare(weight), LoadProgress()
        load = _Load(asyncio.create_task(self._load(*key, bandwidth_share, progress)), bandwidth_share, progress)
        self._loads[key] = load

        def done(_: object) -> None:
            if self._loads.get(key) is load:
                del self._loads[key]  # later callers find the version hot, or load it again

        load.task.add_done_callback(done)
        return load

    def _end_load(self, key: tuple[str, str], load: _Load) -> None:
        """Cancel a load that no caller waits for. If it has finished, unpin its slabs."""
        if self._loads.get(key) is load:
            del self._loads[key]
        if not load.task.done():
            if not load.is_lease:
                self._yielded_at_s = time.monotonic()
            load.task.cancel()
            load.task.add_done_callback(self._release)  # it may have finished at the same moment
        else:
            self._release(load.task)

    def _release(self, task: asyncio.Task[LoadedVersion | Failure]) -> None:
        if not task.cancelled() and isinstance(loaded := task.result(), LoadedVersion):
            self._arena.unpin(loaded.resident.slabs)

    async def _load(
        self, tenant: str, version: str, bandwidth_share: _BandwidthShare, progress: LoadProgress
    ) -> LoadedVersion | Failure:
        """Load the version. Its slabs stay pinned if this returns a LoadedVersion."""
        began_s = time.monotonic()
        try:
            raw, manifest = await self._manifest_loader.load_manifest(tenant, version)
            attestations = await self._attestations.load_seals(tenant, version)

            def build_version(reservation: Reservation) -> ResidentVersion:
                return build_resident(raw, manifest, attestations, reservation)

            loaded = await self._load_chunks(tenant, manifest, build_version, bandwidth_share, progress)
        except Refused as refused:
            return refused.failure
        except Exception:
            log.exception("a version was not loaded", extra={"tenant": tenant, "version": version})
            return Internal()
        self._hot[tenant, version] = loaded.resident
        self.tier_model.observe(loaded.tally.bytes, time.monotonic() - began_s)
        return loaded

    async def _load_chunks(
        self,
        tenant: str,
        manifest: Manifest,
        build_version: Callable[[Reservation], ResidentVersion],
        bandwidth_share: _BandwidthShare,
        progress: LoadProgress,
    ) -> LoadedVersion:
        """Reserve places and load all chunks. A chunk that was found damaged during the load is loaded again."""
        tiers: dict[str, str] = {}
        chunks = [(chunk.digest, chunk.length) for chunk in manifest.chunks]
        while True:
            reservation = await self._reserve_with_retries(tenant, chunks, bandwidth_share)
            try:
                resident = build_version(reservation)
            except BaseException:
                self._arena.withdraw(reservation)
                raise
            try:
                with progress.track_load(resident, chunks, reservation.ready):
                    ready = partial(progress.mark_ready, resident)
                    new_tiers = await self._loader.load(reservation, bandwidth_share, bandwidth_share.weight, ready)
            except BaseException:
                self._arena.unpin(reservation.slabs)
                raise
            tiers = {**new_tiers, **{digest: tier for digest, tier in tiers.items() if new_tiers[digest] == "host"}}
            if self._arena.index.is_current(reservation):
                return LoadedVersion(resident, build_tally(reservation, tiers))
            self._arena.unpin(reservation.slabs)

    async def _reserve_with_retries(
        self, tenant: str, chunks: Sequence[tuple[str, int]], bandwidth_share: _BandwidthShare
    ) -> Reservation:
        """Reserve places. If a prefetch is yielding, wait until its last reads have ended and freed their memory."""
        deadline_s = time.monotonic() + YIELD_TIMEOUT_S
        while True:
            try:
                return self._reserve(tenant, chunks)
            except Refused as refused:
                if not isinstance(refused.failure, Overloaded):
                    raise
                may_retry = self._loader.busy_count and self._is_yielding(bandwidth_share)
                if time.monotonic() > deadline_s or not may_retry:
                    raise
            await asyncio.sleep(RESERVE_POLL_S)

    def _is_yielding(self, own_load_share: _BandwidthShare) -> bool:
        """Return whether a prefetch is yielding, or was a moment ago."""
        others = (load for load in self._loads.values() if load.bandwidth_share is not own_load_share)
        leaving = any(not load.is_lease and load.bandwidth_share.weight < FULL_WEIGHT for load in others)
        return leaving or time.monotonic() - self._yielded_at_s < YIELD_TIMEOUT_S

    def _reserve(self, tenant: str, chunks: Sequence[tuple[str, int]]) -> Reservation:
        # Refuse a version that no lease can hold before anything is evicted for it.
        if (needed := self._arena.index.count_slabs_needed(chunks)) > MAX_SLABS:
            raise Refused(CapacityExceeded("slabs of a lease", needed, MAX_SLABS))
        reservation = self._arena.reserve(tenant, chunks, time.monotonic())
        if len(reservation.slabs) > MAX_SLABS:  # its chunks are scattered over too many slabs
            self._arena.withdraw(reservation)
            raise Refused(CapacityExceeded("slabs of a lease", len(reservation.slabs), MAX_SLABS))
        return reservation

    def forget_slab(self, slab: int) -> None:
        """Make versions with chunks in the slab non-resident: the slab, or a chunk in it, is gone."""
        for key in [key for key, resident in self._hot.items() if slab in resident.slabs]:
            del self._hot[key]
            self._prefetch_tallies.pop(key, None)


async def _wait_for_load(load: _Load, timeout_s: float, on_loading: LoadCallback | None) -> LoadedVersion:
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s) as limit:
            if on_loading is not None:
                await _run_until_loaded(on_loading(load.progress), load.task)
            outcome = await asyncio.shield(load.task)
    except TimeoutError as error:
        if not limit.expired():  # `on_loading` raised it
            raise
        raise Refused(DeadlineExceeded(time.monotonic() - began_s, "restoring weights")) from error
    if isinstance(outcome, Failure):
        raise Refused(outcome)
    return outcome


async def _run_until_loaded(work: Awaitable[None], load: asyncio.Task[LoadedVersion | Failure]) -> None:
    """Run the work until it or the load ends, then cancel the work. Raises errors of the work."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, load), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait((task,))
    if not task.cancelled():
        task.result()
