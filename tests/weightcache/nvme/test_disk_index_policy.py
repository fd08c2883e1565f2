"""The disk index stays within its budget through any sequence of writes, reads, evictions and losses."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightcache.nvme.disk_index_policy import EVICTION_DIVISOR, DiskIndex
from weightcache.sources.policy.fair_read_queue import ChunkKey

BUDGET = 10
KEYS = st.tuples(st.sampled_from("ab"), st.sampled_from("uvwxyz"))


class DiskMachine(RuleBasedStateMachine):
    """Compares the index with a simple model of the files on disk and the files being written."""

    def __init__(self) -> None:
        super().__init__()
        self.index = DiskIndex(BUDGET)
        self.now = 0.0
        self.readable: dict[ChunkKey, int] = {}
        self.writing: dict[ChunkKey, int] = {}

    @rule(key=KEYS, length=st.integers(1, BUDGET + 1))
    def admit(self, key: ChunkKey, length: int) -> None:
        self.now += 1
        gone = self.index.admit(key, length, self.now)
        if gone is None:
            in_flight = sum(self.writing.values())
            assert key in self.readable or key in self.writing or in_flight + length > BUDGET
            return
        for old in gone:
            del self.readable[old]
        self.writing[key] = length

    @precondition(lambda self: self.writing)
    @rule(good=st.booleans(), which=st.integers(0, 99))
    def finish(self, good: bool, which: int) -> None:
        key = sorted(self.writing)[which % len(self.writing)]
        length = self.writing.pop(key)
        if good:
            self.index.mark_written(key)
            self.readable[key] = length
        else:
            self.index.drop(key)

    @rule(key=KEYS)
    def touch(self, key: ChunkKey) -> None:
        self.now += 1
        self.index.touch(key, self.now)

    @rule(key=KEYS)
    def lose(self, key: ChunkKey) -> None:
        if key not in self.writing:
            self.index.drop(key)
            self.readable.pop(key, None)

    @invariant()
    def sound(self) -> None:
        self.index.check_integrity()
        assert self.index.total_bytes == sum(self.readable.values()) + sum(self.writing.values()) <= BUDGET
        assert {key for key in self.readable if self.index.is_readable(key)} == set(self.index.select(None, None))
        assert self.index.file_count == len(self.readable)
        assert not any(self.index.is_readable(key) for key in self.writing), "a file that is being written is readable"


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=100, stateful_step_count=40)


def test_touched_files_stay() -> None:
    index = DiskIndex(3)
    for now, name in enumerate("xyz"):
        index.add_existing(("a", name), 1, float(now))
    index.touch(("a", "x"), 9.0)
    assert index.admit(("a", "new"), 2, 10.0) == (("a", "y"), ("a", "z"))


def test_files_used_before_the_clock_was_set_back_are_evicted() -> None:
    """After the clock was set back by a year, files that are not read are still evicted before new ones."""
    index, ahead = DiskIndex(4), 1e9 + 365 * 86_400.0
    for number in range(4):
        assert index.admit(("a", f"old{number}"), 1, ahead) == ()
        index.mark_written(("a", f"old{number}"))
    gone: list[ChunkKey] = []
    for minute in range(4):
        evicted = index.admit(("a", f"new{minute}"), 1, 1e9 + 60 * minute)
        assert evicted is not None
        gone += evicted
        index.mark_written(("a", f"new{minute}"))
    assert sorted(gone) == [("a", f"old{number}") for number in range(4)]


def test_a_small_file_costs_more_for_its_size() -> None:
    """If every fetch has a round trip, small files cost more per byte to fetch and outlive large ones."""
    index = DiskIndex(1000, reload_s=lambda length: 0.1 + length / 1e6)
    index.add_existing(("a", "small"), 10, 0.0)
    index.add_existing(("a", "large"), 900, 1.0)
    assert index.admit(("a", "new"), 500, 2.0) == (("a", "large"),)


def test_tenant_over_its_quota_is_evicted_first() -> None:
    """A tenant over its quota is evicted first and takes nothing of others. Alone, it may fill the disk."""
    index = DiskIndex(4, quota_bytes=2)
    for now, name in enumerate("xyzw"):
        index.add_existing(("a", name), 1, float(now))
    assert index.admit(("b", "x"), 1, -9.0) == (("a", "x"),)
    index.mark_written(("b", "x"))
    assert index.admit(("a", "v"), 2, 9.0) == (("a", "y"), ("a", "z")), "b's file is older, but a is over its quota"
    index.mark_written(("a", "v"))
    assert index.bytes_by_tenant == {"a": 3, "b": 1}
    assert index.admit(("a", "u"), 3, 9.0) is None, "larger than its quota"
    index.check_integrity()


def test_a_full_disk_of_many_files() -> None:
    """Files are ranked in batches, not for each admission. The least recently read go, at most a batch too early."""
    ranked: Counter[int] = Counter()

    def reload_s(length: int) -> float:
        ranked[length] += 1
        return 1.0

    count, more = 20_000, 1000
    index = DiskIndex(count, reload_s=reload_s)
    for number in range(count):
        index.add_existing(("a", f"{number}"), 1, float(number))
    gone: list[ChunkKey] = []
    for number in range(count, count + more):
        evicted = index.admit(("a", f"{number}"), 1, float(number))
        assert evicted is not None
        gone += evicted
    assert ranked[1] < more * count / 100
    assert gone == [("a", f"{number}") for number in range(len(gone))]
    assert more <= len(gone) < more + count // EVICTION_DIVISOR
    index.check_integrity()


def test_many_small_quotas() -> None:
    """A tenant at its quota, while no other is over its own, loses at most an eighth of its files. Others lose none."""
    index = DiskIndex(6400, quota_bytes=64)
    for number in range(6400):
        index.add_existing((f"t{number % 100}", f"{number}"), 1, float(number))
    assert index.admit(("t7", "new"), 1, 6400.0) == tuple(("t7", f"{number}") for number in range(7, 807, 100))
    index.check_integrity()


def test_a_batch_that_can_not_be_had() -> None:
    """Nearly all of the tenant's files are being written. A new file evicts the one that is not."""
    index = DiskIndex(640, quota_bytes=80)
    index.add_existing(("a", "old"), 1, 998.0)
    for number in range(79):
        index.admit(("a", f"{number}"), 1, 0.0)
    for number in range(560):
        index.add_existing((f"t{number % 8}", f"{number}"), 1, float(number))
    assert index.admit(("a", "new"), 1, 999.0) == (("a", "old"),)


def test_a_batch_within_a_quota() -> None:
    """A tenant within its quota loses none of its files to make room ahead: an older one of another tenant goes."""
    index = DiskIndex(1000, quota_bytes=500)
    for number in range(505):
        index.add_existing(("b" if number < 300 else "c", f"{number}"), 1, float(number))
    for number in range(495):
        index.add_existing(("a", f"{number}"), 1, 900.0)
    assert index.admit(("a", "new"), 1, 999.0) == tuple(("b", f"{number}") for number in range(5))


def test_a_smaller_budget() -> None:
    """A smaller budget at the start removes the oldest files."""
    index = DiskIndex(2)
    for now, name in enumerate("xyz"):
        index.add_existing(("a", name), 1, float(now))
    assert index.trim() == (("a", "x"),)
    assert index.trim() == ()


@pytest.mark.parametrize(
    ("tenant", "digests", "want"),
    [
        pytest.param(None, None, 3, id="everything"),
        pytest.param("a", None, 2, id="one tenant's"),
        pytest.param("a", frozenset({"x", "missing"}), 1, id="one tenant's, of a version"),
        pytest.param("c", None, 0, id="a tenant without files"),
    ],
)
def test_select_omits_files_being_written(tenant: str | None, digests: frozenset[str] | None, want: int) -> None:
    index = DiskIndex(9)
    for key in (("a", "x"), ("a", "y"), ("b", "x")):
        index.add_existing(key, 1, 0.0)
    index.admit(("a", "z"), 1, 0.0)
    assert len(index.select(tenant, digests)) == want


def test_integrity_check_visits_each_file_once() -> None:
    """A check that is quadratic in tenants would block the agent for too long."""
    compared = 0

    class Tenant(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    index = DiskIndex(1 << 20)
    for number in range(2500):
        index.add_existing((Tenant(number % 50), f"{number}"), 1, 0.0)
    compared = 0
    index.check_integrity()
    assert compared < 10 * 2500


def test_integrity_control() -> None:
    """Negative control: the check finds a wrong total."""
    index = DiskIndex(9)
    index.add_existing(("a", "x"), 1, 0.0)
    index._total += 1
    with pytest.raises(AssertionError):
        index.check_integrity()
