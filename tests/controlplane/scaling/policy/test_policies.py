"""Small pure decisions of the control plane as tables: version states, standby forks, reclaimed slots, threads,
memory.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.registry.policy.version_lifecycle import (
    IllegalVersionEvent,
    VersionEvent,
    VersionState,
    is_version_fault,
    next_state,
)
from controlplane.scaling.policy.reclaim import SlotHolder, choose_victim
from controlplane.scaling.policy.standby_sizing import (
    READY_HOLDS_CORES_S,
    RESTORE_HOLDS_CORES_S,
    PoolFacts,
    backoff_s,
    choose_fork_count,
    holds_cores,
)
from kelvin.contracts.serving.machine import MIN_KV_BYTES, available_bytes, kv_bytes_for, threads_for

S, E = VersionState, VersionEvent


@pytest.mark.parametrize(
    ("state", "event", "want"),
    [
        pytest.param(S.ABSENT, E.PUBLISHED, S.READY, id="publishing makes it"),
        pytest.param(S.READY, E.PUBLISHED, S.READY, id="publishing again changes nothing"),
        pytest.param(S.READY, E.FOUND_BROKEN, S.FAULTY, id="broken bytes make it faulty"),
        pytest.param(S.FAULTY, E.RESTORED, S.READY, id="a restore that works heals it"),
        pytest.param(S.FAULTY, E.PUBLISHED, S.READY, id="a new publication heals it"),
        pytest.param(S.ABSENT, E.RESTORED, None, id="a version that was never published can't be restored"),
        pytest.param(S.ABSENT, E.FOUND_BROKEN, None, id="a version that was never published can't be broken"),
    ],
)
def test_version_moves_are_in_the_table_or_refused(
    state: VersionState, event: VersionEvent, want: VersionState | None
) -> None:
    if want is None:
        with pytest.raises(IllegalVersionEvent):
            next_state(state, event)
    else:
        assert next_state(state, event) is want


@pytest.mark.parametrize(
    ("code", "want"),
    [
        pytest.param("chunk_corrupt", True, id="corrupt bytes mark the version"),
        pytest.param("probe_failed", True, id="a wrong probe answer marks the version"),
        pytest.param("unavailable", False, id="a cache that is away does not mark it"),
        pytest.param("overloaded", False, id="a full machine does not mark it"),
    ],
)
def test_only_byte_failures_mark_a_version_faulty(code: str, want: bool) -> None:
    """A fault of the machine does not mark a version."""
    assert is_version_fault(code) is want


def pool(
    *, size: int = 1, parked: int = 0, forked: int = 0, waiting: int = 0, starting: int = 0, cores: int = 2
) -> PoolFacts:
    return PoolFacts(size, parked, forked, waiting, starting, cores)


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        pytest.param(pool(), 1, id="an empty pool is filled"),
        pytest.param(pool(parked=1), 0, id="a full pool is left alone"),
        pytest.param(pool(forked=1), 0, id="a fork under way counts"),
        pytest.param(pool(starting=1), 0, id="a start takes both cores: the refill waits"),
        pytest.param(pool(starting=1, waiting=2), 2, id="waiting starts are forked for at once"),
        pytest.param(pool(starting=1, waiting=2, forked=2), 0, id="waiting starts are forked for once"),
        pytest.param(pool(size=4, starting=1, cores=3), 1, id="a third core is free beside it"),
        pytest.param(pool(size=4, starting=1, cores=16), 4, id="many cores are free beside it"),
        pytest.param(pool(size=4), 2, id="at most one fork per core"),
        pytest.param(pool(size=4, forked=2), 0, id="every core has a fork already"),
        pytest.param(pool(size=4, forked=1), 1, id="one core is free for a fork"),
        pytest.param(pool(size=4, waiting=3, cores=1), 3, id="a waiting start does not wait for cores"),
        pytest.param(pool(size=1, cores=1), 1, id="one core is enough while nothing starts"),
        pytest.param(pool(waiting=1), 2, id="one for the waiting start, one for the pool"),
        pytest.param(pool(size=0), 0, id="no pool, no fork"),
        pytest.param(pool(size=0, waiting=3), 3, id="no pool, one fork per waiting start"),
    ],
)
def test_to_fork(facts: PoolFacts, want: int) -> None:
    """The pool is refilled outside cold starts, as fast as the cores allow."""
    assert choose_fork_count(facts) == want


def test_start_holds_cores_until_first_prefill() -> None:
    """A start counts from its bind to its first prefill. A long restore waits for bytes and does not count."""
    assert holds_cores(0.0, restoring=True)
    assert not holds_cores(RESTORE_HOLDS_CORES_S, restoring=True)
    assert holds_cores(0.0, restoring=False)
    assert not holds_cores(READY_HOLDS_CORES_S, restoring=False)


@given(st.integers(0, 100))
def test_backoff_grows_and_is_bounded(failures: int) -> None:
    """It is zero without a failure and at most one second."""
    assert 0.0 <= backoff_s(failures) <= backoff_s(failures + 1) <= 1.0
    assert (backoff_s(failures) == 0.0) == (failures == 0)


def holder(name: str, *, ready: int = 1, live: int = 1, minimum: int = 0, asked_s: float = 0.0) -> SlotHolder[str]:
    return SlotHolder(name, ready, live, minimum, asked_s)


@pytest.mark.parametrize(
    ("holders", "want"),
    [
        pytest.param([], None, id="no version holds a slot"),
        pytest.param(
            [holder("a", asked_s=5), holder("b", asked_s=3)], "b", id="the longest-idle version gives its slot"
        ),
        pytest.param([holder("a", asked_s=99)], None, id="a version with a recent request stays"),
        pytest.param([holder("a", minimum=1)], None, id="a minimum is kept"),
        pytest.param([holder("a", ready=0)], None, id="a restoring replica stays"),
        pytest.param([holder("a", ready=1, live=2)], None, id="a version that also restores stays"),
        pytest.param([holder("a", ready=0, live=0)], None, id="a version without a slot frees none"),
    ],
)
def test_only_idle_versions_give_up_slots(holders: list[SlotHolder[str]], want: str | None) -> None:
    """A version never goes below its minimum."""
    assert choose_victim(holders, now=100.0) == want


@pytest.mark.parametrize(
    ("cores", "replicas", "cap", "want"),
    [
        pytest.param(2, 1, 1, 1, id="the cap"),
        pytest.param(8, 2, 16, 4, id="an equal share"),
        pytest.param(2, 5, 16, 1, id="at least one"),
        pytest.param(8, 0, 16, 8, id="no other replica"),
    ],
)
def test_threads(cores: int, replicas: int, cap: int, want: int) -> None:
    """The rule is max(1, cores / replicas), capped."""
    assert threads_for(cores, replicas, cap) == want


def test_kv_memory_is_what_fits() -> None:
    """KV memory is at most half of the available memory, and at least MIN_KV_BYTES."""
    assert kv_bytes_for(512 << 20, 8 << 30) == 512 << 20
    assert kv_bytes_for(512 << 20, 600 << 20) == 300 << 20
    assert kv_bytes_for(512 << 20, 0) == MIN_KV_BYTES
    assert available_bytes("MemTotal: 5 kB\nMemAvailable:   1024 kB\n") == 1 << 20
    with pytest.raises(ValueError, match="MemAvailable"):
        available_bytes("MemTotal: 5 kB\n")
