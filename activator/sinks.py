"""Where reports of what is asked for go: to the control plane's own decider, or to Knative's autoscaler."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from activator import dependencies
from activator.keys import VersionKey
from activator.reporter import Sink
from contracts.control import ConcurrencyStat, PoolRow, RevisionRow, Stats
from contracts.doubling import is_told
from contracts.errors import Refused
from contracts.settings import BadSetting
from service.client import ServiceClient
from service.loops import Body
from telemetry.policy.instruments import Page

log = logging.getLogger(__name__)

TIMEOUT_S: Final = dependencies.STATS.timeout_s
PATH: Final = "/internal/v1/stats"


@dataclass(frozen=True, slots=True)
class Told:
    """The sink, what must run for it, and whether the decider hears it, or ever did, where that can be told."""

    sink: Sink
    is_heard: Callable[[], bool] = lambda: True
    was_heard: Callable[[], bool] = lambda: True
    loops: Mapping[str, Body] = field(default_factory=dict)


def choose_sink(
    autoscaler: str | None,
    control: ServiceClient,
    name: str,
    revision_of: Callable[[VersionKey], RevisionRow | None],
    pools: Callable[[], tuple[PoolRow, ...]],
    alive: Callable[[], int | None],
    page: Page,
) -> Told:
    """As the setting says. Raises BadSetting. The library is imported only where Knative's autoscaler is named."""
    if autoscaler is None:
        return Told(ControlSink(control, name))
    try:
        from activator.autoscaler_link import AutoscalerLink
        from activator.pool_reporter import PoolReporter
    except ImportError as missing:
        rule = "needs the extra: pip install 'kelvin-serving[cluster]'"
        raise BadSetting("KELVIN_AUTOSCALER", autoscaler, rule) from missing
    link = AutoscalerLink(autoscaler, name, revision_of)
    page.gauge("kelvin_autoscaler_connected", "Whether Knative's autoscaler hears us.", lambda: link.is_open)
    sink = PoolReporter(link, link.tell, ControlSink(control, name), revision_of, pools, alive)
    return Told(
        sink, lambda: link.is_open, lambda: link.was_open, {"autoscaler link": link.run, "pool reports": sink.run}
    )


class ControlSink:
    """By a post for each telling. Each post stands for itself: the decider is where the post was."""

    session = None

    def __init__(self, control: ServiceClient, activator: str) -> None:
        self._control = control
        self._activator = activator
        self._failures = 0

    def __repr__(self) -> str:
        return f"<ControlSink failures={self._failures}>"

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        """See reporter.Sink."""
        body = Stats(activator=self._activator, stats=stats)
        try:
            await self._control.call("POST", PATH, type(None), body=body, timeout_s=TIMEOUT_S)
        except Refused as refused:
            self._failures += 1
            if is_told(self._failures):
                log.warning("stats are not taken", extra={"error": str(refused), "failures": self._failures})
            return False
        self._failures = 0
        return True
