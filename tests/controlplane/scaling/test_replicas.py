"""ReplicaTable refuses illegal moves, holds each slot until the process dies, and keeps its indexes right for any
history.
"""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.scaling.policy.replica_lifecycle import SLEEPING, IllegalReplicaEvent, ReplicaEvent, ReplicaState
from controlplane.scaling.replicas import UNBOUND, NoSlot, Replica, ReplicaTable, Start
from tests.controlplane.builders import key

SLOTS = 4
NEED_A_SLOT = (ReplicaEvent.BIND, ReplicaEvent.WAKE)
KEYS = [key(letter=letter) for letter in "abc"]


class Table(RuleBasedStateMachine):
    """Random forks, starts, binds, events and deaths, compared with a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ReplicaTable(SLOTS)
        self.alive: dict[str, ReplicaState] = {}
        self.starts: list[Start] = []
        self.born = 0

    def _any(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.alive)))

    @rule()
    def fork(self) -> None:
        self.born += 1
        self.table.add(Replica(f"r{self.born}", ReplicaState.FORKED, 0))
        self.alive[f"r{self.born}"] = ReplicaState.FORKED

    @rule(which=st.sampled_from(KEYS))
    def begin(self, which: object) -> None:
        held = self.table.held_slots
        try:
            self.starts.append(self.table.add_start(which, 0))  # type: ignore[arg-type]
        except NoSlot:
            assert held >= SLOTS
            assert self.table.held_slots == held
        else:
            assert held < SLOTS

    @precondition(lambda self: ReplicaState.DRAINING in self.alive.values())
    @rule(data=st.data())
    def begin_after(self, data: st.DataObject) -> None:
        """Begin a start that waits for the slot of a draining process."""
        draining = [each for each in sorted(self.alive) if self.alive[each] is ReplicaState.DRAINING]
        before, held = data.draw(st.sampled_from(draining)), self.table.held_slots
        if before not in {start.predecessor for start in self.starts}:
            self.starts.append(self.table.add_start(KEYS[0], 0, predecessor=before))
            assert self.table.held_slots == held, "the start takes over the slot of the draining process"

    @precondition(lambda self: self.starts)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(self.starts))
        self.starts.remove(start)
        self.table.cancel_start(start)
        self.table.cancel_start(start)
        assert not self.table.is_pending(start)

    @precondition(lambda self: self.starts and self.alive)
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        start, runtime_id = data.draw(st.sampled_from(self.starts)), self._any(data)
        before = self.table[runtime_id]
        try:
            after = self.table.bind(start, runtime_id, 1, "cpu-1")
        except IllegalReplicaEvent:
            assert before.state is not ReplicaState.STANDBY
            assert self.table[runtime_id] == before
            assert self.table.is_pending(start)
        except ValueError:
            assert start.predecessor in self.alive
            assert self.table.is_pending(start)
        else:
            assert (before.state, after.state, after.key) == (ReplicaState.STANDBY, ReplicaState.RESTORING, start.key)
            self.alive[runtime_id] = after.state
            self.starts.remove(start)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), event=st.sampled_from([each for each in ReplicaEvent if each not in NEED_A_SLOT]))
    def move(self, data: st.DataObject, event: ReplicaEvent) -> None:
        runtime_id = self._any(data)
        before, held = self.table[runtime_id], self.table.held_slots
        try:
            self.alive[runtime_id] = self.table.apply_event(runtime_id, event, 2).state
        except IllegalReplicaEvent:
            assert self.table[runtime_id] == before
            assert self.table.held_slots == held
        else:
            assert self.table.held_slots == held - (event is ReplicaEvent.SLEPT), "only a death and a sleep free a slot"

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        runtime_id = self._any(data)
        before, held = self.table[runtime_id], self.table.held_slots
        try:
            self.alive[runtime_id] = self.table.wake(runtime_id, 3).state
        except NoSlot:
            assert before.state in SLEEPING
            assert (self.table.held_slots, self.table[runtime_id]) == (SLOTS, before)
        except IllegalReplicaEvent:
            assert self.table[runtime_id] == before
        else:
            assert self.table.held_slots == held + (before.state in SLEEPING)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        runtime_id = self._any(data)
        held, replica = self.table.held_slots, self.table[runtime_id]
        heirs = sum(start.predecessor == runtime_id for start in self.starts)
        assert self.table.remove(runtime_id) == replica
        assert self.table.remove(runtime_id) is None
        assert self.table.held_slots == held - replica.holds_slot + heirs
        del self.alive[runtime_id]

    @invariant()
    def holds(self) -> None:
        self.table.check_integrity()
        assert {replica.runtime_id: replica.state for replica in self.table} == self.alive
        assert self.table.held_slots <= SLOTS
        for which in KEYS:
            live = [each for each in self.table.replicas_of(which) if each.state in ("restoring", "ready")]
            assert self.table.live_count(which) == len(live) + sum(start.key == which for start in self.starts)


Table.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTable = Table.TestCase


def _table(state: ReplicaState) -> ReplicaTable:
    table = ReplicaTable(SLOTS)
    bound = state not in (*UNBOUND, ReplicaState.ENDING)
    table.add(Replica("r1", state, 0, key=KEYS[0] if bound else None))
    return table


@pytest.mark.parametrize(
    ("state", "event"),
    [
        pytest.param(ReplicaState.READY, ReplicaEvent.END, id="a serving replica is not ended without a drain"),
        pytest.param(ReplicaState.DRAINING, ReplicaEvent.BOUND, id="a draining replica does not serve again"),
        pytest.param(ReplicaState.JOB, ReplicaEvent.PARKED, id="a standby that ran a job is not parked again"),
        pytest.param(ReplicaState.RESTORING, ReplicaEvent.PARKED, id="a bound process is not parked again"),
        pytest.param(ReplicaState.ENDING, ReplicaEvent.BOUND, id="an ending process does not serve"),
        pytest.param(ReplicaState.FORKED, ReplicaEvent.TOOK_JOB, id="a process that is not parked takes no job"),
        pytest.param(ReplicaState.ASLEEP, ReplicaEvent.PARKED, id="a sleeping replica is no standby"),
        pytest.param(ReplicaState.ASLEEP, ReplicaEvent.BOUND, id="a sleeping replica wakes before it serves"),
        pytest.param(ReplicaState.DEEP_SLEEP, ReplicaEvent.BOUND, id="a deep sleeper wakes before it serves"),
        pytest.param(ReplicaState.DEEP_SLEEP, ReplicaEvent.SLEPT, id="a deep sleeper does not return to light sleep"),
        pytest.param(ReplicaState.READY, ReplicaEvent.DROPPED, id="a serving replica keeps its weights"),
        pytest.param(ReplicaState.RESTORING, ReplicaEvent.DOZE, id="a restoring replica does not fall asleep"),
    ],
)
def test_transition_table_refuses_illegal_moves(state: ReplicaState, event: ReplicaEvent) -> None:
    table = _table(state)
    with pytest.raises(IllegalReplicaEvent):
        table.apply_event("r1", event, 1)
    assert table["r1"].state is state


@pytest.mark.parametrize("state", sorted(SLEEPING))
def test_sleeper_that_ends_holds_no_slot(state: ReplicaState) -> None:
    """A replica frees its slot when it falls asleep, so its end neither takes nor frees one."""
    table = ReplicaTable(1)
    table.add(Replica("r1", state, 0, key=KEYS[0]))
    table.add(Replica("r2", ReplicaState.READY, 0, key=KEYS[1]))
    table.apply_event("r1", ReplicaEvent.END, 1)
    assert (table.held_slots, table.leaving_count()) == (1, 0)
    table.remove("r2")
    table.add_start(KEYS[1], 2)


def test_duplicate_runtime_id_is_refused() -> None:
    table = _table(ReplicaState.STANDBY)
    with pytest.raises(ValueError, match="exists"):
        table.add(Replica("r1", ReplicaState.FORKED, 0))


def test_integrity_check_finds_broken_index() -> None:
    """Negative control: a replica changed without its index fails the check."""
    table = _table(ReplicaState.READY)
    table.check_integrity()
    table._replicas["r1"] = replace(table._replicas["r1"], key=KEYS[1])
    with pytest.raises(AssertionError):
        table.check_integrity()
