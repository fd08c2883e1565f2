"""What a process took of processors is its own, threads that have ended or not."""

import os
import threading
import time

from coldstart_bench.traffic.processor import Load, Spent, load_of, try_spent


def test_of_this_process() -> None:
    """What it computes is counted, in another thread as well."""
    before = try_spent(os.getpid())

    def compute() -> None:
        until_ns = time.thread_time_ns() + 80_000_000
        while time.thread_time_ns() < until_ns:
            pass
        counted.append(try_spent(os.getpid()))

    counted: list[Spent | None] = []
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert before is not None
    assert counted[0] is not None
    assert counted[0].ran_ns - before.ran_ns > 40_000_000  # the kernel counts by its ticks


def test_of_one_that_is_not_there() -> None:
    """Nothing is said of it, nor of what was not asked."""
    assert try_spent(2**22 + 1) is None
    assert load_of(None, Spent(1, 1), 1, 1.0) is None
    assert load_of(Spent(0, 0), Spent(1, 1), 0, 1.0) is None
    assert load_of(Spent(0, 0), Spent(2_000_000, 500_000_000), 4, 1.0) == Load(500.0, 0.5)
