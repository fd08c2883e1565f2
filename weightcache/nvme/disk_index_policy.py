"""The index of the NVMe tier: its chunk files, within a budget in bytes. Pure: no file is touched here.

Bytes are reserved before a file is written. A file may vanish under a reader: its chunk then comes from the next
source.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from weightcache.host.policy.eviction import Candidate, TenantShares, choose_victims
from weightcache.sources.policy.fair_read_queue import ChunkKey

HALF_LIFE_S: Final = 86_400.0  # half-life of an unread file's value
# 1/EVICTION_DIVISOR of the budget is evicted at once, but at most 1/QUOTA_EVICTION_DIVISOR of a tenant's quota: ranking
# tens of thousands of files takes as long as a read
EVICTION_DIVISOR: Final = 64
QUOTA_EVICTION_DIVISOR: Final = 8
WRITES_AT_ONCE: Final = 2  # writing threads of the pool (`host/policy/pool_sizes.py`): the others are for loads


@dataclass(slots=True)
class _File:
    length: int
    used_at: float
    is_written: bool
    tag: bytes | None = None  # tag of the verified bytes


class DiskIndex:
    """An index of at most `budget_bytes` of chunk files, including files that are being written. `quota_bytes` limits
    one tenant while others need space (None: no limit). `reload_s` predicts the seconds to reload a file of a length.
    """

    def __init__(
        self, budget_bytes: int, quota_bytes: int | None = None, reload_s: Callable[[int], float] = float
    ) -> None:
        self.budget_bytes = budget_bytes
        self.quota_bytes = budget_bytes if quota_bytes is None else min(quota_bytes, budget_bytes)
        self._reload_s = reload_s
        self._files: dict[ChunkKey, _File] = {}
        self._bytes_by_tenant: Counter[str] = Counter()
        self._total = 0

    def __repr__(self) -> str:
        return f"<DiskIndex files={len(self._files)} bytes={self._total}/{self.budget_bytes}>"

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all files, including those being written."""
        return self._total

    @property
    def bytes_by_tenant(self) -> dict[str, int]:
        """Return the bytes of files by tenant, including those being written."""
        return {tenant: held for tenant, held in self._bytes_by_tenant.items() if held}

    @property
    def file_count(self) -> int:
        """Return the number of readable files."""
        return sum(file.is_written for file in self._files.values())

    def add_existing(self, key: ChunkKey, length: int, used_at: float) -> None:
        """Add a file of an earlier process, last used at `used_at`."""
        self.drop(key)
        self._add(key, _File(length, used_at, is_written=True))

    def is_readable(self, key: ChunkKey) -> bool:
        """Return whether the file can be read."""
        file = self._files.get(key)
        return file is not None and file.is_written

    def is_known(self, key: ChunkKey) -> bool:
        """Return whether the file can be read or is being written."""
        return key in self._files

    def file_identity(self, key: ChunkKey) -> object | None:
        """Return an object that identifies the readable file, or None. A file that replaces it has another object."""
        file = self._files.get(key)
        return file if file is not None and file.is_written else None

    def length(self, key: ChunkKey) -> int:
        """Return the length of the file in bytes; 0 without one."""
        file = self._files.get(key)
        return 0 if file is None else file.length

    def trim(self) -> tuple[ChunkKey, ...]:
        """Forget files if the budget shrank, and return them for removal."""
        shares = TenantShares(self._bytes_by_tenant, self.quota_bytes, "")
        victims = choose_victims(self._idle(math.inf), self._total - self.budget_bytes, HALF_LIFE_S, shares) or ()
        for key in victims:
            self.drop(key)
        return victims

    def admit(self, key: ChunkKey, length: int, now: float) -> tuple[ChunkKey, ...] | None:
        """Reserve room for a new file. Return the files to remove, which are forgotten at once.

        More is removed than this file needs, so that the next ones need no removal. Return None if the file exists
        already, or does not fit beside files that are being written and other tenants' quotas.

        A file whose last use lies after `now`, because the clock was set back, gets `now` as its last use.
        """
        victims = None if key in self._files else self._choose_victims(key[0], length, now)
        if victims is None:
            return None
        for victim in victims:
            self.drop(victim)
        self._add(key, _File(length, now, is_written=False))
        return victims

    def has_room_for(self, tenant: str, length: int) -> bool:
        """Return whether `admit` would accept a new file of the tenant now."""
        return self._choose_victims(tenant, length, math.inf) is not None

    def max_bytes_of(self, tenant: str) -> int:
        """Return how many bytes the tenant can keep at once, given other tenants' quotas."""
        others = self._total - self._bytes_by_tenant[tenant]
        return max(self.quota_bytes, self.budget_bytes - others)

    def mark_written(self, key: ChunkKey) -> None:
        """Record that the file is complete and readable."""
        assert not self._files[key].is_written
        self._files[key].is_written = True

    def tag(self, key: ChunkKey) -> bytes | None:
        """Return the tag of the file's bytes; None if they were not verified yet or the file does not exist."""
        file = self._files.get(key)
        return None if file is None else file.tag

    def mark_verified(self, key: ChunkKey, tag: bytes) -> None:
        """Record the tag of verified bytes. The file may be gone meanwhile."""
        if (file := self._files.get(key)) is not None:
            file.tag = tag

    def touch(self, key: ChunkKey, now: float) -> None:
        """Record a read of the file. It may be gone meanwhile."""
        if (file := self._files.get(key)) is not None:
            file.used_at = now

    def drop(self, key: ChunkKey) -> None:
        """Forget a file that is gone or was never finished. It may be unknown."""
        if (file := self._files.pop(key, None)) is not None:
            self._total -= file.length
            self._bytes_by_tenant[key[0]] -= file.length

    def select(self, tenant: str | None, digests: frozenset[str] | None) -> tuple[ChunkKey, ...]:
        """Return the readable files of the tenant (None: all) among the digests (None: any)."""
        return tuple(
            key
            for key, file in self._files.items()
            if file.is_written and tenant in (None, key[0]) and (digests is None or key[1] in digests)
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if two facts contradict each other."""
        held: Counter[str] = Counter()
        for (tenant, _), file in self._files.items():
            held[tenant] += file.length
        assert self._total == held.total()
        assert self._bytes_by_tenant == held
        assert all(file.length >= 0 for file in self._files.values())

    def _choose_victims(self, tenant: str, length: int, now: float) -> tuple[ChunkKey, ...] | None:
        """Return the files to remove for a new one, and for some after it. None if it does not fit."""
        if length > self.quota_bytes:
            return None
        needed_bytes = self._total + length - self.budget_bytes
        if needed_bytes <= 0:
            return ()
        batch_bytes = min(self.budget_bytes // EVICTION_DIVISOR, self.quota_bytes // QUOTA_EVICTION_DIVISOR)
        extra_bytes = max(0, batch_bytes - needed_bytes)
        quota_left = self.quota_bytes - self._bytes_by_tenant[tenant] - length  # what the tenant may have in addition
        extra_bytes = min(extra_bytes, quota_left) if quota_left >= 0 else extra_bytes
        victims = self._victims_for(tenant, length + extra_bytes, needed_bytes + extra_bytes, now)
        if victims is None and extra_bytes:
            victims = self._victims_for(tenant, length, needed_bytes, now)
        return victims

    def _victims_for(self, tenant: str, added_bytes: int, needed_bytes: int, now: float) -> tuple[ChunkKey, ...] | None:
        """Return the files to remove so that `added_bytes` of the tenant fit; `needed_bytes` must be freed."""
        shares = TenantShares(self._bytes_by_tenant + Counter({tenant: added_bytes}), self.quota_bytes, tenant)
        return choose_victims(self._idle(now), needed_bytes, HALF_LIFE_S, shares)

    def _idle(self, now: float) -> Iterable[Candidate[ChunkKey]]:
        for key, file in self._files.items():
            if file.is_written:
                file.used_at = min(file.used_at, now)
                yield Candidate(key, file.length, file.used_at, self._reload_s(file.length), key[0])

    def _add(self, key: ChunkKey, file: _File) -> None:
        self._files[key] = file
        self._total += file.length
        self._bytes_by_tenant[key[0]] += file.length


def may_begin_write(write_count: int, *, is_disk_read: bool) -> bool:
    """Return whether to start writing one more chunk. Loads from the same disk come first. During loads, one write at a
    time continues. Otherwise a busy machine would never keep a chunk.
    """
    return write_count < (1 if is_disk_read else WRITES_AT_ONCE)
