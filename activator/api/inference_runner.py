"""Run an inference request. However it ends, the client gets a response, there is a record, and limits are settled."""

import asyncio

from activator.accounting.in_flight_requests import InFlightRequests
from activator.accounting.usage_records import UsageRecords
from activator.answers.idempotency import ResponseWriter
from activator.api.inference_handler import InferenceHandler
from activator.http.exchange import ClientGone, now_us
from activator.queue.policy.wait_estimate import UNKNOWN, WaitEstimate, redact_for_caller
from activator.queue.throttler import Throttler
from activator.request.client_response import ClientResponse, log_internal_error
from activator.request.inference_request import WAITING, InferenceRequest
from activator.request.tenant_limits import TenantLimiter
from kelvin.contracts.artifacts.kind_routes import INFER_PATH
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.problem import open_inference_error, openai_error
from kelvin.contracts.serving.control_messages import StartProblem
from kelvin.contracts.traffic_errors import Cancelled, DeadlineExceeded


class InferenceRunner:
    """Runs inference requests. A stream's head is held back for up to `hold_s`."""

    def __init__(
        self,
        handler: InferenceHandler,
        throttler: Throttler,
        usage: UsageRecords,
        tenant_limiter: TenantLimiter,
        in_flight: InFlightRequests,
        hold_s: float,
    ) -> None:
        self._handler = handler
        self._throttler = throttler
        self._usage = usage
        self._tenant_limiter = tenant_limiter
        self._in_flight = in_flight
        self._hold_s = hold_s

    async def run(self, request: InferenceRequest) -> None:
        """Compute the response, whether for its caller or for an idempotency key's broadcast, and settle the limits."""
        try:
            await self.answer(request, self._handler.serve)
        finally:
            self._tenant_limiter.settle(request)
            if request.upstream is not None and request.account.is_recorded:
                request.upstream.report_recorded()

    async def answer(self, request: InferenceRequest, write_response: ResponseWriter) -> None:
        """Answer by `write_response`. However that ends, the client gets a response and there is a record."""
        exchange, account = request.exchange, request.account
        error_form = open_inference_error if request.path == INFER_PATH else openai_error

        def wait_estimate() -> WaitEstimate:
            if request.key is None or request.queued_request is None or request.stage not in WAITING:
                return UNKNOWN
            return self._throttler.estimate_queued_wait(request.key, request.queued_request, request.deadline)

        client_response = ClientResponse(
            exchange, account, self._usage, self._hold_s, lambda: request.stage, error_form, wait_estimate
        )
        entry = self._in_flight.add(account, exchange.client_request_id)
        try:
            with exchange.cancel_on_disconnect(request.remaining_s()) as task, entry.bind_task(task):
                await write_response(request, client_response)
        except Refused as refused:
            _record_start_problem(request, wait_estimate())
            await client_response.fail(refused.failure)
        except TimeoutError:
            waited_s = (now_us() - exchange.arrived_us) / 1e6
            problem = _record_start_problem(request, wait_estimate())
            message = "" if problem is None else problem.message
            await client_response.fail(DeadlineExceeded(waited_s, request.stage, message))
        except ClientGone:
            await client_response.settle_disconnected(Cancelled())
        except asyncio.CancelledError:  # the drain is over; the remaining work is bounded and must be done
            if (current := asyncio.current_task()) is not None:
                current.uncancel()
            await client_response.fail(Unavailable("this activator"))
        except Exception as error:
            await client_response.fail(log_internal_error(error, exchange.request_id))
        finally:
            self._in_flight.remove(entry)


def _record_start_problem(request: InferenceRequest, estimate: WaitEstimate) -> StartProblem | None:
    """Record for the timeline why no replica started, as far as the caller may read it."""
    if estimate.problem is not None and request.key is not None:
        is_owner = request.account.principal.tenant == request.key.tenant
        request.account.start_problem = redact_for_caller(estimate.problem, is_owner)
    return request.account.start_problem
