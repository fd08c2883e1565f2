"""What restores taught: the last timeline of each version for operators, and the life of the version for the registry.

Written after the fact, in the background: a cold start never waits for it.
"""

import logging
from dataclasses import dataclass

from contracts.errors import Failure
from contracts.problem import code_of
from contracts.timeline import Span
from controlplane.facts import VersionKey
from controlplane.policy.lifecycle import VersionEvent, speaks_of_bytes
from controlplane.registry import Registry
from controlplane.replicas import Replica
from controlplane.tasks import Tasks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LastRestore:
    """How the last attempt of a version went. `failure` is its code and sentence, None where it succeeded."""

    spans: tuple[Span, ...]
    failure: tuple[str, str] | None


class Outcomes:
    """Listens to the actuator. Holds one entry per version that was ever tried."""

    def __init__(self, registry: Registry, tasks: Tasks) -> None:
        self._registry = registry
        self._tasks = tasks
        self._last: dict[VersionKey, LastRestore] = {}

    def __repr__(self) -> str:
        return f"<Outcomes versions={len(self._last)}>"

    def last(self, key: VersionKey) -> LastRestore | None:
        """None where this control plane has seen no attempt."""
        return self._last.get(key)

    def ready(self, replica: Replica) -> None:
        """Its bytes are good."""
        assert replica.key is not None
        self._last[replica.key] = LastRestore(replica.restore, None)
        self._note(replica.key, VersionEvent.RESTORED, None)

    def failed(self, key: VersionKey, failure: Failure) -> None:
        """Its bytes may be broken; or it was the machine."""
        self._last[key] = LastRestore((), (code_of(failure), failure.message))
        if speaks_of_bytes(code_of(failure)):
            self._note(key, VersionEvent.FOUND_BROKEN, code_of(failure))

    def lost(self, replica: Replica) -> None:
        """Says nothing of the version."""

    def _note(self, key: VersionKey, event: VersionEvent, fault: str | None) -> None:
        self._tasks.start(self._registry.note(key, event, fault), f"note {event} of {key}")
