"""Choose where load reports go: to the control plane's own autoscaler, or to Knative's."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from activator import dependencies
from activator.routing.policy.version_key import VersionKey
from activator.scale_link.load_reporter import ReportSink
from kelvin.contracts.backoff import should_log
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import ConcurrencyStat, PoolRow, RevisionRow, Stats
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.service_client import ServiceClient
from kelvin.process.loops import Body
from kelvin.telemetry.policy.instruments import MetricsPage

log = logging.getLogger(__name__)

TIMEOUT_S: Final = dependencies.STATS.timeout_s
PATH: Final = "/internal/v1/stats"


@dataclass(frozen=True, slots=True)
class LoadReporting:
    """The sink with its loops, and whether the autoscaler is or was ever connected, if that can be known."""

    sink: ReportSink
    is_connected: Callable[[], bool] = lambda: True
    was_connected: Callable[[], bool] = lambda: True
    loops: Mapping[str, Body] = field(default_factory=dict)


def choose_report_sink(
    autoscaler: str | None,
    control: ServiceClient,
    name: str,
    revision_of: Callable[[VersionKey], RevisionRow | None],
    pools: Callable[[], tuple[PoolRow, ...]],
    activator_count: Callable[[], int | None],
    page: MetricsPage,
) -> LoadReporting:
    """Return the sink that the setting names. Raises BadSetting. Imports the WebSocket link only for Knative."""
    if autoscaler is None:
        return LoadReporting(ControlSink(control, name))
    try:
        from activator.scale_link.autoscaler_link import AutoscalerLink
        from activator.scale_link.pool_reporter import PoolReporter
    except ImportError as missing:
        rule = "needs the extra: pip install 'kelvin-serving[cluster]'"
        raise BadSetting("KELVIN_AUTOSCALER", autoscaler, rule) from missing
    link = AutoscalerLink(autoscaler, name, revision_of)
    page.gauge("kelvin_autoscaler_connected", "Whether Knative's autoscaler is connected.", lambda: link.is_open)
    sink = PoolReporter(link, link.send_revision_stats, ControlSink(control, name), revision_of, pools, activator_count)
    return LoadReporting(
        sink, lambda: link.is_open, lambda: link.was_open, {"autoscaler link": link.run, "pool reports": sink.run}
    )


class ControlSink:
    """Sends each report to the control plane as a POST of its own."""

    session = None

    def __init__(self, control: ServiceClient, activator: str) -> None:
        self._control = control
        self._activator = activator
        self._failures = 0

    def __repr__(self) -> str:
        return f"<ControlSink failures={self._failures}>"

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        """POST the reports to the control plane. Return whether it accepted them."""
        body = Stats(activator=self._activator, stats=stats)
        try:
            await self._control.call("POST", PATH, type(None), body=body, timeout_s=TIMEOUT_S)
        except Refused as refused:
            self._failures += 1
            if should_log(self._failures):
                log.warning(
                    "the control plane did not accept load reports",
                    extra={"error": str(refused), "failures": self._failures},
                )
            return False
        self._failures = 0
        return True
