"""The hash chain of a tenant's month: each row's digest covers the one before it and the row's own bytes.

SHA-256 (FIPS 180-4): it is in every standard library, so that a chain can be checked without us; at 400 bytes a row it
costs less than reading the row. Nothing here keeps who owns the database from making a new chain: note a digest
elsewhere (closing a month prints it) where that matters.
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

Value = str | int | bool | None

_FORMAT: Final = "kelvin ledger 1"  # another one for any other choice of fields or encoding


class Kind(StrEnum):
    """What a row of the chain is."""

    REQUEST = "request"
    LIFETIME = "lifetime"
    CONFLICT = "conflict"
    CLOSING = "closing"


def genesis(tenant: str, month: str) -> bytes:
    """What the first row of a chain follows. No two chains have it in common: rows can't change places."""
    return hashlib.sha256(msgspec.json.encode([_FORMAT, tenant, month])).digest()


def digest_of(previous: bytes, kind: Kind, values: Sequence[Value]) -> bytes:
    """32 bytes over the previous digest and the row's canonical bytes: JSON (UTF-8, no space) of kind and fields."""
    return hashlib.sha256(previous + msgspec.json.encode([kind.value, *values])).digest()
