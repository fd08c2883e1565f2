"""A parked standby has a prefaulted heap, which serves another thread without page faults."""

import subprocess
import sys

import pytest

# Allocates 8 MiB in pieces like a tokenizer's tables, in a thread like a restore.
ALLOCATE = """
import ctypes, json, resource, sys, threading
from runtime.app import heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
page_faults = []
def allocate():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for nbytes in [*[100] * 20_000, *[512 << 10] * 4, *[4 << 20]]:
        ctypes.memset(libc.malloc(nbytes), 1, nbytes)
    page_faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
if "configure" in sys.argv:
    heap.configure_heap()
if "prefault" in sys.argv:
    run_in_thread(heap.prefault_heap)
run_in_thread(allocate)
print(json.dumps(page_faults[0]))
"""


def run_program(program: str, *steps: str) -> list[int]:
    """Return the numbers that the program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *steps], capture_output=True, text=True, check=True, timeout=180
    )
    return [int(line) for line in done.stdout.split()]


def count_faults(*steps: str) -> int:
    """Return the page faults of a process that was prepared by these steps."""
    (faults,) = run_program(ALLOCATE, *steps)
    return faults


def test_prefaulted_heap_serves_the_next_thread() -> None:
    """8 MiB are 2,048 pages."""
    assert count_faults("configure", "prefault") < 500


@pytest.mark.parametrize(
    "steps", [(), ("configure",), ("prefault",)], ids=["nothing done", "no prefault", "a heap per thread"]
)
def test_heap_without_prefault_faults_new_pages(steps: tuple[str, ...]) -> None:
    """Both preparations are needed."""
    assert count_faults(*steps) > 1000


# Two standbys of one zygote with all imports. The second also does its warm-up.
FORK_STANDBY = """
import os
from runtime.app import preload
preload.load()
def fork_standby(warms_up):
    if os.fork() == 0:
        if warms_up:
            from runtime.app.warmup import WarmUp
            for step in WarmUp().steps:
                run_in_thread(step)
        run_in_thread(allocate)
        print(json.dumps(page_faults[0]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.deep
def test_parked_standby_has_a_prefaulted_heap() -> None:
    """A parked standby has fewer than half the page faults of a standby before its warm-up."""
    fresh, parked = run_program(
        ALLOCATE[: ALLOCATE.index('if "configure"')] + FORK_STANDBY + "fork_standby(False)\nfork_standby(True)\n"
    )
    # The warm-up leaves other memory in the heap, which differs from run to run.
    assert parked < fresh / 2
