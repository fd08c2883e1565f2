"""A process with a tenant's model has bounded memory and a high OOM score, and a parked standby has a prefaulted heap.

Prefaulted heap serves another thread without page faults.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from kelvin.ipc.engine_jobs import GATE_BYTES, SEAL_BYTES
from runtime.app.process_memory import raise_oom_score

BOUNDED = """
from runtime.app.process_memory import limit_memory
import mmap
limit_memory(64 << 20)
shared = mmap.mmap(-1, 256 << 20)  # as weights are: not its own
shared.write(b"x" * 1000)
kept = bytearray(32 << 20)
try:
    bytearray(256 << 20)
except MemoryError:
    print("refused")
limit_memory(512 << 20)
print(len(bytearray(256 << 20)))
"""


def test_growth_beyond_the_bound_is_a_memory_error() -> None:
    """Allocations below the limit succeed, shared mappings don't count, and the limit can be raised."""
    run = subprocess.run([sys.executable, "-c", BOUNDED], capture_output=True, text=True, timeout=60)
    assert (run.stdout.split(), run.returncode) == (["refused", str(256 << 20)], 0), run.stderr


JOBS = """
import sys
from pathlib import Path
from kelvin.contracts.artifacts.runtime_control import GateJob, SealJob
from runtime.app.replica_operations import build_operations
from runtime.lifecycle import sealing_jobs as jobs
from kelvin.ipc.engine_jobs import GATE_BYTES, seal_bytes
from kelvin.ipc.socket_directory import SocketDirectory

job = SealJob(tenant="acme", version="ab" * 32, total_bytes=1 << 20)
limits = {"gate": GATE_BYTES, "seal": seal_bytes(job)}

def exceed_limit(*_, **__):
    print(len(bytearray(limits[kind] // 2)))
    bytearray(limits[kind] + (64 << 20))

jobs.gate = jobs.seal = exceed_limit
directory = SocketDirectory(Path(sys.argv[1]))
for kind, job in (("gate", GateJob(config_json="{}", tensors={})), ("seal", job)):
    operations = build_operations(directory, 1.0)
    try:
        getattr(operations, kind)(job)
    except MemoryError:
        print("refused")
"""


def test_jobs_of_a_push_have_a_hard_bound(tmp_path: Path) -> None:
    """A job's memory is sampled ten times a second, and a hostile graph grows by gigabytes in between. The kernel
    refuses it."""
    run = subprocess.run([sys.executable, "-c", JOBS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    seal_bytes = SEAL_BYTES + 3 * (1 << 20)
    assert run.stdout.split() == [str(GATE_BYTES // 2), "refused", str(seal_bytes // 2), "refused"], run.stderr


@pytest.mark.parametrize(("before", "after"), [("0", "500"), ("-100", "500"), ("900", "900")])
def test_goes_before_processes_that_say_nothing(tmp_path: Path, before: str, after: str) -> None:
    """A higher score set by an operator stays."""
    score = tmp_path / "oom_score_adj"
    score.write_text(before)
    raise_oom_score(tmp_path)
    assert score.read_text() == after


def test_does_nothing_where_there_is_no_score(tmp_path: Path) -> None:
    """A sandbox without the file is no error."""
    raise_oom_score(tmp_path / "none")


# Allocates 8 MiB in pieces like a tokenizer's tables, in a thread like a restore.
TAKE = """
import ctypes, json, resource, sys, threading
from runtime.app import process_memory as memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
taken = []
def take():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for nbytes in [*[100] * 20_000, *[512 << 10] * 4, *[4 << 20]]:
        ctypes.memset(libc.malloc(nbytes), 1, nbytes)
    taken.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
def in_a_thread(what):
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()
if "settle" in sys.argv:
    memory.configure_heap()
if "keep" in sys.argv:
    in_a_thread(memory.prefault_heap)
in_a_thread(take)
print(json.dumps(taken[0]))
"""


def faults_of(program: str, *ways: str) -> list[int]:
    """Return the numbers that the program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *ways], capture_output=True, text=True, check=True, timeout=180
    )
    return [int(line) for line in done.stdout.split()]


def faults(*ways: str) -> int:
    """Return the page faults of a process prepared in these ways."""
    (found,) = faults_of(TAKE, *ways)
    return found


def test_prefaulted_heap_serves_the_next_thread() -> None:
    """8 MiB are 2,048 pages."""
    assert faults("settle", "keep") < 500


@pytest.mark.parametrize("ways", [(), ("settle",), ("keep",)], ids=["nothing done", "not kept", "a heap per thread"])
def test_heap_without_prefault_faults_new_pages(ways: tuple[str, ...]) -> None:
    """Both preparations are needed."""
    assert faults(*ways) > 1000


# Two standbys of one zygote with all imports. The second also does its warm-up.
BEAR = """
import os
from runtime.app import preload
preload.load()
def born(parks):
    if os.fork() == 0:
        if parks:
            from runtime.app.warmup import WarmUp
            for step in WarmUp().steps:
                in_a_thread(step)
        in_a_thread(take)
        print(json.dumps(taken[0]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.deep
def test_a_parked_standby_has_kept_it() -> None:
    """A standby before its warm-up has no prefaulted heap."""
    fresh, parked = faults_of(TAKE[: TAKE.index('if "settle"')] + BEAR + "born(False)\nborn(True)\n")
    # The warm-up leaves other memory in the heap, which differs from run to run.
    assert parked < fresh / 2
