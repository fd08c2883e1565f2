"""A bounded in-memory cache of tenants' values."""

import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[ValueT]):
    value: ValueT
    size: int


class TenantCache(Generic[ValueT]):
    """A cache of at most `max_values`, of at most `size_limit` (None: any size) in all. The newest value is always
    kept. If it is full, the tenant with the largest total size loses its oldest value.
    """

    def __init__(self, max_values: int, size_limit: int | None = None) -> None:
        self._max_values = max_values
        self._size_limit = sys.maxsize if size_limit is None else size_limit
        self._entries: OrderedDict[tuple[str, str], _Entry[ValueT]] = OrderedDict()
        self._sizes: Counter[str] = Counter()  # by tenant

    def __repr__(self) -> str:
        sizes = f"{self._sizes.total()}/{self._size_limit}"
        return f"<TenantCache kept={len(self._entries)}/{self._max_values} size={sizes}>"

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tenant: str, name: str) -> ValueT | None:
        """Return the tenant's value of this name, or None."""
        entry = self._entries.get((tenant, name))
        return None if entry is None else entry.value

    def put(self, tenant: str, name: str, value: ValueT, size: int = 1) -> None:
        """Keep the value, and drop others if there is no room for all."""
        self.drop(tenant, name)
        while self._entries and (
            len(self._entries) >= self._max_values or self._sizes.total() + size > self._size_limit
        ):
            sizes = self._sizes + Counter({tenant: size})
            # Only kept values are candidates, so a tenant with just the new value loses nothing.
            oldest = max(self._entries, key=lambda each: sizes[each[0]])
            self.drop(*oldest)
        self._entries[tenant, name] = _Entry(value, size)
        self._sizes[tenant] += size

    def drop(self, tenant: str, name: str) -> None:
        """Drop the value, which may be gone already."""
        if (entry := self._entries.pop((tenant, name), None)) is not None:
            self._sizes[tenant] -= entry.size
            self._sizes += Counter()  # drops tenants without values
