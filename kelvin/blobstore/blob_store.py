"""The one protocol of object stores: bytes by key, written once, never changed. What the bytes mean is the callers'.

Keys are `a/b/c`; an object is visible whole or not at all. Errors are those below; any other is a defect of the store.
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
    """The store did not answer, or not in time; the same call may succeed later."""

    def __init__(self, reason: str) -> None:
        super().__init__(Unavailable("the object store"))
        self.reason = reason
        self.add_note(reason)


class StoreFull(Refused):
    """The store has no room for the object. Waiting makes none, so no call is tried again."""

    def __init__(self) -> None:
        super().__init__(CapacityExceeded("bytes in the object store", 1, 0))
        self.reason = "the object store is full"


class BlobShort(Refused):
    """The object ends before the range does: nothing is returned rather than less."""

    def __init__(self, key: str, offset: int, length: int) -> None:
        super().__init__(InvalidRequest("range", f"{offset}+{length}", f"the object '{key}' ends before it does"))


class BlobCorrupt(Refused):
    """The bytes of a pack, a manifest or a draft do not match the digest that is its name."""


class BadKey(Refused):
    """The key or prefix breaks a rule."""

    def __init__(self, key: str, rule: str) -> None:
        super().__init__(InvalidRequest("key", repr(key[:80]), rule))


@dataclass(frozen=True, slots=True)
class BlobStat:
    """What is known of an object without reading it. `modified_s` is when it was put, by the store's wall clock."""

    size: int
    modified_s: float


class BlobStore(Protocol):
    """Safe to call from many tasks. Each call may be cancelled; each may raise `BadKey` and `BlobUnavailable`."""

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        """True where this call made the object, False where it was there; durable and whole in both cases.

        Of several at once exactly one gets True. Where the key exists, an iterator may be left unread; where the
        iterator raises, nothing becomes visible. A key must not be a parent of another; a store may refuse it.
        Raises `Refused(CapacityExceeded)` where the store takes no object of that size, or is full (`StoreFull`).
        """

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Exactly `length` bytes from `offset`, or all to the end. Raises `BlobNotFound`, `BlobShort`."""

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        """Fill all of `into` (writable bytes). Raises as `read`, the content of `into` then being undefined.

        When this returns, raises or is cancelled, nothing writes to `into` any more.
        """

    async def stat(self, key: str) -> BlobStat:
        """Raises `BlobNotFound`."""

    def list(self, prefix: str) -> AsyncIterator[str]:
        """Keys that begin with `prefix`, ascending by code point; a put or delete meanwhile may or may not show."""

    async def delete(self, key: str) -> None:
        """Gone when this returns; it may never have been there."""


async def list_objects(store: BlobStore, tenant: str, kind: str) -> list[str]:
    """Return the keys of the tenant's objects of one kind (see `kelvin/contracts/artifacts/object_keys.py`).
    Stray files are passed over.
    """
    return [key async for key in store.list(objects_prefix(tenant, kind)) if is_object_key(key)]


def is_segment(name: str) -> bool:
    """Whether `name` may stand between two slashes of a key."""
    return len(name) <= _SEGMENT_LIMIT and _SEGMENT.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return `key` where it may name an object. Raises `BadKey`."""
    if not 0 < len(key) <= _KEY_LIMIT:
        raise BadKey(key, f"must have 1 to {_KEY_LIMIT} characters")
    for segment in key.split("/"):
        if not is_segment(segment):
            rule = f"each segment has 1 to {_SEGMENT_LIMIT} of A-Z, a-z, 0-9, '.', '_' and '-', without a leading dot"
            raise BadKey(key, rule)
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` where keys can begin with it; the empty one does for all. Raises `BadKey`."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def check_range(key: str, size: int, offset: int, length: int | None) -> int:
    """The length of the range within an object of `size` bytes. Raises `BlobShort`."""
    wanted = max(0, size - offset) if length is None else length
    if offset < 0 or wanted < 0 or offset + wanted > size:
        raise BlobShort(key, offset, wanted)
    return wanted
