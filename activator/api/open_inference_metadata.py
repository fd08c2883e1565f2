"""Answer the Open Inference Protocol's requests that need no replica: metadata, health and readiness. None of them
wakes a model. Predictions begin in `completions.py`.
"""

import importlib.metadata
from typing import Final

from activator.auth.authenticator import Authenticator
from activator.http.exchange import Exchange
from activator.limits.concurrency_limits import SharedCapacity
from activator.routing.policy.version_resolution import ModelEntry, merge_references, resolve_version
from activator.routing.request_routes import ShowPredictor, ShowServer, Target
from activator.routing.routing_table import RoutingTable, authorize_model
from kelvin.contracts.artifacts.kind_routes import wrong_kind_failure
from kelvin.contracts.errors import Refused
from kelvin.contracts.names import ModelReference, parse_reference
from kelvin.contracts.serving.control_messages import Principal, Scope, VersionRow
from kelvin.contracts.wire import encode

BODY_S: Final = 5.0
NAME: Final = "kelvin"
PLATFORM: Final = "onnxruntime_onnx"
_JSON: Final = b"application/json"


class OpenInferenceMetadata:
    """Serves `/v2`, `/v2/health/…` and `/v2/models/M…`, except `infer`."""

    def __init__(self, authenticator: Authenticator, table: RoutingTable, unread: SharedCapacity) -> None:
        """`unread` has a place for each request that waits for its body."""
        self._authenticator = authenticator
        self._table = table
        self._unread = unread
        self._version = importlib.metadata.version("kelvin-serving")

    async def send_server(self, exchange: Exchange, request_route: ShowServer) -> None:
        """Send the server's metadata, or that it is healthy. It is always healthy here: authentication fails if this
        activator has no feed. Raises Refused, also if the path names a model that the caller may not use.
        """
        principal = await self._authenticator.authenticate(exchange, Scope.INFER)
        if request_route.target.model is not None:
            self._find(principal, request_route.target, parse_reference(request_route.target.model))
        if request_route.health is None:
            await self._respond(exchange, principal, {"name": NAME, "version": self._version, "extensions": ()})
        else:
            await self._respond(exchange, principal, {request_route.health: True})

    async def send_model(self, exchange: Exchange, request_route: ShowPredictor) -> None:
        """Send what a version takes and returns, or that it is ready: requests wake every version. Raises Refused."""
        principal = await self._authenticator.authenticate(exchange, Scope.INFER)
        reference = merge_references(request_route.target.model, request_route.model_name)
        entry, row = self._find(principal, request_route.target, reference)
        if row.signature is None:
            raise Refused(wrong_kind_failure(reference.model, row.kind))
        if request_route.ready:
            await self._respond(exchange, principal, {"name": entry.model, "ready": True})
            return
        signature = row.signature
        await self._respond(
            exchange,
            principal,
            {
                "name": entry.model,
                "versions": [each.version for each in entry.versions],
                "platform": PLATFORM,
                "inputs": [spec.described() for spec in signature.inputs],
                "outputs": [spec.described() for spec in signature.outputs],
                "properties": {"version": row.version, "schema_hash": signature.schema_hash},
            },
        )

    def _find(self, principal: Principal, target: Target, reference: ModelReference) -> tuple[ModelEntry, VersionRow]:
        """Return a model and its version. Another tenant's model without a grant counts as missing. Raises Refused."""
        entry = authorize_model(self._table, principal, target.tenant, reference)
        return entry, resolve_version(reference, entry)

    async def _respond(self, exchange: Exchange, caller: Principal, content: dict[str, object]) -> None:
        await exchange.read_body(0, BODY_S, self._unread, caller.tenant)
        await exchange.respond(200, _JSON, encode(content))
