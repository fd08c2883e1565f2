"""The activator's state on its own Unix socket, readable at any moment: liveness, readiness, gauges."""

from collections import defaultdict
from collections.abc import Callable
from math import isfinite
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from activator.app.components import Components
from activator.queue.throttler import Throttler
from activator.routing.feed_client import FeedClient
from activator.routing.last_feed import LastFeed
from kelvin.contracts.wire import Wire, encode
from kelvin.telemetry.policy.instruments import MetricKind, MetricsPage
from kelvin.telemetry.policy.labels import outcome_of

WITHOUT_AUTOSCALER: Final = b"exclude=autoscaler"


class Readiness(Wire, frozen=True):
    """Body of the `/readyz` response."""

    feed: str  # "live"; "kept" while the control plane is away; "none" before the first feed
    age_s: float | None  # seconds since the control plane was last heard
    autoscaler: bool | None = None  # whether Knative's autoscaler is connected; None without one


def build_health_app(
    is_ready: Callable[[], bool], is_open: Callable[[], bool], read_readiness: Callable[[], Readiness]
) -> ASGIApp:
    """Return a plain ASGI application with two routes.

    `/healthz` is 200 once the event loop runs. `/readyz` is 200 while `is_ready()`, else 503, with details. With
    `?exclude=autoscaler` (as in Kubernetes' API server) it is 200 while `is_open()`.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        is_known = path in ("/healthz", "/readyz")
        check = is_open if scope["query_string"] == WITHOUT_AUTOSCALER else is_ready
        status = 404 if not is_known else 200 if path == "/healthz" or check() else 503
        body = encode(read_readiness()) if path == "/readyz" else b""
        headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers[: 2 if body else 1]})
        await send({"type": "http.response.body", "body": body})

    return app


def read_readiness(feed: FeedClient, last_feed: LastFeed, autoscaler: bool | None = None) -> Readiness:
    """Return the current state for `/readyz`."""
    age_s = last_feed.age_s()
    if not isfinite(age_s):
        return Readiness(feed="none", age_s=None, autoscaler=autoscaler)
    return Readiness(feed="live" if feed.connected else "kept", age_s=round(age_s, 1), autoscaler=autoscaler)


def register_gauges(page: MetricsPage, components: Components) -> None:
    """Add gauges of running requests, queues, breakers, the feed and the spool. They are read when the page is."""
    front_door, throttler, shipper = components.front_door, components.queue.throttler, components.accounting.shipper
    feed, last_feed, answers = components.queue.feed, components.queue.last_feed, components.answers.local_store
    usage = throttler.usage_by_tenant.total
    page.gauge("kelvin_requests_inside", "Running requests of any kind.", lambda: front_door.running_requests)
    page.gauge("kelvin_requests_queued", "Requests that wait for a slot.", lambda: usage.entries)
    page.gauge("kelvin_queued_bytes", "Bytes of queued requests' bodies.", lambda: usage.nbytes)
    page.gauge("kelvin_queued_tokens", "Tokens that queued requests may take.", lambda: usage.tokens)
    page.gauge("kelvin_spool_backlog_records", "Usage records that the ledger lacks.", lambda: shipper.backlog)
    page.gauge("kelvin_feed_connected", "Whether the control plane is connected.", lambda: feed.connected)
    help = "Answers kept in this process for idempotency keys. With Redis, most are kept there."
    page.gauge("kelvin_kept_answers", help, lambda: len(answers.cache))
    page.gauge("kelvin_kept_answer_bytes", "Bytes of kept answers, encrypted.", lambda: answers.nbytes)
    help = "Circuit breakers that opened, of replicas and versions, by the last failure's code."
    page.callback(
        "kelvin_breaker_openings_total", help, MetricKind.COUNTER, ("of", "why"), lambda: _openings(throttler)
    )
    page.gauge(
        "kelvin_versions_failing",
        "Versions that have failed since their last answer.",
        lambda: len(throttler.version_breakers),
    )
    help = "Requests that were shed before their deadline, by reason and priority class."
    page.callback("kelvin_requests_shed_total", help, MetricKind.COUNTER, ("why", "rank"), lambda: _shed(throttler))
    page.callback(
        "kelvin_replica_refusals_total", "Requests that a full replica refused and that were queued again.",
        MetricKind.COUNTER, (), lambda: {(): throttler.full_refusals},
    )  # fmt: skip
    help = "Replicas shared with other activators, by whether this activator prefers them."
    page.callback(
        "kelvin_shared_replicas", help, MetricKind.GAUGE, ("preferred",),
        lambda: {
            ("yes" if preferred else "no",): count
            for preferred, count in throttler.slot_allocator.preferences().items()
        },
    )  # fmt: skip
    help = "Seconds since the control plane was last heard."
    page.callback("kelvin_feed_age_seconds", help, MetricKind.GAUGE, (), lambda: _age(last_feed.age_s()))


def _openings(throttler: Throttler) -> dict[tuple[str, ...], float]:
    counts: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for kind, openings in (
        ("replica", throttler.replica_breakers.openings),
        ("version", throttler.version_breakers.openings),
    ):
        for code, count in openings.items():
            counts[kind, outcome_of(code)] += count
    return counts


def _shed(throttler: Throttler) -> dict[tuple[str, ...], float]:
    return {
        (reason.value, priority_class.name.lower()): count
        for (reason, priority_class), count in throttler.load_shedder.counts.items()
    }


def _age(seconds: float) -> dict[tuple[str, ...], float]:
    return {(): seconds} if isfinite(seconds) else {}
