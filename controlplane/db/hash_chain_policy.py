"""Compute and check hash chains: each row's digest covers the digest of the row before it and the row's own bytes.

The ledger has a chain for each month of a tenant, the audit log one for each tenant. SHA-256 (FIPS 180-4) is in every
standard library, so a chain can be checked without Kelvin. At 400 bytes a row it costs less than reading the row.
Nothing here prevents the owner of the database from making a new chain. Where that matters, keep a chain's end
elsewhere: closing a month and verifying the audit print it.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

Value = str | int | bool | None

# Names of the formats. Any other choice of fields or encoding needs a new name.
LEDGER: Final = "kelvin ledger 1"
AUDIT: Final = "kelvin audit 1"


class RowKind(StrEnum):
    """Kind of a row in a ledger's chain. It is the first of the row's values."""

    REQUEST = "request"
    LIFETIME = "lifetime"
    CONFLICT = "conflict"
    CLOSING = "closing"


def genesis(format_name: str, *names: str) -> bytes:
    """Return the digest that precedes the first row. It differs for each chain, so rows can't move to another one."""
    return hashlib.sha256(msgspec.json.encode([format_name, *names])).digest()


def digest_of(previous: bytes, values: Sequence[Value]) -> bytes:
    """Return 32 bytes over the previous digest and the row's canonical bytes: its values as JSON (UTF-8, no space)."""
    return hashlib.sha256(previous + msgspec.json.encode(values)).digest()


class ChainReader:
    """Follows a chain link by link, up to the first difference. Methods return the difference as a text, or None."""

    def __init__(self, start: bytes) -> None:
        self.links = 0  # links that hold
        self.end = start  # digest of the last of them

    def check_link(self, link: int) -> str | None:
        """Check that this number comes next."""
        if link == self.links + 1:
            return None
        return f"link {link} comes after link {self.links}: a row is missing, or one too many"

    def advance(self, link: int, values: Sequence[Value], chain: str) -> str | None:
        """Add the next row. Its values must give the digest that is stored with them."""
        end = digest_of(self.end, values)
        if end.hex() != chain:
            return f"link {link}: the row, or one before it, is not what was written"
        self.links, self.end = link, end
        return None

    def check_end(self, links: int, chain: str) -> str | None:
        """Check that the chain ends at its stored end. Call it after the last row."""
        if (self.links, self.end.hex()) == (links, chain):
            return None
        return f"the chain ends with link {self.links}; {links} links were written, or another last one"
