"""What runs, as one table: every process the zygote bore for us, and every start that has no process yet.

The fleet adds and removes processes. The local actuator and the desk for jobs make most moves between states. A start
counts as a replica from the moment it is accepted, so that a thousand callers at zero begin one. Device slots are held
from there until the process is dead, not until it was told to die.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, Protocol

from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.replica_lifecycle import LIVE, SERVING, SLEEPING, ReplicaEvent, ReplicaState, move
from kelvin.contracts.errors import Failure
from kelvin.contracts.serving.control_messages import ReplicaRow
from kelvin.contracts.timeline import StageSpan
from kelvin.ipc.forked_process import socket_name

UNBOUND: Final = frozenset({ReplicaState.FORKED, ReplicaState.STANDBY, ReplicaState.JOB})


class NoSlot(Exception):
    """Every device slot is held."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One process. `key` is set once it was given a version, and for good."""

    runtime_id: str
    state: ReplicaState
    since_us: int
    pid: int = 0
    key: VersionKey | None = None
    device_class: str = ""
    max_streams: int = 0
    restore: tuple[StageSpan, ...] = ()
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)  # empty where another control plane had it restored
    url: str = ""  # where other hosts reach it, if they do
    ends_asleep: bool = False  # it slept when it was told to end

    @property
    def holds_slot(self) -> bool:
        """Whether it holds a device slot: it has a version, and has not given the slot back by falling asleep."""
        return self.key is not None and self.state not in SLEEPING and not self.ends_asleep


@dataclass(frozen=True, slots=True)
class Start:
    """A replica that was requested at `requested_us` and has no process yet. While the process `after` lives, the start
    has no slot of its own: it will take that one's.
    """

    number: int
    key: VersionKey
    requested_us: int
    after: str | None = None


class ReplicaListener(Protocol):
    """Callbacks on what becomes of replicas. Called from the event loop; must not block."""

    def ready(self, replica: Replica) -> None:
        """It takes requests from now on."""

    def failed(self, key: VersionKey, failure: Failure) -> None:
        """A start of the version ended without a replica."""

    def lost(self, replica: Replica) -> None:
        """A process that had a version is dead, whether or not that was wanted; its state is its last."""


class ReplicaTable:
    """All processes and starts, by id and by version."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.unknown_processes = 0  # processes that have yet to say what they are: each may hold a slot
        self._replicas: dict[str, Replica] = {}
        self._by_key: dict[VersionKey, dict[str, None]] = {}  # insertion order: the oldest first
        self._starts: dict[int, Start] = {}
        self._start_numbers = count(1)

    def __repr__(self) -> str:
        states: dict[str, int] = {}
        for replica in self._replicas.values():
            states[replica.state] = states.get(replica.state, 0) + 1
        return f"<ReplicaTable {states} starts={len(self._starts)} slots={self.held}/{self.slots}>"

    def __iter__(self) -> Iterator[Replica]:
        return iter(tuple(self._replicas.values()))

    def __contains__(self, runtime_id: str) -> bool:
        return runtime_id in self._replicas

    def __getitem__(self, runtime_id: str) -> Replica:
        return self._replicas[runtime_id]

    @property
    def held(self) -> int:
        """Return how many device slots are taken: by starts, by processes with a version that does not sleep, and by
        unknown ones.
        """
        known = sum(start.after not in self._replicas for start in self._starts.values())
        known += sum(each.holds_slot for each in self._replicas.values())
        return min(known + self.unknown_processes, max(known, self.slots))  # some of the unknown ones are standbys

    @property
    def slots_sharing_threads(self) -> int:
        """Return how many device slots share the machine's threads. A replica that is being replaced leaves soon."""
        return self.held - self.count(ReplicaState.RELIEVED)

    def of(self, key: VersionKey) -> tuple[Replica, ...]:
        """Processes of a version in any state, the oldest first."""
        return tuple(self._replicas[runtime_id] for runtime_id in self._by_key.get(key, ()))

    def keys(self) -> tuple[VersionKey, ...]:
        """Versions that have a process or a start."""
        return tuple({**self._by_key, **{start.key: None for start in self._starts.values()}})

    def starts_of(self, key: VersionKey) -> tuple[Start, ...]:
        """Starts of a version that have no process yet, the oldest first."""
        return tuple(start for start in self._starts.values() if start.key == key)

    def is_present(self, key: VersionKey) -> bool:
        """Whether there is a process of the version in any state, or a start that has none yet."""
        return bool(self.of(key) or self.starts_of(key))

    def ready(self, key: VersionKey) -> int:
        """Replicas that take requests."""
        return sum(replica.state in SERVING for replica in self.of(key))

    def live(self, key: VersionKey) -> int:
        """Replicas that take requests or will: starts and restores count."""
        return len(self.starts_of(key)) + sum(replica.state in LIVE for replica in self.of(key))

    def coming(self, key: VersionKey) -> int:
        """Replicas that will take requests: starts and restores."""
        return self.live(key) - sum(replica.state is ReplicaState.READY for replica in self.of(key))

    def leaving(self) -> int:
        """Return how many processes hold a slot and will give it back to any version: they are being replaced, drain or
        end.

        Unknown processes count, too: a version that needs a slot waits until it is known what they hold.
        """
        heirs = sum(start.after in self._replicas for start in self._starts.values())
        held = sum(each.holds_slot and each.state not in LIVE for each in self._replicas.values())
        return self.unknown_processes + held - heirs

    def count(self, state: ReplicaState) -> int:
        """Processes in that state."""
        return sum(replica.state is state for replica in self._replicas.values())

    def add(self, replica: Replica) -> None:
        """A process that was forked or adopted. Raises ValueError where its id is taken."""
        if replica.runtime_id in self._replicas:
            raise ValueError(f"runtime {replica.runtime_id} exists")
        self._replicas[replica.runtime_id] = replica
        if replica.key is not None:
            self._by_key.setdefault(replica.key, {})[replica.runtime_id] = None

    def begin(self, key: VersionKey, requested_us: int, after: str | None = None) -> Start:
        """Accept a start, taking a slot for it, or that of the runtime `after` which it comes. Raises NoSlot."""
        if after is None and self.held >= self.slots:
            raise NoSlot
        start = Start(next(self._start_numbers), key, requested_us, after)
        self._starts[start.number] = start
        return start

    def sleepers(self, key: VersionKey | None = None) -> tuple[Replica, ...]:
        """Processes that sleep, of that version or of any, the one that has slept for longest first."""
        some = self._replicas.values() if key is None else self.of(key)
        return tuple(sorted((r for r in some if r.state in SLEEPING), key=lambda r: r.since_us))

    def wake(self, runtime_id: str, now_us: int) -> Replica:
        """Give a slot to a process that sleeps; one that still falls asleep has its own. Raises NoSlot, IllegalMove."""
        if self._replicas[runtime_id].state in SLEEPING and self.held >= self.slots:
            raise NoSlot
        return self._move(runtime_id, ReplicaEvent.WAKE, now_us)

    def is_pending(self, start: Start) -> bool:
        """Whether the start still waits for a process."""
        return start.number in self._starts

    def abandon(self, start: Start) -> None:
        """Give the start up, and its slot; nothing happens where it is no longer pending."""
        self._starts.pop(start.number, None)

    def bind(self, start: Start, runtime_id: str, now_us: int, device_class: str) -> Replica:
        """Give the start's version and slot to a standby. Raises IllegalMove; KeyError without that start; ValueError
        while the process lives whose slot it has.
        """
        if start.after in self._replicas:
            raise ValueError(f"the slot is held by {start.after}")
        replica = self._replicas[runtime_id]
        state = move(replica.state, ReplicaEvent.BIND)
        del self._starts[start.number]
        after = replace(replica, state=state, since_us=now_us, key=start.key, device_class=device_class)
        self._replicas[runtime_id] = after
        self._by_key.setdefault(start.key, {})[runtime_id] = None
        return after

    def move(self, runtime_id: str, event: ReplicaEvent, now_us: int, **changes: Any) -> Replica:
        """Apply an event other than `bind` and `wake`. Raises IllegalMove and leaves the replica as it was."""
        if event in (ReplicaEvent.BIND, ReplicaEvent.WAKE):
            raise ValueError(f"a {event} needs its slot")
        return self._move(runtime_id, event, now_us, **changes)

    def _move(self, runtime_id: str, event: ReplicaEvent, now_us: int, **changes: Any) -> Replica:
        replica = self._replicas[runtime_id]
        changes["ends_asleep"] = event is ReplicaEvent.END and replica.state in SLEEPING
        after = replace(replica, state=move(replica.state, event), since_us=now_us, **changes)
        if after.key != replica.key:
            raise ValueError("a key comes with a bind only")
        self._replicas[runtime_id] = after
        return after

    def remove(self, runtime_id: str) -> Replica | None:
        """The process is dead: its slot is free. None where it is unknown."""
        replica = self._replicas.pop(runtime_id, None)
        if replica is not None and replica.key is not None:
            ids = self._by_key[replica.key]
            del ids[runtime_id]
            if not ids:
                del self._by_key[replica.key]
        return replica

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
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
    """What activators are told of a replica that has a version."""
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
