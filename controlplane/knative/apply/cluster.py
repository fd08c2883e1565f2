"""What is asked of a cluster, without the library that asks it: policy and loops need no server to be tested.

`client` is the implementation; what is refused is one of the closed set below, carried by `ClusterError`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

from controlplane.knative.policy.object_labels import NamespacedName

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """The name of an object. `namespace` is None for what has none."""

    api_version: str
    kind: str
    namespace: str | None
    name: str

    @classmethod
    def of(cls, obj: Json) -> "Ref":
        """Of a whole object, or of its head. Raises KeyError where it has no kind or name."""
        about = obj["metadata"]
        return cls(obj["apiVersion"], obj["kind"], about.get("namespace") or None, about["name"])

    @property
    def place(self) -> NamespacedName:
        """Its namespace, empty if it has none, and its name."""
        return self.namespace or "", self.name

    @property
    def path(self) -> str:
        """The path of the object at an API server."""
        return f"{collection_path(self.api_version, self.kind, self.namespace)}/{quote(self.name, safe='')}"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.namespace is None else f"{self.kind} {self.namespace}/{self.name}"


def collection_path(api_version: str, kind: str, namespace: str | None) -> str:
    """Return the path of all objects of a kind, of one namespace if it is given. Right for the kinds used here."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    where = "" if namespace is None else f"/namespaces/{quote(namespace, safe='')}"
    name = kind.lower()
    return f"{root}{where}/{f'{name[:-1]}ies' if name.endswith('y') else f'{name}s'}"


def timestamp(wall_s: int) -> str:
    """Return a Unix time as Kubernetes writes it."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Synced:
    """All that there is, as of a version: a watch's first change, and again after each time that it missed some."""

    objects: tuple[Json, ...]
    version: str = ""


@dataclass(frozen=True, slots=True)
class Upsert:
    """It is new or has changed."""

    obj: Json


@dataclass(frozen=True, slots=True)
class Deleted:
    """It is deleted, or no longer bears the labels asked for. `uid` is that of the object that went, and
    `version` that of its end.
    """

    ref: Ref
    uid: str = ""
    version: str = ""


Change = Synced | Upsert | Deleted


@dataclass(frozen=True, slots=True)
class ApiFailure:
    """Base of the closed set: why a call came to nothing. `message` is the cluster's own, cut to what a line holds."""

    message: str
    reason: ClassVar[str]  # one word, for statuses and metrics

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class Unreachable(ApiFailure):
    """No answer within its time, or one that says nothing: a server that is away, starts, or breaks."""

    reason = "Unreachable"


@dataclass(frozen=True, slots=True)
class Busy(ApiFailure):
    """It asks to be left alone for a while (429, or a `Retry-After`)."""

    retry_after_s: float = 1.0
    reason = "Busy"


class Denied(ApiFailure):
    """Not known there, or not allowed to do this (401, 403)."""

    reason = "Denied"


class Missing(ApiFailure):
    """The object, its namespace or its kind is not there (404)."""

    reason = "Missing"


class Conflict(ApiFailure):
    """Somebody wrote in between, it exists already, or its uid is another one (409)."""

    reason = "Conflict"


class FieldConflict(Conflict):
    """Others own fields that an apply without force would change (409). The message names them and the fields."""


class Invalid(ApiFailure):
    """It takes no such object: its schema, a webhook or its size forbids it (400, 413, 422; 500 of an apply)."""

    reason = "Invalid"


class Expired(ApiFailure):
    """What was asked from is too long ago (410): a watch begins again with all there is."""

    reason = "Expired"


class ClusterError(Exception):
    """Carries a `ApiFailure`."""

    def __init__(self, api_failure: ApiFailure) -> None:
        super().__init__(api_failure)
        self.api_failure = api_failure

    def __str__(self) -> str:
        return str(self.api_failure)


@asynccontextmanager
async def api_timeout(seconds: float) -> AsyncIterator[None]:
    """Cut the block off after that long. Raises ClusterError(Unreachable) then."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ClusterError(Unreachable(f"no answer within {seconds:g} s")) from None


class ClusterApi(Protocol):
    """A cluster. Each call ends within the time of its row in `dependencies`, and is safe to cancel."""

    async def apply(self, obj: Json) -> Json:
        """Server-side apply as `MANAGER`. Return the object as it is now. Idempotent. Raises ClusterError.

        Fields that we name become ours: if others own some with other values, the log says which, and they are forced.
        """
        ...

    async def apply_status(self, obj: Json) -> Json:
        """As `apply`, for the status subresource: only metadata and status of `obj` count. Raises ClusterError."""
        ...

    async def delete(self, ref: Ref, *, uid: str | None = None) -> None:
        """Delete in the foreground: the object stays visible until what it owns is gone. A missing object is fine.

        With a uid, only that very object: Conflict if another has its name. Raises ClusterError.
        """
        ...

    def watch(self, api_version: str, kind: str, *, labels: str = "") -> AsyncGenerator[Change, None]:
        """For ever, in all namespaces: `Synced` first and after every gap, then each change in order. Never raises for
        the cluster's sake. Closing it (`contextlib.aclosing`) ends the connection.
        """
        ...

    async def exists(self, ref: Ref) -> bool:
        """Return whether there is an object of that name. Its contents are not read. Raises ClusterError."""
        ...

    async def record(self, about: Json, reason: str, message: str, *, warning: bool) -> None:
        """An Event about an object. The same one again within minutes raises its count. Never raises ClusterError."""
        ...
