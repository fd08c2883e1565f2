"""What a process has of processors while it is under load, and how long it stood in line for one (schedstat)."""

import os
from pathlib import Path

import msgspec


class Spent(msgspec.Struct, frozen=True):
    """Since the process began; nanoseconds. `waited_ns` is its first thread's, which is the event loop's."""

    ran_ns: int
    waited_ns: int


def try_spent(pid: int) -> Spent | None:
    """None where it has ended, or where the kernel does not say."""
    try:
        of_threads = {task: _schedstat(pid, task) for task in os.listdir(f"/proc/{pid}/task")}
        return Spent(sum(ran for ran, _ in of_threads.values()), of_threads[str(pid)][1])
    except (OSError, KeyError):
        return None


def _schedstat(pid: int, task: str) -> tuple[int, int]:
    try:
        words = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
    except FileNotFoundError:  # that thread has ended
        return 0, 0
    return int(words[0]), int(words[1])


class Load(msgspec.Struct, frozen=True):
    """What so many requests took of it. `waited` is the share of the time in which others had its core."""

    each_us: float
    waited: float


def load_of(before: Spent | None, after: Spent | None, requests: int, seconds: float) -> Load | None:
    """Between two looks; None where one is missing, or nothing was asked."""
    if before is None or after is None or not requests or seconds <= 0:
        return None
    ran_ns, waited_ns = after.ran_ns - before.ran_ns, after.waited_ns - before.waited_ns
    return Load(ran_ns / 1e3 / requests, min(1.0, waited_ns / 1e9 / seconds))
