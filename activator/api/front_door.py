"""The ASGI application: route each request to its handler, and render refusals."""

import asyncio
import logging
from collections.abc import Awaitable
from functools import lru_cache
from typing import Final

from starlette.types import Receive, Scope, Send

from activator.accounting.metrics import RequestMetrics
from activator.api.completions import Completions
from activator.api.lookup_routes import LookupRoutes
from activator.api.open_inference_metadata import OpenInferenceMetadata
from activator.api.passthrough import Passthrough
from activator.auth.firewall import Firewall
from activator.http.client_connection import EXTENSION
from activator.http.error_response import render_error
from activator.http.exchange import ClientGone, Connection, Exchange, RequestLimits
from activator.request.client_response import log_internal_error
from activator.routing.request_routes import (
    CancelRequest,
    ListModels,
    NoRoute,
    PassthroughRoute,
    RequestRoute,
    RunInference,
    ShowPredictor,
    ShowServer,
    ShowTimeline,
    parse_host,
    route,
)
from kelvin.contracts.errors import Failure, Refused, Unavailable
from kelvin.contracts.trace_context import outgoing_trace_context
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.process.request_context import set_request_context

log = logging.getLogger(__name__)

ROUTE_CACHE_SIZE: Final = 512  # cached routes: callers use the same few
CACHEABLE_BYTES: Final = 256  # longest path and host to cache, so that strangers can't fill the memory


class FrontDoorApp:
    """Receives every public request."""

    def __init__(
        self,
        completions: Completions,
        lookup_routes: LookupRoutes,
        passthrough: Passthrough,
        open_inference: OpenInferenceMetadata,
        domain: str,
        limits: RequestLimits,
        metrics: RequestMetrics,
        firewall: Firewall | None = None,
    ) -> None:
        self._completions = completions
        self._lookup_routes = lookup_routes
        self._passthrough = passthrough
        self._open_inference = open_inference
        self._domain = domain
        self._cached_route = lru_cache(ROUTE_CACHE_SIZE)(route)
        self._limits = limits
        self._metrics = metrics
        self._firewall = firewall
        self.running_requests = 0

    def __repr__(self) -> str:
        return f"<FrontDoorApp running={self.running_requests}/{self._limits.requests}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["extensions"][EXTENSION]
        exchange = Exchange(scope, receive, send, connection, self._limits.stall_s)
        set_request_context(exchange.request_id, outgoing_trace_context(exchange.caller_trace, exchange.request_id))
        self.running_requests += 1
        try:
            request_route = self._route_of(exchange)
            if self._firewall is not None:
                await self._firewall.check(exchange)
            await self._dispatch(exchange, request_route)
        except Refused as refused:
            await self._refuse(exchange, refused.failure)
        except ClientGone:
            connection.abort()
        except asyncio.CancelledError:  # the drain is over
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            await self._refuse(exchange, Unavailable("this activator"))
        except Exception as error:
            await self._refuse(exchange, log_internal_error(error, exchange.request_id))
        finally:
            self.running_requests -= 1

    def _route_of(self, exchange: Exchange) -> RequestRoute:
        host = parse_host(exchange.hosts)
        if isinstance(host, Failure):
            raise Refused(host)
        exchange.check_headers()
        if self.running_requests > self._limits.requests:
            raise Refused(Overloaded("this activator", self._limits.requests, 1.0, "requests"))
        is_short = len(exchange.path) + len(host) <= CACHEABLE_BYTES
        return (self._cached_route if is_short else route)(exchange.method, exchange.path, host, self._domain)

    def _dispatch(self, exchange: Exchange, request_route: RequestRoute) -> Awaitable[None]:
        match request_route:
            case RunInference():
                return self._completions.serve(exchange, request_route)
            case ListModels():
                return self._lookup_routes.send_models(exchange, request_route)
            case ShowTimeline():
                return self._lookup_routes.send_timeline(exchange, request_route)
            case CancelRequest():
                return self._lookup_routes.cancel_request(exchange, request_route)
            case ShowServer():
                return self._open_inference.send_server(exchange, request_route)
            case ShowPredictor():
                return self._open_inference.send_model(exchange, request_route)
            case PassthroughRoute(service):
                return self._passthrough.serve(exchange, service)
            case NoRoute(failure):
                raise Refused(failure)

    async def _refuse(self, exchange: Exchange, failure: Failure) -> None:
        """Count a request that left no record. Answer it, unless a response has begun."""
        self._metrics.count_refusal(failure)
        if exchange.has_started:
            exchange.connection.abort()
            return
        status, kind, body, headers = render_error(failure, exchange.path, exchange.request_id)
        await exchange.respond(status, kind, body, headers)
