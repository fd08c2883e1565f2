"""The requests inside, waiting or running, of each version, and its recent throughput. `concurrency_policy.py` uses
both to weigh the reported concurrency of models that scale by tokens.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from activator.queue.policy.queued_request import QueuedRequest
from activator.queue.policy.tenant_fair_queue import cost
from activator.queue.policy.wait_estimate import MeasuredThroughput, Throughput
from activator.routing.policy.version_key import VersionKey
from activator.scale_link.concurrency_policy import RequestProgress, concurrency_by_tokens

MAX_REMEMBERED_VERSIONS: Final = 4096  # bound on versions whose throughput is kept while they are at zero


class RunningRequest(Protocol):
    """A request inside. `queued_request` is set while it waits or runs."""

    queued_request: QueuedRequest | None

    @property
    def computed_tokens(self) -> int:
        """Tokens computed so far, as the replica reported them."""
        ...


class Backlogs:
    """The backlogs of all versions. `backlog_s` returns a version's target in seconds; 0: no scaling by tokens."""

    def __init__(
        self,
        backlog_s: Callable[[VersionKey], float] = lambda _: 0.0,
        queue_length: Callable[[VersionKey], int] = lambda _: 0,
        throughput: Callable[[VersionKey], Throughput | None] = lambda _: None,
    ) -> None:
        self._backlog_s = backlog_s
        self._queue_length = queue_length
        self._throughput = throughput
        self._inside: dict[VersionKey, dict[int, RunningRequest]] = {}
        self._measured: OrderedDict[VersionKey, MeasuredThroughput] = OrderedDict()  # least recently measured first

    def __repr__(self) -> str:
        return f"<Backlogs inside={sum(map(len, self._inside.values()))} measured={len(self._measured)}>"

    def add(self, key: VersionKey, running_request: RunningRequest) -> None:
        """Add a request that waits for the version or runs there."""
        self._inside.setdefault(key, {})[id(running_request)] = running_request

    def remove(self, key: VersionKey, running_request: RunningRequest) -> None:
        """Remove a request that has ended."""
        inside = self._inside[key]
        del inside[id(running_request)]
        if not inside:
            del self._inside[key]

    def weigh(self, key: VersionKey, concurrency: float) -> float:
        """Return the concurrency to report for the version."""
        backlog_s = self._backlog_s(key)
        if backlog_s <= 0:
            return concurrency
        inside = (
            RequestProgress(cost(running_request.queued_request.tokens), running_request.computed_tokens)
            for running_request in self._inside.get(key, {}).values()
            if running_request.queued_request is not None
        )
        return concurrency_by_tokens(concurrency, inside, self._queue_length(key), self._measure(key), backlog_s)

    def check_integrity(self) -> None:
        """Assert that no version is kept without requests, and that kept throughputs are bounded."""
        assert all(self._inside.values())
        assert len(self._measured) <= MAX_REMEMBERED_VERSIONS

    def _measure(self, key: VersionKey) -> MeasuredThroughput | None:
        """Return the current throughput, or the last known one, e.g. for a version that comes from zero."""
        throughput = self._throughput(key)
        measured = None if throughput is None else throughput.measured()
        if measured is None:
            return self._measured.get(key)
        self._measured[key] = measured
        self._measured.move_to_end(key)
        if len(self._measured) > MAX_REMEMBERED_VERSIONS:
            self._measured.popitem(last=False)
        return measured
