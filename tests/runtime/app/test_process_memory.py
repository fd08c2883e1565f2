"""A process with a tenant's model has bounded memory and a high OOM score."""

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
allowed = bytearray(32 << 20)
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
def test_oom_score_is_raised_and_never_lowered(tmp_path: Path, before: str, after: str) -> None:
    """The kernel kills this process before others, and a higher score set by an operator stays."""
    score = tmp_path / "oom_score_adj"
    score.write_text(before)
    raise_oom_score(tmp_path)
    assert score.read_text() == after


def test_oom_score_may_be_missing(tmp_path: Path) -> None:
    """A sandbox without the file is no error."""
    raise_oom_score(tmp_path / "none")
