"""The protocol of object stores: bytes by key, written once and never changed. Callers give the bytes their meaning.

Keys are `a/b/c`. An object is visible whole or not at all. A store raises only the errors below; any other is a defect.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

from kelvin.contracts.artifacts.object_keys import is_object_key, objects_prefix
from kelvin.contracts.errors import CapacityExceeded, InvalidRequest, NotFound, Refused, Unavailable

_KEY_LIMIT: Final = 900  # S3 allows 1024 bytes; a bucket prefix must still fit
_SEGMENT_LIMIT: Final = 200
# No leading dot: neither `..` nor a store's own hidden files can be named.
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")

Payload = bytes | AsyncIterator[bytes]


class BlobNotFound(Refused):
    """No object has this key."""

    def __init__(self, key: str) -> None:
        super().__init__(NotFound("object", key))


class BlobUnavailable(Refused):
    """The store did not answer, or not in time. The same call may succeed later."""

    def __init__(self, reason: str) -> None:
        super().__init__(Unavailable("the object store"))
        self.reason = reason
        self.add_note(reason)


class StoreFull(Refused):
    """The store has no room for the object. Waiting does not help, so no call is retried."""

    def __init__(self) -> None:
        super().__init__(CapacityExceeded("bytes in the object store", 1, 0))
        self.reason = "the object store is full"


class BlobShort(Refused):
    """The object ends before the range does. No part of the range is returned."""

    def __init__(self, key: str, offset: int, length: int) -> None:
        super().__init__(InvalidRequest("range", f"{offset}+{length}", f"the object '{key}' ends before it does"))


class BlobCorrupt(Refused):
    """The bytes of a pack, manifest or draft do not match the digest in its name."""


class BadKey(Refused):
    """The key or prefix breaks a rule."""

    def __init__(self, key: str, rule: str) -> None:
        super().__init__(InvalidRequest("key", repr(key[:80]), rule))


@dataclass(frozen=True, slots=True)
class BlobStat:
    """Facts about an object without its content. `modified_s` is the time of the put, by the store's wall clock."""

    size: int
    modified_s: float


class BlobStore(Protocol):
    """A store of objects, safe for many tasks. A call may be cancelled, and may raise `BadKey`, `BlobUnavailable`."""

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        """Create the object. Return True if this call created it, False if it existed. It is durable and whole in both
        cases.

        Exactly one of several concurrent puts gets True. If the key exists, an iterator may be left unread. If the
        iterator raises, nothing becomes visible. A key must not be a parent of another; a store may refuse it. Raises
        `Refused(CapacityExceeded)` if the object is too large for the store, and `StoreFull`.
        """

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return exactly `length` bytes from `offset`, or all bytes to the end. Raises `BlobNotFound`, `BlobShort`."""

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        """Fill all of `into` (writable bytes). Raises as `read` does; then the content of `into` is undefined. Once
        this returns, raises or is cancelled, nothing writes to `into` any more.
        """

    async def stat(self, key: str) -> BlobStat:
        """Return size and time of the object. Raises `BlobNotFound`."""

    def list(self, prefix: str) -> AsyncIterator[str]:
        """Yield keys that begin with `prefix`, ascending by code point. Concurrent puts and deletes may be visible."""

    async def delete(self, key: str) -> None:
        """Delete the object. Does nothing if it does not exist."""


async def list_objects(store: BlobStore, tenant: str, kind: str) -> list[str]:
    """Return the keys of the tenant's objects of one kind (see `object_keys.py`). Stray files are skipped."""
    return [key async for key in store.list(objects_prefix(tenant, kind)) if is_object_key(key)]


def is_segment(name: str) -> bool:
    """Return whether `name` may stand between two slashes of a key."""
    return len(name) <= _SEGMENT_LIMIT and _SEGMENT.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return `key` if it may name an object. Raises `BadKey`."""
    if not 0 < len(key) <= _KEY_LIMIT:
        raise BadKey(key, f"must have 1 to {_KEY_LIMIT} characters")
    for segment in key.split("/"):
        if not is_segment(segment):
            rule = f"each segment has 1 to {_SEGMENT_LIMIT} of A-Z, a-z, 0-9, '.', '_' and '-', without a leading dot"
            raise BadKey(key, rule)
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if keys can begin with it. The empty prefix is valid. Raises `BadKey`."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def check_range(key: str, size: int, offset: int, length: int | None) -> int:
    """Return the length of the range in an object of `size` bytes. Raises `BlobShort`."""
    wanted = max(0, size - offset) if length is None else length
    if offset < 0 or wanted < 0 or offset + wanted > size:
        raise BlobShort(key, offset, wanted)
    return wanted
