"""The HTTP side of the fake API server: paths, parameters, media types, authorization, watch streams, injected
faults.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from tests.cluster.kube_api.deletions import Deletion, delete
from tests.cluster.kube_api.garbage_collector import collect
from tests.cluster.kube_api.kinds import Kind
from tests.cluster.kube_api.object_storage import STRATEGIC, Answer, ObjectStorage
from tests.cluster.kube_api.objects import Options
from tests.cluster.kube_api.status_answers import Cause, Refused, failure, options, refused
from tests.cluster.kube_api.watches import Watch

TOKEN: Final = "the-token-of-tests"
APPLY: Final = "apply-patch+yaml"
PATH: Final = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/(?!status$|finalize$)[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?"
)
YES: Final = ("true", "1")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault for one matching request."""

    status: int = 0  # the response's status; 0 for no such fault
    delay_s: float = 0.0
    drop: bool = False  # the connection is closed before the request is handled
    lost: bool = False  # the request is handled, and the connection closed without a response
    method: str = ""  # "" matches any; "WATCH" matches a watch
    path: str = ""  # a substring of the path
    retry_after_s: int | None = None


@dataclass(slots=True)
class RecordedRequest:
    """A received request, and the status of its response (0 before it)."""

    method: str  # "WATCH" for a watch
    path: str
    query: dict[str, str]
    body: Any
    agent: str
    status: int = 0


@dataclass(slots=True, eq=False)
class _Stream:
    """An open watch."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    booked: int = 0
    cut: bool = False


@dataclass(slots=True)
class HttpFrontend:
    """Serves HTTP on one loop. `fail`, `cut`, `book` and `awake` may be called from any thread."""

    cluster: ObjectStorage
    requests: list[RecordedRequest] = field(default_factory=list)
    pace: float = 1.0  # real length of a second of a watch's timeout
    gone_as_status: bool = False
    token: str = TOKEN  # after a change, the old token gets 401
    collecting: bool = True
    faults: list[Fault] = field(default_factory=list)
    streams: set[_Stream] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop | None = None
    _collect: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, stop: asyncio.Event) -> None:
        """Run the garbage collector until `stop`."""
        self._loop = asyncio.get_running_loop()
        self.cluster.store.changed.append(self.awake)
        self._collect.set()  # for earlier changes
        collector = asyncio.create_task(self._collector())
        try:
            await stop.wait()
        finally:
            self._loop = None
            collector.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await collector

    async def _collector(self) -> None:
        while True:
            await self._collect.wait()
            self._collect.clear()
            if self.collecting:
                collect(self.cluster)

    def awake(self) -> None:
        """Wake the collector and the watches after a change."""
        self._call(self._awake)

    def _call(self, what: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(what)

    def _awake(self) -> None:
        self._collect.set()
        for each in self.streams:
            each.wake.set()

    def drop_streams(self) -> None:
        """End every watch without a last chunk."""

        def all_of_them() -> None:
            for each in self.streams:
                each.cut = True
                each.wake.set()

        self._call(all_of_them)

    def send_bookmarks(self) -> None:
        """Send a bookmark to every watch that takes bookmarks."""

        def all_of_them() -> None:
            for each in self.streams:
                each.booked += 1
                each.wake.set()

        self._call(all_of_them)

    # -- requests

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.content.read()
        watched = request.method == "GET" and request.query.get("watch") in YES
        method, agent = "WATCH" if watched else request.method, request.headers.get("User-Agent", "")
        recorded = RecordedRequest(method, request.path, dict(request.query), json.loads(raw) if raw else None, agent)
        self.requests.append(recorded)
        fault = self._fault(recorded)
        await asyncio.sleep(fault.delay_s)
        if fault.drop:
            return _hang_up(request)
        try:
            if fault.status:
                raise _failing(fault)
            response = await self._answer(request, raw, recorded)
        except Refused as error:
            response = _refusal(error)
        recorded.status = response.status
        return _hang_up(request) if fault.lost else response

    def _fault(self, recorded: RecordedRequest) -> Fault:
        with self.cluster.lock:
            for each in self.faults:
                if each.method in ("", recorded.method) and each.path in recorded.path:
                    self.faults.remove(each)
                    return each
        return Fault()

    async def _answer(self, request: web.BaseRequest, raw: bytes, recorded: RecordedRequest) -> web.StreamResponse:
        path = request.path
        with self.cluster.lock:
            found = self.cluster.kinds.discover(path)
        if found is not None:
            return web.json_response(found)
        match = PATH.fullmatch(path)
        named = match.groupdict("") if match else {}
        kind = self._kind(named) if named else None
        if kind is None or named["sub"] not in ("", "status") or (named["sub"] and not kind.has_status):
            return web.Response(status=404, text="404 page not found\n")
        _authorize(request, self.token, kind, named)
        if recorded.method == "WATCH" and not named["name"]:
            return await self._watch(request, kind, named["namespace"] or None, recorded)
        answer = self._handle(request, kind, named, raw)
        return web.json_response(answer.body, status=answer.status)

    def _kind(self, named: dict[str, str]) -> Kind | None:
        with self.cluster.lock:
            return self.cluster.kinds.find(named["group"], named["core"] or named["version"], named["plural"])

    def _handle(self, request: web.BaseRequest, kind: Kind, named: dict[str, str], raw: bytes) -> Answer:
        namespace, name, sub, query = named["namespace"], named["name"], named["sub"], dict(request.query)
        asked = Options(
            manager=query.get("fieldManager") or request.headers.get("User-Agent", "").partition("/")[0],
            force=query.get("force") in YES,
        )
        cluster = self.cluster
        match request.method, bool(name):
            case "GET", True:
                return Answer(200, cluster.get(kind, namespace, name))
            case "GET", False:
                return Answer(200, cluster.listed(kind, namespace or None, query))
            case "POST", False:
                return cluster.create(kind, namespace, json.loads(raw), asked)
            case "PUT", True:
                return cluster.update(kind, namespace, name, json.loads(raw), asked, sub=sub)
            case "PATCH", True:
                how = request.content_type.removeprefix("application/")
                allowed = ["json-patch+json", "merge-patch+json", *([] if kind.custom else [STRATEGIC]), APPLY]
                if how not in allowed:
                    listed = ", ".join(f"application/{each}" for each in allowed)
                    text = f"the body of the request was in an unknown format - accepted media types include: {listed}"
                    raise refused(415, text)
                if how != APPLY:
                    return cluster.patch(kind, namespace, name, json.loads(raw), how, asked, sub=sub)
                if not query.get("fieldManager"):
                    why = "Required value: is required for apply patch"
                    raise options("PatchOptions", Cause("fieldManager", "FieldValueRequired", why))
                return cluster.apply(kind, namespace, name, json.loads(raw), asked, sub=sub)
            case "DELETE", True:
                return delete(cluster, kind, namespace, name, _deletion(raw))
        raise refused(405, "the server does not allow this method on the requested resource")

    # -- watches

    async def _watch(
        self, request: web.BaseRequest, kind: Kind, namespace: str | None, recorded: RecordedRequest
    ) -> web.StreamResponse:
        watch = self.cluster.watch(kind, namespace, recorded.query)
        if watch.over and self.gone_as_status:
            raise Refused(410, watch.due()[0]["object"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        recorded.status = response.status
        loop = asyncio.get_running_loop()
        lasts_s = float(recorded.query.get("timeoutSeconds") or 0) * self.pace
        with self._streaming() as stream:
            await self._stream(response, watch, stream, loop.time() + lasts_s if lasts_s else None)
            if stream.cut:
                return _hang_up(request)
        await response.write_eof()
        return response

    @contextmanager
    def _streaming(self) -> Iterator[_Stream]:
        stream = _Stream()
        self.streams.add(stream)
        try:
            yield stream
        finally:
            self.streams.discard(stream)

    async def _stream(self, response: web.StreamResponse, watch: Watch, stream: _Stream, ends_at: float | None) -> None:
        """Send events as they come and bookmarks on request, until the time is over or the stream is cut."""
        booked = 0
        while True:
            stream.wake.clear()
            with self.cluster.lock:
                events = watch.due()
                if stream.booked > booked and watch.bookmarks and not watch.over:
                    events.append(watch.bookmark())
            booked = stream.booked
            if events:
                await response.write(b"".join(json.dumps(each).encode() + b"\n" for each in events))
            is_late = ends_at is not None and asyncio.get_running_loop().time() >= ends_at
            if watch.over or stream.cut or is_late:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(ends_at):
                    await stream.wake.wait()


def _authorize(request: web.BaseRequest, wanted: str, kind: Kind, named: dict[str, str]) -> None:
    said = request.headers.get("Authorization", "")
    scheme, _, token = said.partition(" ")
    if (scheme.lower(), token) == ("bearer", wanted):
        return
    if said:
        raise refused(401, "Unauthorized")
    verb = {"GET": "get" if named["name"] else "list", "POST": "create", "PUT": "update"}.get(request.method, "")
    where = f' in the namespace "{named["namespace"]}"' if named["namespace"] else " at the cluster scope"
    about = kind.named(named["name"])
    who = f'{about.resource} "{about.name}" is forbidden: User "system:anonymous" cannot'
    text = f'{who} {verb or request.method.lower()} resource "{kind.plural}" in API group "{kind.group}"{where}'
    raise refused(403, text, details=about.detailed(kind.plural))


def _failing(fault: Fault) -> Refused:
    texts = {
        429: "the server has received too many requests and has asked us to try again later",
        500: "Internal error occurred: a fault of the tests",
        503: "the server is currently unable to handle the request",
    }
    details = {} if fault.retry_after_s is None else {"retryAfterSeconds": fault.retry_after_s}
    headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    text = texts.get(fault.status, "a fault of the tests")
    return Refused(fault.status, failure(fault.status, text, details=details), headers)


def _deletion(raw: bytes) -> Deletion:
    body = json.loads(raw) if raw else {}
    conditions = body.get("preconditions") or {}
    uid, version = conditions.get("uid") or "", conditions.get("resourceVersion") or ""
    return Deletion(body.get("propagationPolicy") or "", uid, version)


def _refusal(error: Refused) -> web.Response:
    if isinstance(error.body, str):
        return web.Response(status=error.status, text=error.body)
    return web.json_response(error.body, status=error.status, headers=error.headers)


def _hang_up(request: web.BaseRequest) -> web.Response:
    """Close the connection without a response, or in the middle of one."""
    if request.transport is not None:
        request.transport.close()
    return web.Response(status=500)
