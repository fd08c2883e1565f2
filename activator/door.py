"""The ASGI application behind the edge: finds out what is asked, lets it be served, and renders what was refused."""

import asyncio
import logging
from collections.abc import Awaitable
from functools import lru_cache
from typing import Final

from starlette.types import Receive, Scope, Send

from activator.answer import internal
from activator.completions import Completions
from activator.edge_connection import EXTENSION
from activator.exchange import ClientGone, Connection, Exchange, RequestLimits
from activator.firewall import Firewall
from activator.lists import Lists
from activator.meters import Meters
from activator.open_inference import OpenInference
from activator.passthrough import Passthrough
from activator.refusal import rendered
from activator.routes import (
    Asked,
    CancelRequest,
    Complete,
    Inward,
    ListModels,
    ShowPredictor,
    ShowServer,
    ShowTimeline,
    Wrong,
    host_of,
    route,
)
from contracts.errors import Failure, Refused, Unavailable
from contracts.trace import within
from contracts.traffic_errors import Overloaded
from service.cause import begin

log = logging.getLogger(__name__)

KEPT: Final = 512  # routes: callers ask for the same few
SHORT: Final = 256  # bytes of path and host: what is kept is bounded, whatever strangers send


class Door:
    """Every request enters here."""

    def __init__(
        self,
        completions: Completions,
        lists: Lists,
        passthrough: Passthrough,
        open_inference: OpenInference,
        domain: str,
        limits: RequestLimits,
        meters: Meters,
        firewall: Firewall | None = None,
    ) -> None:
        self._completions = completions
        self._lists = lists
        self._passthrough = passthrough
        self._open_inference = open_inference
        self._domain = domain
        self._known_route = lru_cache(KEPT)(route)
        self._limits = limits
        self._meters = meters
        self._firewall = firewall
        self.inside = 0

    def __repr__(self) -> str:
        return f"<Door inside={self.inside}/{self._limits.requests}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["extensions"][EXTENSION]
        exchange = Exchange(scope, receive, send, connection, self._limits.stall_s)
        begin(exchange.request_id, within(exchange.caller, exchange.request_id))
        self.inside += 1
        try:
            asked = self._asked(exchange)
            if self._firewall is not None:
                await self._firewall.check(exchange)
            await self._serve(exchange, asked)
        except Refused as refused:
            await self._refuse(exchange, refused.failure)
        except ClientGone:
            connection.abort()
        except asyncio.CancelledError:  # the drain's time is over
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            await self._refuse(exchange, Unavailable("this activator"))
        except Exception as error:
            await self._refuse(exchange, internal(error, exchange.request_id))
        finally:
            self.inside -= 1

    def _asked(self, exchange: Exchange) -> Asked:
        host = host_of(exchange.hosts)
        if isinstance(host, Failure):
            raise Refused(host)
        exchange.check_headers()
        if self.inside > self._limits.requests:
            raise Refused(Overloaded("this activator", self._limits.requests, 1.0, "requests"))
        is_short = len(exchange.path) + len(host) <= SHORT
        return (self._known_route if is_short else route)(exchange.method, exchange.path, host, self._domain)

    def _serve(self, exchange: Exchange, asked: Asked) -> Awaitable[None]:
        match asked:
            case Complete():
                return self._completions.serve(exchange, asked)
            case ListModels():
                return self._lists.models(exchange, asked)
            case ShowTimeline():
                return self._lists.timeline(exchange, asked)
            case CancelRequest():
                return self._lists.cancel(exchange, asked)
            case ShowServer():
                return self._open_inference.server(exchange, asked)
            case ShowPredictor():
                return self._open_inference.model(exchange, asked)
            case Inward(service):
                return self._passthrough.serve(exchange, service)
            case Wrong(failure):
                raise Refused(failure)

    async def _refuse(self, exchange: Exchange, failure: Failure) -> None:
        """Count a request that left no record. Answer it, unless an answer has begun."""
        self._meters.refused(failure)
        if exchange.started:
            exchange.connection.abort()
            return
        status, kind, body, headers = rendered(failure, exchange.path, exchange.request_id)
        await exchange.respond(status, kind, body, headers)
