"""A replica's meter page is valid at every moment at which the replica can be killed."""

import asyncio
import errno
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.accounting.meter_format import METER_FILE_BYTES, Meter, Phase, decode_meter, encode_meter
from kelvin.process.procfs import start_time_ns
from kelvin.supervisor.lifetime_policy import lifetime_record, unseen_death
from runtime.lifecycle.meter_writer import CHECKPOINT_NS, MeterWriter, create_meter_page
from runtime.lifecycle.replica import RuntimeReplica
from tests.runtime.fakes import fake_work, script_of
from tests.runtime.scripted_engine import ScriptedEngine
from tests.virtual_loop import run_virtually

TICK_NS = 10_000_000  # the kernel's clock tick


class Killable(bytearray):
    """Memory that keeps a copy after each written byte, as a kill in between would leave it."""

    def __init__(self) -> None:
        super().__init__(METER_FILE_BYTES)
        self.moments: list[bytes] = []

    def __setitem__(self, where: slice, data: bytes, /) -> None:  # type: ignore[override]
        for index, byte in zip(range(where.start, where.stop), data, strict=True):
            if self[index] != byte:
                super().__setitem__(index, byte)
                self.moments.append(bytes(self))


class Clock:
    """A clock in nanoseconds, set by the test."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def _drive(page: MeterWriter, clock: Clock, steps: list[tuple[int, Phase | None]]) -> list[Meter]:
    states = [page.meter]
    for elapsed, phase in steps:
        clock.now += elapsed
        page.count_request() if phase is None else page.start_phase(phase)
        states.append(page.meter)
    return states


steps_strategy = st.lists(
    st.tuples(st.integers(0, 10**12), st.one_of(st.none(), st.sampled_from(list(Phase)))), min_size=1, max_size=6
)


@given(steps_strategy)
def test_a_kill_at_any_byte_leaves_the_state_before_or_after(steps: list[tuple[int, Phase | None]]) -> None:
    """After a kill at any byte of an update, the page decodes to the state before or after it."""
    memory, clock = Killable(), Clock()
    page = MeterWriter(memory, clock_ns=clock)
    first = len(memory.moments)
    states = _drive(page, clock, steps)
    changes = [state for state, before in zip(states, [None, *states], strict=False) if state != before]
    at = 0
    for moment in memory.moments[first - 1 :]:
        seen = decode_meter(moment)
        assert seen in changes[at : at + 2]
        at += seen != changes[at]
    assert decode_meter(bytes(memory)) == states[-1]


def test_meter_starts_at_the_fork(tmp_path: Path) -> None:
    """The time between the fork and the page counts as standby."""
    born = start_time_ns(os.getpid())
    before_ns = time.monotonic_ns() - born
    closed = create_meter_page(tmp_path, "rt1", born_ns=born).meter.close_interval(time.monotonic_ns())
    assert before_ns <= closed.spent_ns[Phase.STANDBY] == sum(closed.spent_ns) <= time.monotonic_ns() - born


def test_single_meter_slot_can_be_torn() -> None:
    """Negative control: without the second slot, a kill during a write shows a state that never was."""
    before = Meter(Phase.IDLE, 1, 1, (1, 2, 3, 4), requests=1)
    after = before.enter(Phase.ACTIVE, 1 << 40)
    old, new = encode_meter(before, 2), encode_meter(after, 4)
    torn = {decode_meter(new[:cut] + old[cut:]) for cut in range(16, 120)}
    assert torn - {before, after}


@given(steps_strategy)
def test_every_nanosecond_is_in_exactly_one_phase(steps: list[tuple[int, Phase | None]]) -> None:
    """The phases sum to the lifetime in any order of transitions."""
    clock = Clock()
    page = MeterWriter(Killable(), clock_ns=clock)
    _drive(page, clock, steps)
    closed = page.meter.close_interval(clock.now)
    assert sum(closed.spent_ns) == clock.now - closed.start_time_ns


def test_identity_begins_the_restore() -> None:
    """The time before the identity is standby. From then on the tenant's restore counts."""
    clock = Clock()
    page = MeterWriter(Killable(), clock_ns=clock)
    clock.now += 50
    page.identify(tenant="acme", model="m", version="f" * 64, device_class="cpu-1")
    clock.now += 7
    page.start_phase(Phase.IDLE)
    meter = page.meter
    assert (meter.tenant, meter.model, meter.version, meter.device_class) == ("acme", "m", "f" * 64, "cpu-1")
    assert meter.spent_ns == (50, 7, 0, 0)


@pytest.mark.parametrize("phase", [pytest.param(Phase.IDLE, id="idle"), pytest.param(Phase.ACTIVE, id="busy")])
def test_checkpoint_counts_hours_without_a_phase_change(phase: Phase) -> None:
    """If the supervisor dies with its replica, the page alone accounts for an hour without a transition."""
    hour_ns, memory = 3600 * 10**9, bytearray(METER_FILE_BYTES)

    async def lives() -> int:
        loop = asyncio.get_running_loop()
        page = MeterWriter(memory, clock_ns=lambda: int(loop.time() * 1e9))
        page.identify(tenant="acme", model="m", version="f" * 64, device_class="cpu-1")
        page.start_phase(phase)
        watching = asyncio.create_task(RuntimeReplica("rt-1", page, fake_work(ScriptedEngine(script_of("a")))).watch())
        await asyncio.sleep(3600)
        watching.cancel()
        return int(loop.time() * 1e9)

    now_ns = run_virtually(lives())
    meter = decode_meter(bytes(memory))
    death = unseen_death(meter, "rt-1", 7, now_ns, 2 * hour_ns // 1000, boot="")
    assert death is not None
    life = lifetime_record(meter, death, "supervisor-2", 1)
    spent_us = life.idle_us if phase is Phase.IDLE else life.active_us
    assert hour_ns - 1.2 * CHECKPOINT_NS < spent_us * 1000 <= hour_ns
    assert life.total_us == life.restore_us + life.active_us + life.idle_us


def test_the_page_lies_under_pid_and_id_and_decodes_at_once(tmp_path: Path) -> None:
    """The file name has pid and id, and the first bytes are a complete page."""
    page = create_meter_page(tmp_path / "meters", "rt1")
    (path,) = (tmp_path / "meters").iterdir()
    assert path.name.endswith(".rt1")
    assert path.name.split(".")[0].isdigit()
    page.count_request()
    assert decode_meter(path.read_bytes()).requests == 1


def test_two_processes_never_share_a_page(tmp_path: Path) -> None:
    """A page of the same name is not overwritten."""
    create_meter_page(tmp_path / "meters", "rt1")
    (path,) = (tmp_path / "meters").iterdir()
    (tmp_path / f".meter-{path.name}").touch()
    with pytest.raises(FileExistsError):
        create_meter_page(tmp_path / "meters", "rt1")


def test_full_disk_keeps_nothing_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that can't be written leaves no file, since replicas start again and again on a full disk."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="no space"):
        create_meter_page(tmp_path / "meters", "rt1")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
