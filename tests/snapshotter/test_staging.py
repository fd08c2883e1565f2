"""Staged chunks survive a kill, belong to one tenant, and are bounded in number and age."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.errors import CapacityExceeded, Conflict, NotFound, Overloaded, Refused
from contracts.manifest import Engine, Limits
from snapshotter.plans import PlanRecord
from snapshotter.staging import IDLE_S, Staging, new_plan_id
from tests.snapshotter.policy.test_sealing import FACTS

A, B, C = "a" * 64, "b" * 64, "c" * 64


def record(tenant: str = "acme", plan_id: str | None = None) -> PlanRecord:
    """A plan of nothing: staging does not look inside."""
    return PlanRecord(
        plan_id=plan_id or new_plan_id(),
        tenant=tenant,
        model="toy",
        format=1,
        chunk_bytes=8192,
        engine=Engine(1, "T", "float32"),
        limits=Limits(1, 1),
        files=(),
        tensors=(),
        chunks=(),
        file_digests=(),
        gate=FACTS,
    )


def opened(
    staging: Staging, tenant: str = "acme", now_s: float = 0.0, plan_id: str | None = None, **chunks: bytes
) -> str:
    """A new plan, last active at `now_s`."""
    plan = record(tenant, plan_id)
    staging.open(plan, {{"a": A, "b": B, "c": C}[name]: data for name, data in chunks.items()}, now_s)
    staging.touch(tenant, plan.plan_id, now_s)
    return plan.plan_id


def failure_of(call: object, *args: object) -> object:
    assert callable(call)
    with pytest.raises(Refused) as caught:
        call(*args)
    return caught.value.failure


def test_round_trip(tmp_path: Path) -> None:
    """Plans, digests and chunks are there for another process that opens the same directory."""
    plan = record()
    first = Staging(tmp_path, 2)
    first.open(plan, {A: b"one"}, 0.0)
    first.put("acme", plan.plan_id, B, b"two")
    first.declare("acme", plan.plan_id, (A, B))
    second = Staging(tmp_path, 2)
    assert second.load("acme", plan.plan_id) == plan
    assert second.declared("acme", plan.plan_id) == (A, B)
    assert second.adopt("acme", plan.plan_id, [A, B, C]) == {A, B}
    assert second.read("acme", plan.plan_id, B) == b"two"


def test_tenants_are_apart(tmp_path: Path) -> None:
    """Another tenant's plan id is as unknown as one that never was, and its chunks are not taken over."""
    staging = Staging(tmp_path, 2)
    theirs = opened(staging, "acme", a=b"one")
    mine = opened(staging, "umbrella")
    assert failure_of(staging.load, "umbrella", theirs) == NotFound("plan", theirs)
    assert staging.adopt("umbrella", mine, [A]) == set()
    assert isinstance(failure_of(staging.read, "umbrella", mine, A), Conflict)


@pytest.mark.parametrize("plan_id", ["", "..", "../acme", "x" * 32, "A" * 32, "0" * 31, "0" * 33, "/" + "0" * 31])
def test_a_plan_id_is_no_path(tmp_path: Path, plan_id: str) -> None:
    """What is not an id that we made is unknown, before any path is built of it."""
    assert isinstance(failure_of(Staging(tmp_path, 2).load, "acme", plan_id), NotFound)


def test_a_cut_push_is_taken_up(tmp_path: Path) -> None:
    """A new plan of the tenant finds what an older one had staged, and keeps it when that one is dropped."""
    staging = Staging(tmp_path, 3)
    older = opened(staging, a=b"one", b=b"two")
    newer = opened(staging)
    assert staging.adopt("acme", newer, [A, C]) == {A}
    staging.drop("acme", older)
    assert staging.read("acme", newer, A) == b"one"


def test_bounds(tmp_path: Path) -> None:
    """The longest idle push makes room; one in use or lately active does not."""
    staging = Staging(tmp_path, 2)
    first, second = opened(staging, now_s=0.0), opened(staging, now_s=10.0)
    assert failure_of(opened, staging, "acme", IDLE_S - 1) == Overloaded("the list of open pushes", 2, 30.0)
    opened(staging, "umbrella", IDLE_S - 1)  # each tenant has its own bound
    with staging.hold(first):
        assert failure_of(opened, staging, "acme", IDLE_S + 1) == Overloaded("the list of open pushes", 2, 30.0)
        third = opened(staging, now_s=IDLE_S + 10)
        assert isinstance(failure_of(staging.load, "acme", second), NotFound)
    staging.load("acme", first)
    staging.load("acme", third)
    staging.check_integrity()


def test_sweep(tmp_path: Path) -> None:
    """What stood still for too long goes, unless a commit holds it."""
    staging = Staging(tmp_path, 4)
    old, held, young = (opened(staging, now_s=at) for at in (0.0, 0.0, 60.0))
    with staging.hold(held):
        assert staging.sweep(now_s=101.0, max_age_s=100.0) == 1
    assert isinstance(failure_of(staging.load, "acme", old), NotFound)
    staging.load("acme", held)
    assert staging.sweep(now_s=101.0, max_age_s=100.0) == 1
    staging.load("acme", young)


def test_order_of_calls(tmp_path: Path) -> None:
    """A chunk is taken only after it was declared; a damaged record of either is as if it were not there."""
    staging = Staging(tmp_path, 2)
    plan = opened(staging)
    assert isinstance(failure_of(staging.declared, "acme", plan), Conflict)
    (tmp_path / "acme" / plan / "digests.json").write_bytes(b"{")
    assert isinstance(failure_of(staging.declared, "acme", plan), Conflict)
    (tmp_path / "acme" / plan / "plan.json").write_bytes(b"")
    assert isinstance(failure_of(staging.load, "acme", plan), NotFound)


def test_room(tmp_path: Path) -> None:
    """What the disk can't take is refused before it is sent."""
    staging = Staging(tmp_path, 2)
    staging.check_room(1)
    assert isinstance(failure_of(staging.check_room, 1 << 60), CapacityExceeded)


KILLED = """
import os, sys
from pathlib import Path
from snapshotter.staging import Staging
staging = Staging(Path(sys.argv[1]), 2)
Path.rename = lambda *_: os.kill(os.getpid(), 9)
staging.put("acme", sys.argv[2], sys.argv[3], b"half")
"""


def test_a_kill_leaves_no_half_chunk(tmp_path: Path) -> None:
    """Killed before its last step, a put has left nothing under the digest."""
    staging = Staging(tmp_path, 2)
    plan = opened(staging)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), plan, A], timeout=60, check=False)
    assert killed.returncode == -9
    assert os.listdir(tmp_path / "acme" / plan / "chunks")  # it had begun
    assert staging.adopt("acme", plan, [A]) == set()


def test_a_kill_leaves_no_half_plan(tmp_path: Path) -> None:
    """What a killed process had not yet opened is removed by the next one."""
    (tmp_path / "acme" / f".{'0' * 32}" / "chunks").mkdir(parents=True)
    staging = Staging(tmp_path, 1)
    assert os.listdir(tmp_path / "acme") == []
    opened(staging)


@settings(max_examples=30, stateful_step_count=30)
class Machine(RuleBasedStateMachine):
    """Random pushes of two tenants against a model: what was staged and not dropped is there, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.TemporaryDirectory()
        self.staging = Staging(Path(self.root.name), 3)
        self.now_s = 0.0
        self.plans: dict[str, tuple[str, set[str]]] = {}
        self.made = 0

    def teardown(self) -> None:
        self.root.cleanup()

    @rule(tenant=st.sampled_from(["acme", "umbrella"]), wait_s=st.sampled_from([1.0, IDLE_S, 5000.0]))
    def open(self, tenant: str, wait_s: float) -> None:
        self.now_s += wait_s
        self.made += 1
        try:
            plan = opened(self.staging, tenant, self.now_s, f"{self.made:032x}")
        except Refused as refused:
            if not isinstance(refused.failure, Overloaded):
                raise
            return
        self.plans = {p: kept for p, kept in self.plans.items() if self._is_there(kept[0], p)}
        self.plans[plan] = (tenant, set())

    @precondition(lambda self: self.plans)
    @rule(data=st.data(), digest=st.sampled_from([A, B, C]))
    def put(self, data: st.DataObject, digest: str) -> None:
        plan = data.draw(st.sampled_from(sorted(self.plans)))
        tenant, staged = self.plans[plan]
        self.staging.put(tenant, plan, digest, digest.encode())
        staged.add(digest)

    @precondition(lambda self: self.plans)
    @rule(data=st.data(), wanted=st.sets(st.sampled_from([A, B, C])))
    def adopt(self, data: st.DataObject, wanted: set[str]) -> None:
        plan = data.draw(st.sampled_from(sorted(self.plans)))
        tenant, staged = self.plans[plan]
        anywhere = set().union(*(found for owner, found in self.plans.values() if owner == tenant))
        assert self.staging.adopt(tenant, plan, wanted) == wanted & anywhere
        staged |= wanted & anywhere

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        plan = data.draw(st.sampled_from(sorted(self.plans)))
        tenant, _ = self.plans.pop(plan)
        self.staging.drop(tenant, plan)

    @rule(max_age_s=st.sampled_from([10.0, 3000.0]))
    def sweep(self, max_age_s: float) -> None:
        self.staging.sweep(self.now_s, max_age_s)
        self.plans = {p: kept for p, kept in self.plans.items() if self._is_there(kept[0], p)}

    @invariant()
    def holds(self) -> None:
        self.staging.check_integrity()
        for plan, (tenant, staged) in self.plans.items():
            for digest in staged:
                assert self.staging.read(tenant, plan, digest) == digest.encode()

    def _is_there(self, tenant: str, plan: str) -> bool:
        try:
            self.staging.load(tenant, plan)
        except Refused:
            return False
        return True


TestMachine = Machine.TestCase
