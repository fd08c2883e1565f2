"""Write Events about objects, which `kubectl describe` shows. Nothing depends on them.

A repetition within DEDUPLICATE_US raises the count of the first one, at most once per SPACING_US.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from controlplane import dependencies
from controlplane.clock import Clock
from controlplane.knative.apply.api_errors import one_line
from controlplane.knative.apply.cluster import ClusterError, Json, Missing, Ref, collection_path, timestamp
from controlplane.knative.apply.transport import Transport

REPORTER: Final = "kelvin-controlplane"
MAX_EVENTS: Final = 512
DEDUPLICATE_US: Final = 600 * 1_000_000
SPACING_US: Final = 60 * 1_000_000
MERGE: Final = "application/merge-patch+json"
_LOG = logging.getLogger("kelvin.cluster")

Key = tuple[str, str, str, bool]


@dataclass(slots=True)
class _RecordedEvent:
    ref: Ref
    count: int
    written_us: int  # when the cluster was last updated


class EventRecorder:
    """Writes Events, and remembers recent ones. The least recently used is forgotten first."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport, self._clock = transport, clock
        self._recorded: OrderedDict[Key, _RecordedEvent] = OrderedDict()

    async def record(self, about: Json, reason: str, message: str, *, warning: bool) -> None:
        """Write an Event, or raise the count of a recent one. Never raises ClusterError."""
        key = (about["metadata"].get("uid") or str(Ref.of(about)), reason, one_line(message), warning)
        now_us = self._clock.monotonic_us()
        event = self._recorded.pop(key, None)
        try:
            if event is None or now_us - event.written_us > DEDUPLICATE_US:
                event = _RecordedEvent(await self._begin(about, key, now_us), 1, now_us)
            else:
                event.count += 1
                if now_us - event.written_us >= SPACING_US:
                    await self._update_count(event)
                    event.written_us = now_us
        except ClusterError as error:
            _LOG.warning("an event was not written: %s", error)
            if event is None or isinstance(error.api_failure, Missing):
                return
        self._recorded[key] = event
        while len(self._recorded) > MAX_EVENTS:
            self._recorded.popitem(last=False)

    async def _begin(self, about: Json, key: Key, now_us: int) -> Ref:
        head = about["metadata"]
        _, reason, message, warning = key
        namespace = head.get("namespace") or "default"
        regarding = {"apiVersion": about["apiVersion"], "kind": about["kind"], "name": head["name"]}
        regarding |= {key: head[key] for key in ("namespace", "uid", "resourceVersion") if head.get(key)}
        now = timestamp(self._clock.wall_s())
        ref = Ref("v1", "Event", namespace, f"{head['name'][:200]}.{self._clock.wall_s():x}{now_us:x}")
        event: Json = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": ref.name, "namespace": namespace},
            "involvedObject": regarding,
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": REPORTER},
            "reportingComponent": REPORTER,
            "reportingInstance": REPORTER,
        }
        path = collection_path(ref.api_version, ref.kind, namespace)
        await self._transport.send_request("POST", path, None, event, limit_s=dependencies.CLUSTER.timeout_s)
        return ref

    async def _update_count(self, event: _RecordedEvent) -> None:
        patch: Json = {"count": event.count, "lastTimestamp": timestamp(self._clock.wall_s())}
        limit_s = dependencies.CLUSTER.timeout_s
        await self._transport.send_request("PATCH", event.ref.path, None, patch, limit_s=limit_s, content_type=MERGE)
