"""A process that holds a tenant's model has bounded memory, and goes before those that all models share."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.memory import go_first_when_memory_runs_out
from service.jobs import GATE_BYTES, SEAL_BYTES

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


JUDGED = """
import sys
from pathlib import Path
from contracts.jobs import GateJob, SealJob
from runtime import app, jobs
from service.jobs import GATE_BYTES, seal_bytes
from service.unix import SocketDirectory

job = SealJob(tenant="acme", version="ab" * 32, total_bytes=1 << 20)
limits = {"gate": GATE_BYTES, "seal": seal_bytes(job)}

def take(*_, **__):
    print(len(bytearray(limits[kind] // 2)))
    bytearray(limits[kind] + (64 << 20))

jobs.gate = jobs.seal = take
directory = SocketDirectory(Path(sys.argv[1]))
for kind, job in (("gate", GateJob(config_json="{}", tensors={})), ("seal", job)):
    work = app.work_over(directory, 1.0)
    try:
        getattr(work, kind)(job)
    except MemoryError:
        print("refused")
"""


def test_jobs_of_a_push_have_a_hard_bound(tmp_path: Path) -> None:
    """The desk looks at a job's memory ten times a second, and a hostile graph takes gigabytes between two looks. The
    kernel refuses what is beyond the desk's own limit.
    """
    run = subprocess.run([sys.executable, "-c", JUDGED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    seal_bytes = SEAL_BYTES + 3 * (1 << 20)
    assert run.stdout.split() == [str(GATE_BYTES // 2), "refused", str(seal_bytes // 2), "refused"], run.stderr


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
