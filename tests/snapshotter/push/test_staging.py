"""Staged chunks survive a kill, belong to one tenant, and are bounded in number and age."""

import errno
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from kelvin.contracts.artifacts.manifest import Engine, Limits
from kelvin.contracts.artifacts.push_api import Piece, PlannedChunk
from kelvin.contracts.errors import CapacityExceeded, Conflict, Failure, NotFound, Refused, Unavailable
from kelvin.contracts.traffic_errors import Overloaded
from snapshotter.intake.plan_record import PlanRecord
from snapshotter.intake.policy.quota import PromisedBytes
from snapshotter.push.staging import IDLE_S, Staging
from tests.snapshotter.intake.test_version_inputs import FACTS

A, B, C = "a" * 64, "b" * 64, "c" * 64
PAGE_CHUNK = PlannedChunk(length=4096, pieces=(Piece(path="w", offset=0, length=4096, pad=0),))


def record(tenant: str = "acme", plan_id: str | None = None) -> PlanRecord:
    """Return a plan without contents: staging does not look inside."""
    return PlanRecord(
        plan_id=plan_id or secrets.token_hex(16),
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


def open_staged_push(
    staging: Staging, tenant: str = "acme", now_s: float = 0.0, plan_id: str | None = None, **chunks: bytes
) -> str:
    """Open a push that was last active at `now_s`, with these chunks staged."""
    push = record(tenant, plan_id)
    staging.open_push(push, (), now_s)
    for name, data in chunks.items():
        staging.put_chunk(tenant, push.plan_id, {"a": A, "b": B, "c": C}[name], data)
    return push.plan_id


def failure_of(call: object, *args: object) -> object:
    assert callable(call)
    with pytest.raises(Refused) as caught:
        call(*args)
    return caught.value.failure


def test_staged_push_survives_a_restart(tmp_path: Path) -> None:
    """Another process that opens the directory has the plans, digests and chunks."""
    plan = record()
    first = Staging(tmp_path, 2)
    first.open_plan(plan, {A: b"one"}, 0.0)
    push = structs.replace(plan, plan_id="1" * 32, chunks=(PAGE_CHUNK, PAGE_CHUNK))
    first.open_push(push, (A, B), 0.0)
    first.put_chunk("acme", push.plan_id, B, b"two")
    second = Staging(tmp_path, 2)
    assert second.load_plan("acme", plan.plan_id) == plan
    assert second.read_declared("acme", push.plan_id) == (A, B)
    assert second.find_staged("acme", [A, B, C]) == {A, B}
    assert second.link_staged("acme", push.plan_id, [A, B, C]) == {A, B}
    assert second.read_chunk("acme", push.plan_id, B) == b"two"
    assert second.open_promises("acme", "", 0.0) == [PromisedBytes(push.plan_id, {A: 4096, B: 4096}, is_idle=False)]
    assert second.open_promises("acme", "", IDLE_S) == [PromisedBytes(push.plan_id, {A: 4096, B: 4096}, is_idle=True)]
    assert second.open_promises("acme", push.plan_id, 0.0) == []


def test_tenants_are_apart(tmp_path: Path) -> None:
    """Another tenant's plan id is unknown, and its chunks are not adopted."""
    staging = Staging(tmp_path, 2)
    theirs = open_staged_push(staging, "acme", a=b"one")
    mine = open_staged_push(staging, "umbrella")
    assert failure_of(staging.load_plan, "umbrella", theirs) == NotFound("plan", theirs)
    assert staging.link_staged("umbrella", mine, [A]) == set()
    assert isinstance(failure_of(staging.read_chunk, "umbrella", mine, A), Conflict)


@pytest.mark.parametrize("plan_id", ["", "..", "../acme", "x" * 32, "A" * 32, "0" * 31, "0" * 33, "/" + "0" * 31])
def test_malformed_plan_id_is_unknown(tmp_path: Path, plan_id: str) -> None:
    """Anything but a generated id is unknown, before a path is built from it."""
    assert isinstance(failure_of(Staging(tmp_path, 2).load_plan, "acme", plan_id), NotFound)


def test_interrupted_push_is_resumed(tmp_path: Path) -> None:
    """A new plan of the tenant adopts an older plan's chunks, and keeps them when the older plan is dropped."""
    staging = Staging(tmp_path, 3)
    older = open_staged_push(staging, a=b"one", b=b"two")
    newer = open_staged_push(staging)
    assert staging.link_staged("acme", newer, [A, C]) == {A}
    staging.drop("acme", older)
    assert staging.read_chunk("acme", newer, A) == b"one"


def test_open_pushes_are_bounded(tmp_path: Path) -> None:
    """The push that was idle longest makes room. A push in use or lately active does not."""
    staging = Staging(tmp_path, 2)
    first, second = open_staged_push(staging, now_s=0.0), open_staged_push(staging, now_s=10.0)
    assert failure_of(open_staged_push, staging, "acme", IDLE_S - 1) == Overloaded("the list of open pushes", 2, 30.0)
    open_staged_push(staging, "umbrella", IDLE_S - 1)  # each tenant has its own bound
    with staging.pin(first):
        failure = failure_of(open_staged_push, staging, "acme", IDLE_S + 1)
        assert failure == Overloaded("the list of open pushes", 2, 30.0)
        third = open_staged_push(staging, now_s=IDLE_S + 10)
        assert isinstance(failure_of(staging.load_plan, "acme", second), NotFound)
    staging.load_plan("acme", first)
    staging.load_plan("acme", third)
    staging.check_integrity()


def test_plans_make_room_at_once(tmp_path: Path) -> None:
    """A plan without a push is never in the way: the oldest plan is dropped, and no push is."""
    staging = Staging(tmp_path, 2)
    push = open_staged_push(staging)
    plans = [record() for _ in range(3)]
    for at, plan in enumerate(plans):
        staging.open_plan(plan, {}, float(at))
    assert isinstance(failure_of(staging.load_plan, "acme", plans[0].plan_id), NotFound)
    for kept in (push, plans[1].plan_id, plans[2].plan_id):
        staging.load_plan("acme", kept)
    staging.check_integrity()


def test_repeated_push_takes_no_more_room(tmp_path: Path) -> None:
    """A repeated push takes no more room, and finds its chunks staged."""
    staging = Staging(tmp_path, 1)
    push = open_staged_push(staging, plan_id="0" * 32, a=b"one")
    assert open_staged_push(staging, plan_id="0" * 32) == push
    assert staging.read_chunk("acme", push, A) == b"one"


def test_sweep_removes_idle_pushes(tmp_path: Path) -> None:
    """A push that is idle for too long is removed, unless a commit holds it."""
    staging = Staging(tmp_path, 4)
    old, held, young = (open_staged_push(staging, now_s=at) for at in (0.0, 0.0, 60.0))
    with staging.pin(held):
        assert staging.sweep(now_s=101.0, max_age_s=100.0) == 1
    assert isinstance(failure_of(staging.load_plan, "acme", old), NotFound)
    staging.load_plan("acme", held)
    assert staging.sweep(now_s=101.0, max_age_s=100.0) == 1
    staging.load_plan("acme", young)


def test_push_from_a_clock_that_was_ahead_is_idle_again(tmp_path: Path) -> None:
    """A push with a time in the future counts as idle from the first sweep, so it soon makes room."""
    staging = Staging(tmp_path, 1)
    ahead = open_staged_push(staging, now_s=3e9)
    assert staging.sweep(now_s=100.0, max_age_s=1e6) == 0
    assert isinstance(failure_of(open_staged_push, staging, "acme", 101.0), Overloaded)
    open_staged_push(staging, now_s=100.0 + IDLE_S)
    assert isinstance(failure_of(staging.load_plan, "acme", ahead), NotFound)


def test_chunk_before_declaration_is_refused(tmp_path: Path) -> None:
    """A chunk is accepted only after its declaration. A damaged plan or declaration counts as missing."""
    staging = Staging(tmp_path, 2)
    plan = record()
    staging.open_plan(plan, {A: b"one"}, 0.0)
    assert isinstance(failure_of(staging.read_declared, "acme", plan.plan_id), Conflict)
    staging.open_push(plan, (), 0.0)
    assert staging.read_declared("acme", plan.plan_id) == ()
    here = tmp_path / "acme" / plan.plan_id
    (here / "declared.json").write_bytes(b"{")
    assert isinstance(failure_of(staging.read_declared, "acme", plan.plan_id), Conflict)
    (here / "plan.json").write_bytes(b"")
    assert isinstance(failure_of(staging.load_plan, "acme", plan.plan_id), NotFound)
    (here / "chunks" / A).unlink()
    staging.open_plan(plan, {A: b"one"}, 0.0)  # repeating the calls restores what a power cut took
    staging.open_push(plan, (), 0.0)
    assert staging.load_plan("acme", plan.plan_id) == plan
    assert staging.read_declared("acme", plan.plan_id) == ()
    assert staging.read_chunk("acme", plan.plan_id, A) == b"one"


def test_push_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    """A push that is larger than the free disk space is refused before it sends a chunk."""
    staging = Staging(tmp_path, 2)
    staging.check_free_space(1)
    assert isinstance(failure_of(staging.check_free_space, 1 << 60), CapacityExceeded)


KILLED = """
import os, sys
from pathlib import Path
from snapshotter.push.staging import Staging
staging = Staging(Path(sys.argv[1]), 2)
Path.rename = lambda *_: os.kill(os.getpid(), 9)
staging.put_chunk("acme", sys.argv[2], sys.argv[3], b"half")
"""


@pytest.mark.parametrize(
    ("number", "failure"),
    [
        pytest.param(errno.ENOSPC, CapacityExceeded("bytes on the staging disk", 1, 0), id="full"),
        pytest.param(errno.EDQUOT, CapacityExceeded("bytes on the staging disk", 1, 0), id="over its quota"),
        pytest.param(errno.EROFS, Unavailable("the staging disk"), id="read-only"),
    ],
)
def test_disk_errors_are_refused_by_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, failure: Failure
) -> None:
    """A full disk is refused as permanent, and other disk errors as retryable."""
    staging = Staging(tmp_path, 2)

    def refuse(self: Path, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(Refused) as refused:
        staging.open_plan(record(), {}, 0.0)
    assert refused.value.failure == failure


def test_a_kill_leaves_no_half_chunk(tmp_path: Path) -> None:
    """A `put_chunk` that is killed before its last step leaves nothing under the digest."""
    staging = Staging(tmp_path, 2)
    plan = open_staged_push(staging)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), plan, A], timeout=60, check=False)
    assert killed.returncode == -9
    assert os.listdir(tmp_path / "acme" / plan / "chunks")  # the write had begun
    assert staging.link_staged("acme", plan, [A]) == set()


def test_a_kill_leaves_no_half_plan(tmp_path: Path) -> None:
    """The next process removes unfinished plans and chunks of a killed one."""
    (tmp_path / "acme" / f".{'0' * 32}" / "chunks").mkdir(parents=True)
    staging = Staging(tmp_path, 1)
    assert os.listdir(tmp_path / "acme") == []
    plan = open_staged_push(staging, a=b"one")
    (tmp_path / "acme" / plan / "chunks" / f".{B}.0").write_bytes(b"tw")
    Staging(tmp_path, 1)
    assert os.listdir(tmp_path / "acme" / plan / "chunks") == [A]


@settings(max_examples=30, stateful_step_count=30)
class Machine(RuleBasedStateMachine):
    """Random pushes of two tenants, compared with a simple model of the staged chunks."""

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
            plan = open_staged_push(self.staging, tenant, self.now_s, f"{self.made:032x}")
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
        self.staging.put_chunk(tenant, plan, digest, digest.encode())
        staged.add(digest)

    @precondition(lambda self: self.plans)
    @rule(data=st.data(), digests=st.sets(st.sampled_from([A, B, C])))
    def adopt(self, data: st.DataObject, digests: set[str]) -> None:
        plan = data.draw(st.sampled_from(sorted(self.plans)))
        tenant, staged = self.plans[plan]
        staged_anywhere = set().union(*(found for owner, found in self.plans.values() if owner == tenant))
        assert self.staging.link_staged(tenant, plan, digests) == digests & staged_anywhere
        staged |= digests & staged_anywhere

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
                assert self.staging.read_chunk(tenant, plan, digest) == digest.encode()

    def _is_there(self, tenant: str, plan: str) -> bool:
        try:
            self.staging.load_plan(tenant, plan)
        except Refused:
            return False
        return True


TestMachine = Machine.TestCase
