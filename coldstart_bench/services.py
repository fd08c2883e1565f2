"""One process that a bench needs for the length of a block: begun, waited for until it is ready, and ended with it."""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from coldstart_bench.installation import InstallationFailed
from coldstart_bench.patience import comes

READY_S: Final = 60.0
POLL_S: Final = 0.02  # how late its readiness may be noticed
LAST_WORDS: Final = 500


@contextmanager
def service(
    command: Sequence[str], environment: Mapping[str, str], log: Path, is_ready: Callable[[], bool], what: str
) -> Iterator[int]:
    """Its process id, from when it is ready on. Both its outputs are in `log`.

    Raises InstallationFailed with its last words where it ends before it is ready, or is not within READY_S.
    """
    with log.open("wb") as said:
        process = subprocess.Popen(command, env=dict(environment), stdout=said, stderr=said, start_new_session=True)
    try:
        came = comes(lambda: is_ready() or process.poll() is not None, READY_S, POLL_S)
        if not came or process.poll() is not None:
            raise InstallationFailed(f"{what} did not start: {log.read_text(errors='replace')[-LAST_WORDS:]}")
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=READY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
