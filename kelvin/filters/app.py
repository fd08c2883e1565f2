"""The composition root of the filter process. The process is stateless: each request has all undecided text."""

import asyncio
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Final

from fastapi import FastAPI, Request, Response

from kelvin.contracts.artifacts.filter_api import (
    CHECK_PATH,
    DEADLINE_HEADER,
    ENTITIES,
    FILTERS_SOCKET,
    TENANT_HEADER,
    Direction,
    FilterRequest,
    FilterResponse,
    TextResult,
)
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.numbers import parse_whole_number
from kelvin.filters.pii import unknown_region
from kelvin.filters.scanner import Scanner
from kelvin.filters.settings import FilterSettings
from kelvin.ipc.failure_responses import install_failure_handlers
from kelvin.ipc.http_bodies import LARGE_BYTES, json_response, read_json
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.service_lifecycle import serve_until
from kelvin.telemetry.policy.instruments import MetricsPage
from kelvin.telemetry.telemetry import open_without_traces

log = logging.getLogger(__name__)

# How long a thread may keep the interpreter while another one waits. Short, because the event loop only passes texts
# on.
THREAD_SWITCH_S: Final = 0.001
MAX_SCAN_S: Final = 10.0  # no runtime waits longer
_FILTER: Final = "pii"


class FilterMetrics:
    """The filter process's metrics: verdicts by direction, findings by entity. No label has a caller's value."""

    def __init__(self, page: MetricsPage) -> None:
        self._verdicts = page.counter(
            "kelvin_filter_verdicts_total", "Pieces of text that were looked at", ("filter", "direction", "verdict")
        )
        self._found = page.counter(
            "kelvin_filter_found_total", "What was found in pieces of text", ("filter", "direction", "entity", "action")
        )
        self._unseen = page.counter(
            "kelvin_filter_unseen_total", "Pieces that passed without being looked at, as their policy allows"
        )

    def count_unchecked(self, texts: int) -> None:
        """Count texts that passed without a check."""
        if texts:
            self._unseen.add((), texts)

    def count_checked(self, direction: Direction, looked: TextResult) -> None:
        """Count one checked text and its findings."""
        actions = {span.action for span in looked.spans}
        verdict = "stop" if "stop" in actions else "redact" if actions else "allow"
        self._verdicts.add((_FILTER, direction, verdict))
        for span in looked.spans:
            self._found.add((_FILTER, direction, span.label, span.action))


async def serve(settings: FilterSettings, stop: asyncio.Event) -> None:
    """Serve on the socket until `stop` is set."""
    telemetry = open_without_traces("filters")
    async with AsyncExitStack() as stack:
        directory = SocketDirectory(settings.run)
        stack.callback(directory.close)
        sys.setswitchinterval(THREAD_SWITCH_S)
        executor = ThreadPoolExecutor(1, "looking")
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        app = make_app(FilterMetrics(telemetry.page), Scanner(executor))
        listener = stack.enter_context(directory.listen(FILTERS_SOCKET))
        log.info("serving", extra={"socket": FILTERS_SOCKET})
        await serve_until(telemetry.with_metrics_route(app), listener, stop)


def make_app(meters: FilterMetrics, scanner: Scanner) -> FastAPI:
    """Return the application. One check is one POST; no text is logged or kept."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_failure_handlers(app)

    @app.post(CHECK_PATH)
    async def check(request: Request) -> Response:
        question = await read_json(request, FilterRequest, LARGE_BYTES)
        _check_rules_known(question)
        looked = await scanner.scan(request.headers.get(TENANT_HEADER, ""), question, _remaining_s(request))
        meters.count_unchecked(question.unseen)
        for found in looked:
            meters.count_checked(question.direction, found)
        return json_response(FilterResponse(looked=looked))

    @app.get("/healthz")
    @app.get("/readyz")
    async def healthy() -> Response:
        return Response(status_code=200)

    return app


def _remaining_s(request: Request) -> float:
    """Return how many seconds the runtime still waits, at most MAX_SCAN_S. A runtime of an older build does not send
    it. Raises `Refused(InvalidRequest)`.
    """
    raw = request.headers.get(DEADLINE_HEADER)
    if raw is None:
        return MAX_SCAN_S
    if (milliseconds := parse_whole_number(raw)) is None:
        raise Refused(InvalidRequest(DEADLINE_HEADER, repr(raw[:20]), "must be whole milliseconds"))
    return min(milliseconds / 1000, MAX_SCAN_S)


def _check_rules_known(question: FilterRequest) -> None:
    for rule in question.rules:
        for entity in rule.actions:
            if entity not in ENTITIES:
                raise Refused(InvalidRequest("actions", repr(entity[:40]), f"must be one of {', '.join(ENTITIES)}"))
        if (region := unknown_region(rule)) is not None:
            raise Refused(InvalidRequest("phone_regions", repr(region[:40]), "must be a region with telephones"))
