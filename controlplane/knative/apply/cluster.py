"""Interface to a cluster, without the library that implements it, so that policy and loops are tested without a server.

`kubernetes_client.py` implements it. A call fails with a `ClusterError`, which carries one of the failures below.
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
    """The name of an object. `namespace` is None for a kind without namespaces."""

    api_version: str
    kind: str
    namespace: str | None
    name: str

    @classmethod
    def of(cls, obj: Json) -> "Ref":
        """Return the name of an object, or of its metadata. Raises KeyError if it has no kind or name."""
        metadata = obj["metadata"]
        return cls(obj["apiVersion"], obj["kind"], metadata.get("namespace") or None, metadata["name"])

    @property
    def namespaced_name(self) -> NamespacedName:
        """Return its namespace (empty if it has none) and its name."""
        return self.namespace or "", self.name

    @property
    def path(self) -> str:
        """Return the path of the object at an API server."""
        return f"{collection_path(self.api_version, self.kind, self.namespace)}/{quote(self.name, safe='')}"

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.namespace is None else f"{self.kind} {self.namespace}/{self.name}"


def collection_path(api_version: str, kind: str, namespace: str | None) -> str:
    """Return the path of a kind's objects, in one namespace or in all. The plural is right for the kinds used here."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    namespace_path = "" if namespace is None else f"/namespaces/{quote(namespace, safe='')}"
    name = kind.lower()
    return f"{root}{namespace_path}/{f'{name[:-1]}ies' if name.endswith('y') else f'{name}s'}"


def timestamp(wall_s: int) -> str:
    """Return a Unix time as Kubernetes writes it."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Synced:
    """All existing objects, as of a version. A watch sends it first, and again after each gap."""

    objects: tuple[Json, ...]
    version: str = ""


@dataclass(frozen=True, slots=True)
class Upsert:
    """The object is new or has changed."""

    obj: Json


@dataclass(frozen=True, slots=True)
class Deleted:
    """The object is deleted, or no longer has the selected labels. `uid` is the uid of the deleted object, and
    `version` the version of its deletion.
    """

    ref: Ref
    uid: str = ""
    version: str = ""


Change = Synced | Upsert | Deleted


@dataclass(frozen=True, slots=True)
class ApiFailure:
    """Why a call failed; base class of the closed set below. `message` is the cluster's own, cut to one line."""

    message: str
    reason: ClassVar[str]  # one word, for statuses and metrics

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class Unreachable(ApiFailure):
    """There was no answer in time, or no useful one: the server is down, starts or breaks."""

    reason = "Unreachable"


@dataclass(frozen=True, slots=True)
class Busy(ApiFailure):
    """The server asks to be left alone for a while (429, or a `Retry-After`)."""

    retry_after_s: float = 1.0
    reason = "Busy"


class Denied(ApiFailure):
    """This process is not authenticated, or not allowed to do this (401, 403)."""

    reason = "Denied"


class Missing(ApiFailure):
    """The object, its namespace or its kind does not exist (404)."""

    reason = "Missing"


class WriteConflict(ApiFailure):
    """The object was written in between, exists already, or has another uid (409)."""

    reason = "Conflict"


class FieldConflict(WriteConflict):
    """Other managers own fields that an apply without force would change (409). The message names both."""


class Invalid(ApiFailure):
    """The schema, a webhook or a size limit rejects the object (400, 413, 422; 500 of an apply)."""

    reason = "Invalid"


class Expired(ApiFailure):
    """The requested version is too old (410): the watch must list all objects again."""

    reason = "Expired"


class ClusterError(Exception):
    """Exception of a failed call. Carries an `ApiFailure`."""

    def __init__(self, api_failure: ApiFailure) -> None:
        super().__init__(api_failure)
        self.api_failure = api_failure

    def __str__(self) -> str:
        return str(self.api_failure)


@asynccontextmanager
async def api_timeout(seconds: float) -> AsyncIterator[None]:
    """Cancel the block after that many seconds, and raise ClusterError(Unreachable)."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ClusterError(Unreachable(f"no answer within {seconds:g} s")) from None


class ClusterApi(Protocol):
    """A cluster. Each call ends within the time of its row in `dependencies.py`, and is safe to cancel."""

    async def apply(self, obj: Json) -> Json:
        """Apply server-side as `MANAGER`. Return the object as it is now. Idempotent. Raises ClusterError.

        Kelvin becomes the owner of all fields in `obj`. Other managers' values of them are logged and overwritten.
        """
        ...

    async def apply_status(self, obj: Json) -> Json:
        """Apply the status subresource, as `apply`: only metadata and status of `obj` count. Raises ClusterError."""
        ...

    async def delete(self, ref: Ref, *, uid: str | None = None) -> None:
        """Delete in the foreground: the object stays visible until its dependents are gone. A missing object is fine.

        With `uid`, delete only that object: WriteConflict if another one has its name. Raises ClusterError.
        """
        ...

    def watch(self, api_version: str, kind: str, *, labels: str = "") -> AsyncGenerator[Change, None]:
        """Watch all namespaces forever: `Synced` first and after every gap, then each change in order. Never raises
        ClusterError. Close it with `contextlib.aclosing` to end the connection.
        """
        ...

    async def exists(self, ref: Ref) -> bool:
        """Return whether an object of that name exists. Its contents are not read. Raises ClusterError."""
        ...

    async def record(self, about: Json, reason: str, message: str, *, warning: bool) -> None:
        """Write an Event about an object. A repetition within minutes raises its count. Never raises ClusterError."""
        ...
