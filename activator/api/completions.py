"""Admit an inference request: its key, its tenant's limits, its body, and its idempotency key. A request without a
callable model leaves no record. `inference_runner.py` answers what is admitted.
"""

from activator.answers.idempotency import Idempotency
from activator.answers.idempotency_policy import IDEMPOTENCY_HEADER
from activator.api.inference_runner import InferenceRunner
from activator.auth.authenticator import Authenticator
from activator.http.exchange import Exchange, RequestLimits
from activator.limits.concurrency_limits import SharedCapacity
from activator.request.inference_request import parse_inference_request
from activator.request.tenant_limits import TenantLimiter
from activator.routing.request_routes import RunInference
from activator.routing.routing_table import RoutingTable
from kelvin.contracts.serving.control_messages import Scope


class Completions:
    """Serves completions, chats, embeddings and predictions."""

    def __init__(
        self,
        authenticator: Authenticator,
        table: RoutingTable,
        tenant_limiter: TenantLimiter,
        limits: RequestLimits,
        unread: SharedCapacity,
        idempotency: Idempotency,
        runner: InferenceRunner,
    ) -> None:
        """`unread` has a place for each request that waits for its body."""
        self._authenticator = authenticator
        self._table = table
        self._tenant_limiter = tenant_limiter
        self._limits = limits
        self._unread = unread
        self._idempotency = idempotency
        self._runner = runner
        self._body_capacity = SharedCapacity(limits.body_bytes_in_all, "the room for request bodies", "bytes")

    async def serve(self, exchange: Exchange, request_route: RunInference) -> None:
        """Answer the request. Raises Refused without a record for bad credentials, a limit of the tenant or of this
        activator, a bad body, an unknown model or a malformed idempotency key.
        """
        principal = await self._authenticator.authenticate(exchange, Scope.INFER)
        tenant_limits = self._table.limits(principal.tenant)
        body_bytes = self._limits.body_bytes if tenant_limits.body_bytes is None else tenant_limits.body_bytes
        permit = await self._tenant_limiter.acquire_permit(principal.tenant, tenant_limits)
        with permit, self._body_capacity.hold(principal.tenant, exchange.body_bound(body_bytes)) as body_permit:
            await self._tenant_limiter.check_on_arrival(exchange, principal.tenant, tenant_limits)
            raw = await exchange.read_body(body_bytes, self._limits.body_s, self._unread, principal.tenant)
            body_permit.shrink(len(raw))
            request = parse_inference_request(
                exchange, request_route, raw, principal, tenant_limits, self._table, self._limits.deadline_s
            )
            if exchange.header(IDEMPOTENCY_HEADER) is None:
                await self._runner.run(request)
            else:
                await self._idempotency.serve(request, self._runner.run, self._runner.answer)
