"""The table of replicas: every process of this control plane, and every start that has no process yet.

The fleet adds and removes processes. The local actuator and the push jobs make most state changes. A start counts as a
replica from the moment it is accepted, so a thousand callers of a version at zero begin one start. It holds a device
slot from then until its process is dead, not only until the process is told to end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, Protocol

from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.replica_lifecycle import (
    LIVE,
    SERVING,
    SLEEPING,
    ReplicaEvent,
    ReplicaState,
    next_state,
)
from kelvin.contracts.errors import Failure
from kelvin.contracts.serving.control_messages import ReplicaRow
from kelvin.contracts.timeline import StageSpan
from kelvin.ipc.forked_process import socket_name

UNBOUND: Final = frozenset({ReplicaState.FORKED, ReplicaState.STANDBY, ReplicaState.JOB})


class NoSlot(Exception):
    """Every device slot is held."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One process. Its `key` is set when it gets a version, and never changes afterwards."""

    runtime_id: str
    state: ReplicaState
    since_us: int
    pid: int = 0
    key: VersionKey | None = None
    device_class: str = ""
    max_streams: int = 0
    restore: tuple[StageSpan, ...] = ()
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)  # empty if another control plane restored it
    url: str = ""  # its address for other hosts; empty if they can't reach it
    ends_asleep: bool = False  # it slept when it was told to end

    @property
    def holds_slot(self) -> bool:
        """Return whether it holds a device slot: it has a version, and did not return the slot by falling asleep."""
        return self.key is not None and self.state not in SLEEPING and not self.ends_asleep


@dataclass(frozen=True, slots=True)
class Start:
    """A replica that was requested at `requested_us` and has no process yet. If `predecessor` is set, it takes over
    that process's slot; while the process lives, it has none of its own.
    """

    number: int
    key: VersionKey
    requested_us: int
    predecessor: str | None = None


class ReplicaListener(Protocol):
    """Callbacks on replica state changes. Called on the event loop; must not block."""

    def on_replica_ready(self, replica: Replica) -> None:
        """A replica takes requests from now on."""

    def on_start_failed(self, key: VersionKey, failure: Failure) -> None:
        """A start of the version ended without a replica."""

    def on_replica_lost(self, replica: Replica) -> None:
        """A process that had a version is dead, expected or not. `replica` has its last state."""


class ReplicaTable:
    """All processes and starts, by id and by version. Not thread-safe: use from one event loop."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.unknown_processes = 0  # processes of unknown state: each may hold a slot
        self._replicas: dict[str, Replica] = {}
        self._by_key: dict[VersionKey, dict[str, None]] = {}  # insertion order: the oldest first
        self._starts: dict[int, Start] = {}
        self._start_numbers = count(1)

    def __repr__(self) -> str:
        states: dict[str, int] = {}
        for replica in self._replicas.values():
            states[replica.state] = states.get(replica.state, 0) + 1
        return f"<ReplicaTable {states} starts={len(self._starts)} slots={self.held_slots}/{self.slots}>"

    def __iter__(self) -> Iterator[Replica]:
        return iter(tuple(self._replicas.values()))

    def __contains__(self, runtime_id: str) -> bool:
        return runtime_id in self._replicas

    def __getitem__(self, runtime_id: str) -> Replica:
        return self._replicas[runtime_id]

    @property
    def held_slots(self) -> int:
        """Return how many device slots are taken: by starts, by processes with a version that do not sleep, and by
        unknown processes.
        """
        known = sum(start.predecessor not in self._replicas for start in self._starts.values())
        known += sum(each.holds_slot for each in self._replicas.values())
        return min(known + self.unknown_processes, max(known, self.slots))  # some of the unknown ones are standbys

    @property
    def slots_sharing_threads(self) -> int:
        """Return how many device slots share the machine's threads. A replica that is being replaced does not count."""
        return self.held_slots - self.count(ReplicaState.RELIEVED)

    def replicas_of(self, key: VersionKey) -> tuple[Replica, ...]:
        """Return the version's processes in any state, the oldest first."""
        return tuple(self._replicas[runtime_id] for runtime_id in self._by_key.get(key, ()))

    def active_versions(self) -> tuple[VersionKey, ...]:
        """Return the versions that have a process or a start."""
        return tuple({**self._by_key, **{start.key: None for start in self._starts.values()}})

    def starts_of(self, key: VersionKey) -> tuple[Start, ...]:
        """Return the version's starts without a process, the oldest first."""
        return tuple(start for start in self._starts.values() if start.key == key)

    def is_present(self, key: VersionKey) -> bool:
        """Return whether the version has a process in any state, or a start without one."""
        return bool(self.replicas_of(key) or self.starts_of(key))

    def ready_count(self, key: VersionKey) -> int:
        """Return how many replicas take requests."""
        return sum(replica.state in SERVING for replica in self.replicas_of(key))

    def live_count(self, key: VersionKey) -> int:
        """Return how many replicas take requests or will: starts and restores count."""
        return len(self.starts_of(key)) + sum(replica.state in LIVE for replica in self.replicas_of(key))

    def starting_count(self, key: VersionKey) -> int:
        """Return how many replicas will take requests: starts and restores."""
        return self.live_count(key) - sum(replica.state is ReplicaState.READY for replica in self.replicas_of(key))

    def leaving_count(self) -> int:
        """Return how many slots will come free for any version: their processes drain, end or are being replaced.

        Unknown processes count, too: a version that needs a slot waits until their state is known.
        """
        successors = sum(start.predecessor in self._replicas for start in self._starts.values())
        held = sum(each.holds_slot and each.state not in LIVE for each in self._replicas.values())
        return self.unknown_processes + held - successors

    def count(self, state: ReplicaState) -> int:
        """Return how many processes are in that state."""
        return sum(replica.state is state for replica in self._replicas.values())

    def add(self, replica: Replica) -> None:
        """Add a process that was forked or adopted. Raises ValueError if its id is taken."""
        if replica.runtime_id in self._replicas:
            raise ValueError(f"runtime {replica.runtime_id} exists")
        self._replicas[replica.runtime_id] = replica
        if replica.key is not None:
            self._by_key.setdefault(replica.key, {})[replica.runtime_id] = None

    def add_start(self, key: VersionKey, requested_us: int, predecessor: str | None = None) -> Start:
        """Accept a start. It takes a free slot, or later the slot of the runtime `predecessor`. Raises NoSlot."""
        if predecessor is None and self.held_slots >= self.slots:
            raise NoSlot
        start = Start(next(self._start_numbers), key, requested_us, predecessor)
        self._starts[start.number] = start
        return start

    def sleepers(self, key: VersionKey | None = None) -> tuple[Replica, ...]:
        """Return the sleeping processes of one version, or of all. The one that has slept longest is first."""
        candidates = self._replicas.values() if key is None else self.replicas_of(key)
        return tuple(sorted((each for each in candidates if each.state in SLEEPING), key=lambda each: each.since_us))

    def wake(self, runtime_id: str, now_us: int) -> Replica:
        """Give a slot to a sleeping process; one that falls asleep still has its own. Raises NoSlot, and
        IllegalReplicaEvent in other states.
        """
        if self._replicas[runtime_id].state in SLEEPING and self.held_slots >= self.slots:
            raise NoSlot
        return self._apply_event(runtime_id, ReplicaEvent.WAKE, now_us)

    def is_pending(self, start: Start) -> bool:
        """Return whether the start still waits for a process."""
        return start.number in self._starts

    def cancel_start(self, start: Start) -> None:
        """Cancel the start and free its slot. Does nothing if it is no longer pending."""
        self._starts.pop(start.number, None)

    def bind(self, start: Start, runtime_id: str, now_us: int, device_class: str) -> Replica:
        """Give the start's version and slot to a standby. Raises IllegalReplicaEvent; KeyError if the start is not
        pending; ValueError while the process `start.predecessor` lives.
        """
        if start.predecessor in self._replicas:
            raise ValueError(f"the slot is held by {start.predecessor}")
        replica = self._replicas[runtime_id]
        state = next_state(replica.state, ReplicaEvent.BIND)
        del self._starts[start.number]
        moved = replace(replica, state=state, since_us=now_us, key=start.key, device_class=device_class)
        self._replicas[runtime_id] = moved
        self._by_key.setdefault(start.key, {})[runtime_id] = None
        return moved

    def apply_event(self, runtime_id: str, event: ReplicaEvent, now_us: int, **changes: Any) -> Replica:
        """Apply an event other than BIND and WAKE. Raises IllegalReplicaEvent, and then changes nothing."""
        if event in (ReplicaEvent.BIND, ReplicaEvent.WAKE):
            raise ValueError(f"a {event} needs its slot")
        return self._apply_event(runtime_id, event, now_us, **changes)

    def _apply_event(self, runtime_id: str, event: ReplicaEvent, now_us: int, **changes: Any) -> Replica:
        replica = self._replicas[runtime_id]
        changes["ends_asleep"] = event is ReplicaEvent.END and replica.state in SLEEPING
        moved = replace(replica, state=next_state(replica.state, event), since_us=now_us, **changes)
        if moved.key != replica.key:
            raise ValueError("a key comes with a bind only")
        self._replicas[runtime_id] = moved
        return moved

    def remove(self, runtime_id: str) -> Replica | None:
        """Remove a dead process, which frees its slot. Return its last state; None if it is unknown."""
        replica = self._replicas.pop(runtime_id, None)
        if replica is not None and replica.key is not None:
            ids = self._by_key[replica.key]
            del ids[runtime_id]
            if not ids:
                del self._by_key[replica.key]
        return replica

    def check_integrity(self) -> None:
        """Assert the table's invariants. They hold between any two calls."""
        indexed = {(runtime_id, key) for key, ids in self._by_key.items() for runtime_id in ids}
        assert indexed == {(each.runtime_id, each.key) for each in self._replicas.values() if each.key is not None}
        assert all(self._by_key.values()), "an empty set of a version stays in the index"
        for replica in self._replicas.values():
            unbound = replica.state in UNBOUND
            bound = replica.state not in (*UNBOUND, ReplicaState.ENDING)
            assert not (unbound and replica.key), f"{replica} has a version too early"
            assert not (bound and not replica.key), f"{replica} lacks its version"
        assert all(number == start.number for number, start in self._starts.items())


def replica_row(replica: Replica) -> ReplicaRow:
    """Return the feed row of a replica that has a version: what activators know of it."""
    assert replica.key is not None
    return ReplicaRow(
        runtime_id=replica.runtime_id,
        tenant=replica.key.tenant,
        model=replica.key.model,
        version=replica.key.version,
        address=socket_name(replica.runtime_id),
        max_streams=replica.max_streams,
        draining=replica.state not in SERVING,
        restore=replica.restore,
        url=replica.url,
    )
