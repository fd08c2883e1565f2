"""A bounded in-memory cache of tenants' values."""

import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Kept(Generic[T]):
    value: T
    size: int


class TenantCache(Generic[T]):
    """A cache of at most `most` values, of at most `size_limit` (None: any size) in all. The newest value is always
    kept. If it is full, the tenant with the largest total size loses its oldest value.
    """

    def __init__(self, most: int, size_limit: int | None = None) -> None:
        self._most = most
        self._size_limit = sys.maxsize if size_limit is None else size_limit
        self._kept: OrderedDict[tuple[str, str], _Kept[T]] = OrderedDict()
        self._sizes: Counter[str] = Counter()  # by tenant

    def __repr__(self) -> str:
        return f"<TenantCache kept={len(self._kept)}/{self._most} size={self._sizes.total()}/{self._size_limit}>"

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, tenant: str, name: str) -> T | None:
        """Return the tenant's value of this name, or None."""
        kept = self._kept.get((tenant, name))
        return None if kept is None else kept.value

    def put(self, tenant: str, name: str, value: T, size: int = 1) -> None:
        """Keep the value, and drop others if there is no room for all."""
        self.drop(tenant, name)
        while self._kept and (len(self._kept) >= self._most or self._sizes.total() + size > self._size_limit):
            sizes = self._sizes + Counter({tenant: size})
            # Only kept values are candidates, so a tenant with just the new value loses nothing.
            first = max(self._kept, key=lambda each: sizes[each[0]])
            self.drop(*first)
        self._kept[tenant, name] = _Kept(value, size)
        self._sizes[tenant] += size

    def drop(self, tenant: str, name: str) -> None:
        """Drop the value, which may be gone already."""
        if (kept := self._kept.pop((tenant, name), None)) is not None:
            self._sizes[tenant] -= kept.size
            self._sizes += Counter()  # drops tenants without values
