"""Write hash chains of the ledger and the audit log: rows are linked in memory, and the chains' new ends are stored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sqlalchemy import Connection, Table, insert, select, update

from controlplane.db import hash_chain_policy as chain
from controlplane.db import ledger_schema, schema
from controlplane.db.hash_chain_policy import Value

ChainName = tuple[str, ...]  # a tenant, and for the ledger also a month
OnProgress = Callable[[int], None]  # called with the number of rows read since the last call


@dataclass(frozen=True, slots=True)
class ChainedLog:
    """A log with hash chains: the table of the chains' ends, and the format that the chains begin with."""

    ends: Table
    format_name: str

    def genesis(self, name: ChainName) -> bytes:
        """Return the digest that precedes the first row of the chain."""
        return chain.genesis(self.format_name, *name)

    def columns_of(self, name: ChainName) -> dict[str, str]:
        """Return the chain's name as values by column."""
        return dict(zip(self.ends.primary_key.columns.keys(), name, strict=True))

    def end_of(self, connection: Connection, name: ChainName) -> tuple[int, str] | None:
        """Return the stored number of links and the last digest; None for an empty chain."""
        found = connection.execute(select(self.ends).filter_by(**self.columns_of(name))).first()
        return None if found is None else (found.links, found.chain)


LEDGER: Final = ChainedLog(ledger_schema.chains, chain.LEDGER)
AUDIT: Final = ChainedLog(schema.audit_chains, chain.AUDIT)


class ChainLink(NamedTuple):
    """A row's place in its chain. The fields are named as its columns."""

    link: int
    chain: str


class ChainWriter:
    """Links the rows that one transaction adds to chains of a log."""

    def __init__(self, connection: Connection, log: ChainedLog = LEDGER) -> None:
        self._connection = connection
        self._log = log
        self._ends: dict[ChainName, tuple[int, bytes]] = {}
        self._new: set[ChainName] = set()

    def next_link(self, name: ChainName) -> int:
        """Return the number of the chain's next row."""
        return self._end(name)[0] + 1

    def add(self, name: ChainName, values: Sequence[Value]) -> ChainLink:
        """Link the next row of the chain."""
        links, end = self._end(name)
        links, end = links + 1, chain.digest_of(end, values)
        self._ends[name] = links, end
        return ChainLink(links, end.hex())

    def write(self) -> None:
        """Store the new ends. Call it once, after everything was added."""
        ends = self._log.ends
        for name, (links, end) in self._ends.items():
            names, values = self._log.columns_of(name), {"links": links, "chain": end.hex()}
            if name in self._new:
                self._connection.execute(insert(ends).values(names | values))
            else:
                self._connection.execute(update(ends).filter_by(**names).values(values))

    def _end(self, name: ChainName) -> tuple[int, bytes]:
        known = self._ends.get(name)
        if known is None:
            written = self._log.end_of(self._connection, name)
            if written is None:
                self._new.add(name)
                known = 0, self._log.genesis(name)
            else:
                known = written[0], bytes.fromhex(written[1])
            self._ends[name] = known
        return known
