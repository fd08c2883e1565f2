"""What a standby keeps of its heap is there for another thread without a page fault; else each page costs one."""

import json
import subprocess
import sys

import pytest

# Takes 8 MiB in pieces as a tokenizer's tables are, in a thread of its own, as a restore does.
TAKE = """
import ctypes, json, resource, sys, threading
from runtime import heap
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
    heap.settle()
if "keep" in sys.argv:
    in_a_thread(heap.keep)
in_a_thread(take)
print(json.dumps(taken[0]))
"""


def faults(*ways: str, program: str = TAKE) -> int:
    """Of a process that prepared itself so."""
    done = subprocess.run(
        [sys.executable, "-c", program, *ways], capture_output=True, text=True, check=True, timeout=180
    )
    return int(json.loads(done.stdout))


def test_what_is_kept_is_there_for_the_next_thread() -> None:
    """8 MiB are 2,048 pages."""
    assert faults("settle", "keep") < 500


@pytest.mark.parametrize("ways", [(), ("settle",), ("keep",)], ids=["nothing done", "not kept", "a heap per thread"])
def test_otherwise_pages_are_new(ways: tuple[str, ...]) -> None:
    """Each of both is needed."""
    assert faults(*ways) > 1000


# As the zygote prepares itself, and then as a standby does while it is parked.
PARK = """
from runtime import preload
preload.load()
if "park" in sys.argv:
    from runtime.warmup import WarmUp
    for step in WarmUp().steps:
        in_a_thread(step)
"""


@pytest.mark.deep
def test_a_parked_standby_has_kept_it() -> None:
    """One that is not yet warm has not."""
    program = TAKE.replace('if "settle"', PARK + 'if "settle"')
    # What else it warmed up with lies among what is kept, and is not the same each time.
    assert faults("park", program=program) < faults(program=program) / 2
