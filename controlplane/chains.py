"""The ends of chains: rows of a batch are linked in memory, and the new ends are written with them."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, insert, select, update

from controlplane.ledger_schema import chains
from controlplane.policy.chain import Kind, Value, digest_of, genesis


class Place(NamedTuple):
    """Where a row is: its columns of these names."""

    month: str
    link: int
    chain: str


class Chains:
    """The ends of all chains that one transaction adds to."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ends: dict[tuple[str, str], tuple[int, bytes]] = {}
        self._new: set[tuple[str, str]] = set()

    def add(self, tenant: str, month: str, kind: Kind, values: Sequence[Value]) -> Place:
        """The next one of that chain."""
        links, end = self._end(tenant, month)
        links, end = links + 1, digest_of(end, kind, values)
        self._ends[tenant, month] = links, end
        return Place(month, links, end.hex())

    def write(self) -> None:
        """The new ends. Call it once, after everything was added."""
        for (tenant, month), (links, end) in self._ends.items():
            values = {"links": links, "chain": end.hex()}
            if (tenant, month) in self._new:
                self._connection.execute(insert(chains).values(tenant=tenant, month=month, **values))
            else:
                same = update(chains).where(chains.c.tenant == tenant, chains.c.month == month)
                self._connection.execute(same.values(**values))

    def _end(self, tenant: str, month: str) -> tuple[int, bytes]:
        known = self._ends.get((tenant, month))
        if known is not None:
            return known
        query = select(chains.c.links, chains.c.chain).where(chains.c.tenant == tenant, chains.c.month == month)
        found = self._connection.execute(query).first()
        if found is None:
            self._new.add((tenant, month))
            return 0, genesis(tenant, month)
        return found.links, bytes.fromhex(found.chain)
