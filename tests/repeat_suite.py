"""`make test-ten`: the suite ten times in random order, every second time with a core kept busy."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

RUNS = 10
SPIN = "while True: pass"


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy, as a noisy neighbour would."""
    core = max(os.sched_getaffinity(0))
    spinner = subprocess.Popen([sys.executable, "-c", SPIN], preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    try:
        yield
    finally:
        spinner.kill()
        spinner.wait()


def main() -> int:
    """Run the suite ten times and print each seed, so that a run can be repeated. Return 0 if all are green."""
    red = []
    for run in range(RUNS):
        seed, is_busy = time.time_ns() % 2**32, run % 2 == 1
        print(f"run {run + 1} of {RUNS}: seed {seed}, {'one core busy' if is_busy else 'quiet'}", flush=True)
        with busy_core() if is_busy else contextlib.nullcontext():
            command = [sys.executable, "-m", "pytest", f"--randomly-seed={seed}"]
            if subprocess.run(command, check=False).returncode != 0:
                red.append(seed)
    print(f"{RUNS - len(red)} of {RUNS} green" + (f"; red seeds: {red}" if red else ""))
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
