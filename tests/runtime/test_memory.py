"""A process that holds a tenant's model has bounded memory, and goes before those that all models share."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.memory import go_first_when_memory_runs_out

BOUNDED = """
from runtime.memory import bound_memory
import mmap
bound_memory(64 << 20)
shared = mmap.mmap(-1, 256 << 20)  # as weights are: not its own
shared.write(b"x" * 1000)
kept = bytearray(32 << 20)
try:
    bytearray(256 << 20)
except MemoryError:
    print("refused")
bound_memory(512 << 20)
print(len(bytearray(256 << 20)))
"""


def test_growth_beyond_the_bound_is_a_memory_error() -> None:
    """What is below it is had, what is shared through files doesn't count, and a bound can be raised."""
    run = subprocess.run([sys.executable, "-c", BOUNDED], capture_output=True, text=True, timeout=60)
    assert (run.stdout.split(), run.returncode) == (["refused", str(256 << 20)], 0), run.stderr


@pytest.mark.parametrize(("before", "after"), [("0", "500"), ("-100", "500"), ("900", "900")])
def test_goes_before_processes_that_say_nothing(tmp_path: Path, before: str, after: str) -> None:
    """An operator's own choice is left where it is higher."""
    score = tmp_path / "oom_score_adj"
    score.write_text(before)
    go_first_when_memory_runs_out(tmp_path)
    assert score.read_text() == after


def test_does_nothing_where_there_is_no_score(tmp_path: Path) -> None:
    """A sandbox without the file serves all the same."""
    go_first_when_memory_runs_out(tmp_path / "none")
