"""What a standby keeps of its heap is there for another thread without a page fault; else each page costs one."""

import subprocess
import sys

import pytest

# Takes 8 MiB in pieces as a tokenizer's tables are, in a thread of its own, as a restore does.
TAKE = """
import ctypes, json, resource, sys, threading
from runtime import memory
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
    memory.settle_heap()
if "keep" in sys.argv:
    in_a_thread(memory.keep_heap)
in_a_thread(take)
print(json.dumps(taken[0]))
"""


def faults_of(program: str, *ways: str) -> list[int]:
    """As it prints them."""
    done = subprocess.run(
        [sys.executable, "-c", program, *ways], capture_output=True, text=True, check=True, timeout=180
    )
    return [int(line) for line in done.stdout.split()]


def faults(*ways: str) -> int:
    """Of a process that prepared itself so."""
    (found,) = faults_of(TAKE, *ways)
    return found


def test_what_is_kept_is_there_for_the_next_thread() -> None:
    """8 MiB are 2,048 pages."""
    assert faults("settle", "keep") < 500


@pytest.mark.parametrize("ways", [(), ("settle",), ("keep",)], ids=["nothing done", "not kept", "a heap per thread"])
def test_otherwise_pages_are_new(ways: tuple[str, ...]) -> None:
    """Each of both is needed."""
    assert faults(*ways) > 1000


# Two standbys of one zygote, which has imported everything: the second does what one does while it is parked.
BEAR = """
import os
from runtime import preload
preload.load()
def born(parks):
    if os.fork() == 0:
        if parks:
            from runtime.warmup import WarmUp
            for step in WarmUp().steps:
                in_a_thread(step)
        in_a_thread(take)
        print(json.dumps(taken[0]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.deep
def test_a_parked_standby_has_kept_it() -> None:
    """One that is not yet warm has not."""
    fresh, parked = faults_of(TAKE[: TAKE.index('if "settle"')] + BEAR + "born(False)\nborn(True)\n")
    # What else it warmed up with lies among what is kept, and is not the same each time.
    assert parked < fresh / 2
