"""Answer lookups that need no replica: the model list, a request's timeline, and cancelling a request."""

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from activator import dependencies
from activator.accounting.in_flight_requests import InFlightRequests
from activator.accounting.timelines import Timelines
from activator.auth.authenticator import Authenticator
from activator.http.exchange import Exchange
from activator.limits.concurrency_limits import Permit, SharedCapacity
from activator.routing.policy.version_resolution import ModelEntry, resolve_version
from activator.routing.request_routes import CancelRequest, ListModels, ShowTimeline, Target
from activator.routing.routing_table import RoutingTable, authorize_model
from kelvin.contracts.errors import NotFound, Refused, Unavailable
from kelvin.contracts.names import parse_address
from kelvin.contracts.serving.control_messages import Principal, Scope, TimelineAnswer
from kelvin.contracts.wire import encode
from kelvin.ipc.service_client import ServiceClient

TIMEOUT_S = dependencies.TIMELINES.timeout_s
CALLS_OF_TENANT: Final = 64  # concurrent calls of the control plane per tenant
LIST_CACHE_SIZE: Final = 16  # cached lists: encoding thousands of models takes long
_JSON = b"application/json"


class _Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    owned_by: str
    object: str = "model"


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]
    object: str = "list"


class LookupRoutes:
    """Serves `/v1/models`, `/v1/models/M`, `/v1/requests/ID/timeline` and `/v1/requests/ID`."""

    def __init__(
        self,
        authenticator: Authenticator,
        table: RoutingTable,
        timelines: Timelines,
        control: ServiceClient,
        in_flight: InFlightRequests,
        unread: SharedCapacity,
    ) -> None:
        """`control` must have no connection limit: a tenant's calls must not hold up others. `unread` limits unread
        bodies.
        """
        self._authenticator = authenticator
        self._table = table
        self._timelines = timelines
        self._control = control
        self._in_flight = in_flight
        self._unread = unread
        self._running_calls: dict[str, int] = {}  # running calls of the control plane, by tenant
        # by tenant: models, encoded list
        self._list_cache: dict[str, tuple[tuple[ModelEntry, ...], bytes]] = {}

    async def send_models(self, exchange: Exchange, request_route: ListModels) -> None:
        """Send the models that the caller may call, or one of them."""
        caller = await self._authenticator.authenticate(exchange, Scope.INFER)
        name = request_route.model or request_route.target.model
        if name is None:
            body = self._list(caller)
        else:
            reference = parse_address(name)
            entry = authorize_model(self._table, caller, request_route.target.tenant, reference)
            resolve_version(reference, entry)
            found = _model(entry, name)
            body = encode(found if request_route.model is not None else _Models((found,)))
        await self._respond(exchange, caller, body)

    def _list(self, caller: Principal) -> bytes:
        entries = self._table.models(caller.tenant)
        if caller.models:  # the key is limited to some models
            return _encode_list(caller, entries)
        cached = self._list_cache.pop(caller.tenant, None)
        if cached is None or cached[0] is not entries:
            cached = entries, _encode_list(caller, entries)
        self._list_cache[caller.tenant] = cached
        if len(self._list_cache) > LIST_CACHE_SIZE:
            del self._list_cache[next(iter(self._list_cache))]  # least recently used
        return cached[1]

    async def send_timeline(self, exchange: Exchange, request_route: ShowTimeline) -> None:
        """Send the timeline of a request of the caller's tenant. Older ones come from the control plane."""
        caller = await self._caller(exchange, request_route.target)
        await self._respond(exchange, caller, encode(await self._find_timeline(caller, request_route.request_id)))

    async def cancel_request(self, exchange: Exchange, request_route: CancelRequest) -> None:
        """Cancel a request. Send 204 once it has ended, also if it had ended before; 202 if that takes too long."""
        caller = await self._caller(exchange, request_route.target)
        await exchange.read_body(0, TIMEOUT_S, self._unread, caller.tenant)
        entries = self._in_flight.cancel(caller, request_route.name)
        if entries is None:
            await self._find_timeline(caller, request_route.name)
        over = await asyncio.gather(*[entry.wait_ended(TIMEOUT_S) for entry in entries or ()])
        await exchange.start(204 if all(over) else 202, [] if all(over) else [(b"content-length", b"0")])
        await exchange.finish(b"")

    async def _find_timeline(self, caller: Principal, request_id: str) -> TimelineAnswer:
        timeline = self._timelines.find(caller.tenant, request_id)
        if timeline is None:
            with Permit(self._running_calls, caller.tenant, CALLS_OF_TENANT):
                timeline = await self._fetch_timeline(caller.tenant, request_id)
        if not caller.may_call(timeline.model):
            raise Refused(NotFound("request", request_id))
        return timeline

    async def _fetch_timeline(self, tenant: str, request_id: str) -> TimelineAnswer:
        """Fetch a timeline from the control plane. Raises Refused(Unavailable | NotFound)."""
        path = f"/internal/v1/requests/{request_id}/timeline?tenant={tenant}"
        try:
            return await self._control.call("GET", path, TimelineAnswer, timeout_s=TIMEOUT_S)
        except Refused as refused:
            if refused.failure.code == Unavailable.code:
                raise
            raise Refused(NotFound("request", request_id)) from refused

    async def _respond(self, exchange: Exchange, caller: Principal, body: bytes) -> None:
        await exchange.read_body(0, TIMEOUT_S, self._unread, caller.tenant)
        await exchange.respond(200, _JSON, body)

    async def _caller(self, exchange: Exchange, target: Target) -> Principal:
        """Return the caller. If the URL names another tenant, it must name a model granted to the caller's tenant."""
        caller = await self._authenticator.authenticate(exchange, Scope.INFER)
        if target.tenant not in (None, caller.tenant):
            authorize_model(self._table, caller, target.tenant, parse_address(target.model or ""))
        return caller


def _encode_list(caller: Principal, entries: Iterable[ModelEntry]) -> bytes:
    named_entries = ((entry, entry.name_for(caller.tenant)) for entry in entries)
    return encode(_Models(tuple(_model(entry, name) for entry, name in named_entries if caller.may_call(name))))


def _model(entry: ModelEntry, name: str) -> _Model:
    return _Model(name, entry.created_at_s, entry.tenant)
