"""The host index never lends a slab twice, mixes tenants or evicts slabs in use, and admits all that fits."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kelvin.contracts.artifact_errors import ChunkCorrupt
from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import CapacityExceeded, Failure, Refused
from kelvin.contracts.traffic_errors import Overloaded
from weightcache.client.lease_protocol import HUGE_PAGE
from weightcache.host.policy.extents import SlabRange, count_new_slabs, distinct_chunks
from weightcache.host.policy.host_index import HostIndex, Reservation

SLAB = HUGE_PAGE
Chunks = list[tuple[str, int]]


def version(*names: str, length: int = SLAB // 4) -> Chunks:
    return [(name, length) for name in names]


def finish_loads(index: HostIndex, reservation: Reservation) -> Reservation:
    """Mark the reservation's loads as successful."""
    for digest in reservation.to_load:
        index.mark_ready(reservation.tenant, digest)
    return reservation


class HostMachine(RuleBasedStateMachine):
    """Reservations, loads, holders and evictions in any order, compared with a simple model of the slabs in use."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HostIndex(SLAB, 4)
        self.now = 0.0
        self.reserved: list[Reservation] = []
        self.loading: list[tuple[str, str, int]] = []
        self.holders: dict[int, set[int]] = {}
        self.alive: set[int] = set()
        self.ended: set[int] = set()
        self.given: list[SlabRange] = []  # to any chunk, ever

    def _end(self, slabs: tuple[int, ...]) -> None:
        used = {slab for reservation in self.reserved for slab in reservation.slabs}
        used |= {slab for held in self.holders.values() for slab in held} | {slab for *_, slab in self.loading}
        assert not used & set(slabs), "a slab in use was evicted"
        assert set(slabs) <= self.alive
        assert not self.ended & set(slabs), "a slab ended twice"
        self.alive -= set(slabs)
        self.ended |= set(slabs)

    @rule(
        tenant=st.sampled_from(["a", "b"]),
        names=st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=8),
        size=st.sampled_from([PAGE_BYTES, SLAB // 3 // PAGE_BYTES * PAGE_BYTES, SLAB]),
    )
    def reserve(self, tenant: str, names: list[str], size: int) -> None:
        self.now += 1
        chunks = [(f"{name}{size}", size) for name in names]
        idle = not (self.reserved or self.loading or self.holders)
        got = self._reserved(tenant, chunks)
        if isinstance(got, Failure):
            alone = count_new_slabs(distinct_chunks(chunks), (), SLAB)
            assert isinstance(got, CapacityExceeded if alone > 4 else Overloaded)
            assert alone > 4 or not idle, "a version that fits an idle tier was refused"
            return
        self._end(got.evicted_slabs)
        assert not self.ended & set(got.new_slabs)
        self.alive |= set(got.new_slabs)
        assert set(got.slabs) <= self.alive
        assert {digest for digest, _ in chunks} == set(got.places)
        assert set(got.ready) == set(got.places) - set(got.to_load) - set(got.to_await)
        assert all(self.index.is_ready(tenant, digest) for digest in got.ready)
        for at in (got.places[digest] for digest in got.to_load):
            apart = all(at.slab != old.slab or at.end <= old.offset or old.end <= at.offset for old in self.given)
            assert apart, "two chunks share a place"
            self.given.append(at)
        for digest in got.to_load:
            slab = got.places[digest].slab
            self.index.pin((slab,))
            self.loading.append((tenant, digest, slab))
        self.reserved.append(got)

    def _reserved(self, tenant: str, chunks: Chunks) -> Reservation | Failure:
        try:
            return self.index.reserve(tenant, chunks, self.now)
        except Refused as refused:
            return refused.failure

    @precondition(lambda self: self.loading)
    @rule(good=st.booleans(), which=st.integers(0, 99))
    def finish(self, good: bool, which: int) -> None:
        tenant, digest, slab = self.loading.pop(which % len(self.loading))
        if good:
            self.index.mark_ready(tenant, digest)
        else:
            self.index.drop(tenant, digest)
        assert self.index.is_ready(tenant, digest) == good
        self._end(self.index.unpin((slab,)))

    @precondition(lambda self: self.reserved)
    @rule(holder=st.none() | st.integers(0, 3), which=st.integers(0, 99))
    def answer(self, holder: int | None, which: int) -> None:
        """The reservation's owner has finished: with a lease for a process, or without one."""
        self.now += 1
        done = self.reserved.pop(which % len(self.reserved))
        if holder is not None:
            self.index.add_holder(holder, done.slabs, self.now)
            self.holders.setdefault(holder, set()).update(done.slabs)
        self._end(self.index.unpin(done.slabs))

    @precondition(lambda self: self.reserved)
    @rule(holder=st.integers(0, 3), which=st.integers(0, 99))
    def lend(self, holder: int, which: int) -> None:
        """A process gets the slabs while they are being filled."""
        self.now += 1
        slabs = self.reserved[which % len(self.reserved)].slabs
        self.index.add_holder(holder, slabs, self.now)
        self.holders.setdefault(holder, set()).update(slabs)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def die(self, which: int) -> None:
        holder = sorted(self.holders)[which % len(self.holders)]
        del self.holders[holder]
        self._end(self.index.drop_holder(holder))

    @rule(tenant=st.sampled_from([None, "a", "b"]))
    def evict(self, tenant: str | None) -> None:
        ended, busy = self.index.evict(tenant, None)
        self._end(ended)
        assert busy <= self.index.busy_count

    @invariant()
    def sound(self) -> None:
        self.index.check_integrity()
        assert self.index.slab_count == len(self.alive) <= 4


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=150, stateful_step_count=40)


def test_shared_chunks_are_there_once() -> None:
    """A second version's reservation loads only the chunks that the first one did not."""
    index = HostIndex(SLAB, 4)
    first = finish_loads(index, index.reserve("a", version("x", "y"), 1.0))
    second = index.reserve("a", version("y", "z"), 2.0)
    assert (second.to_load, second.to_await) == (("z",), ())
    assert second.places["y"] == first.places["y"]


def test_a_load_in_progress_is_waited_for() -> None:
    """A chunk that another reservation loads is neither ready nor loaded again."""
    index = HostIndex(SLAB, 4)
    index.reserve("a", version("x"), 1.0)
    second = index.reserve("a", version("x", "y"), 2.0)
    assert (second.to_load, second.to_await) == (("y",), ("x",))


def test_tenants_share_nothing() -> None:
    """The same chunk of another tenant is loaded into another slab."""
    index = HostIndex(SLAB, 4)
    first = finish_loads(index, index.reserve("a", version("x"), 1.0))
    second = index.reserve("b", version("x"), 2.0)
    assert second.to_load == ("x",)
    assert not set(first.slabs) & set(second.slabs)


def test_least_recently_used_goes_first() -> None:
    """A lease renews its slabs, and the least recently used slab is evicted."""
    index = HostIndex(SLAB, 2)
    older = finish_loads(index, index.reserve("a", [("x", SLAB)], 1.0))
    newer = finish_loads(index, index.reserve("a", [("y", SLAB)], 2.0))
    index.unpin(older.slabs)
    index.unpin(newer.slabs)
    index.add_holder(1, older.slabs, 3.0)
    index.drop_holder(1)
    assert index.reserve("a", [("z", SLAB)], 4.0).evicted_slabs == newer.slabs


def test_a_living_holder_keeps_its_slab() -> None:
    """A slab that a live process received is not reused, even without a lease. The death of the process frees it."""
    index = HostIndex(SLAB, 1)
    first = finish_loads(index, index.reserve("a", [("x", SLAB)], 1.0))
    index.add_holder(7, first.slabs, 1.0)
    index.unpin(first.slabs)
    with pytest.raises(Refused) as refused:
        index.reserve("a", [("y", SLAB)], 2.0)
    assert refused.value.failure == Overloaded("the host tier of the weight cache", 1, 1.0, "slabs")
    assert index.evict(None, None) == ((), 1)
    index.drop_holder(7)
    assert index.reserve("a", [("y", SLAB)], 3.0).evicted_slabs == first.slabs


def test_scattered_chunks_do_not_keep_their_version_out() -> None:
    """If a version has one chunk in each slab, those chunks are evicted to make room for the rest of it."""
    index = HostIndex(SLAB, 3)
    for number, name in enumerate("xyz"):
        mixed = finish_loads(index, index.reserve("a", [(name, SLAB // 4), (f"other{number}", SLAB // 4 * 3)], 1.0))
        index.unpin(mixed.slabs)
    wide = [("x", SLAB // 4), ("y", SLAB // 4), ("z", SLAB // 4), ("big", SLAB), ("bigger", SLAB)]
    assert len(index.reserve("a", wide, 2.0).slabs) == 3
    index.check_integrity()


def test_costlier_slab_is_evicted_later() -> None:
    """The slab that costs less to reload goes first, although it was used later; after ten hours the older one goes."""
    for now, gone in ((3.0, "near"), (36_000.0, "far")):
        index = HostIndex(SLAB, 2, reload_s=lambda _, chunks: sum(9.0 if name == "far" else 0.1 for name, _ in chunks))
        slabs = {}
        for name, used_at in (("far", 1.0), ("near", now - 1.0)):
            arrived = finish_loads(index, index.reserve("a", [(name, SLAB)], used_at))
            index.unpin(arrived.slabs)
            slabs[name] = arrived.slabs
        assert index.reserve("a", [("new", SLAB)], now).evicted_slabs == slabs[gone]


def test_a_tenant_beyond_its_quota_takes_nothing_of_others() -> None:
    """A tenant may exceed its quota while there is room. Others take from it first, and it only from itself."""
    index = HostIndex(SLAB, 3, quota=1)
    mine = [finish_loads(index, index.reserve("a", [(name, SLAB)], 1.0)) for name in "xy"]
    for each in mine:
        index.unpin(each.slabs)
    theirs = finish_loads(index, index.reserve("b", [("x", SLAB)], 0.0))
    index.unpin(theirs.slabs)
    assert index.slabs_by_tenant == {"a": 2, "b": 1}
    again = finish_loads(index, index.reserve("a", [("z", SLAB)], 2.0))
    assert set(again.evicted_slabs) < {slab for each in mine for slab in each.slabs}, "though b's is the oldest"
    third = finish_loads(index, index.reserve("c", [("x", SLAB)], 3.0))
    assert index.slabs_by_tenant == {"a": 1, "b": 1, "c": 1}
    index.add_holder(1, (*again.slabs, *third.slabs), 3.0)
    with pytest.raises(Refused, match="this tenant's share of the weight cache is full"):
        index.reserve("a", [("w", SLAB)], 4.0)
    with pytest.raises(Refused, match=r"one tenant may have \(KELVIN_HOST_QUOTA\): needs 2, has 1"):
        index.reserve("a", [("u", SLAB), ("v", SLAB)], 4.0)
    index.check_integrity()


@pytest.mark.parametrize(
    ("chunks", "failure"),
    [
        pytest.param(
            [("x", SLAB + PAGE_BYTES)],
            CapacityExceeded("bytes of a slab of the weight cache (KELVIN_SLAB_BYTES)", SLAB + PAGE_BYTES, SLAB),
            id="a chunk longer than a slab",
        ),
        pytest.param(
            [(f"x{n}", SLAB) for n in range(3)],
            CapacityExceeded("slabs of the weight cache", 3, 2),
            id="a version larger than the tier",
        ),
    ],
)
def test_version_that_can_never_fit_is_refused(chunks: Chunks, failure: CapacityExceeded) -> None:
    """The refusal is permanent, and the index is unchanged."""
    index = HostIndex(SLAB, 2)
    finish_loads(index, index.reserve("a", version("y"), 1.0))
    with pytest.raises(Refused) as refused:
        index.reserve("a", chunks, 2.0)
    assert refused.value.failure == failure
    assert index.is_ready("a", "y")


def test_one_digest_two_lengths() -> None:
    """A manifest that gives a loaded chunk another length is refused: its mapping would be wrong."""
    index = HostIndex(SLAB, 2)
    finish_loads(index, index.reserve("a", [("x", PAGE_BYTES)], 1.0))
    with pytest.raises(Refused) as refused:
        index.reserve("a", [("x", 2 * PAGE_BYTES)], 2.0)
    assert refused.value.failure == ChunkCorrupt("x", "host")


def test_failed_loads_leave_no_slab_behind() -> None:
    """A slab whose loads all failed ends as soon as nothing uses it."""
    index = HostIndex(SLAB, 1)
    failed = index.reserve("a", version("x", "y"), 1.0)
    for digest in failed.to_load:
        index.drop("a", digest)
    assert index.unpin(failed.slabs) == failed.slabs
    assert index.slab_count == 0


def test_integrity_control() -> None:
    """Negative control: the check finds two chunks in one place, and a chunk in another tenant's slab."""
    index = HostIndex(SLAB, 2)
    finish_loads(index, index.reserve("a", version("x", "y"), 1.0))
    entries = index._chunks
    kept = entries["a", "y"].place
    entries["a", "y"].place = entries["a", "x"].place
    with pytest.raises(AssertionError, match="overlap"):
        index.check_integrity()
    entries["a", "y"].place = kept
    index.check_integrity()
    entries["b", "y"] = entries.pop(("a", "y"))
    with pytest.raises(AssertionError, match="one tenant"):
        index.check_integrity()
