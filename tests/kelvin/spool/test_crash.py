"""A writer is killed at random points. Every append that returned is readable, in order, without holes."""

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kelvin.spool.leftover_recovery import recover
from kelvin.spool.shipper import Post

ROOT = Path(__file__).parents[3]
DEADLINE_S = 30.0

# Eight tasks append as fast as they can. Each writes its sequence to the pipe after the append returned.
WRITER = """
import asyncio, os, sys
from pathlib import Path
from kelvin.spool import Spool

async def main():
    spool = Spool.open(Path(sys.argv[1]), sys.argv[2], segment_bytes=16384)
    async def one(task):
        while True:
            sequence = await spool.append(lambda sequence: b"%d:" % sequence + b"x" * (37 * task))
            os.write(1, b"%d\\n" % sequence)
    await asyncio.gather(*(one(task) for task in range(1, 9)))

asyncio.run(main())
"""


def killed_writer(root: Path, source: str, after_records: int, pause_s: float) -> int:
    """Run a writer, kill it some time after `after_records`, and return the highest sequence that it reported."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), source], stdout=subprocess.PIPE, cwd=ROOT, bufsize=0
    )
    assert writer.stdout is not None
    reported, text, deadline = 0, b"", time.monotonic() + DEADLINE_S
    try:
        while reported < after_records:
            ready, _, _ = select.select([writer.stdout], [], [], deadline - time.monotonic())
            assert ready, "the writer is stuck"
            piece = os.read(writer.stdout.fileno(), 4096)
            assert piece, "the writer ended by itself"
            text += piece
            reported = text.count(b"\n")
        select.select([], [], [], pause_s)
    finally:
        writer.send_signal(signal.SIGKILL)
        text += writer.stdout.read()
        writer.stdout.close()
        writer.wait(DEADLINE_S)
    return max(int(line) for line in text.split(b"\n")[:-1])


def recovered(root: Path) -> dict[str, list[int]]:
    """Return the sequences that a recovery ships, by source."""
    taken: dict[str, list[int]] = {}

    def post_for(source: str) -> Post:
        async def post(records: Sequence[bytes]) -> None:
            taken.setdefault(source, []).extend(int(record.split(b":")[0]) for record in records)

        return post

    asyncio.run(recover(root, post_for))
    return taken


@pytest.mark.parametrize("seed", range(6))
def test_acknowledged_records_survive_sigkill(tmp_path: Path, seed: int) -> None:
    """A recovery ships 1..n without a hole, and n is at least the highest reported sequence."""
    chance = random.Random(seed)
    reported = killed_writer(tmp_path, f"w-{seed}", chance.randint(1, 3000), chance.random() / 50)
    sequences = recovered(tmp_path)[f"w-{seed}"]
    assert sequences == list(range(1, len(sequences) + 1))
    assert len(sequences) >= reported
    # A kill may tear a write that wasn't reported.
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".damaged"}


def test_control_lost_acknowledged_records_are_found(tmp_path: Path) -> None:
    """Negative control: without the last segment, as if its writes had not happened, the check fails."""
    reported = killed_writer(tmp_path, "w-1", 200, 0.0)
    for path in sorted((tmp_path / "w-1").glob("*.seg"))[-1:]:
        os.truncate(path, 0)
    assert len(recovered(tmp_path).get("w-1", [])) < reported


FILLER = """
import resource, sys
from pathlib import Path
from kelvin.contracts.errors import Refused
from kelvin.spool import Spool

spool = Spool.open(Path(sys.argv[1]), "full", segment_bytes=16384)
kept = [spool.append_blocking(lambda sequence: b"%d:" % sequence + b"x" * 900) for _ in range(20)]
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
refused = 0
for _ in range(40):
    try:
        kept.append(spool.append_blocking(lambda sequence: b"%d:" % sequence + b"x" * 900))
    except Refused:
        refused += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert refused and spool.failure
kept.append(spool.append_blocking(lambda sequence: b"%d:" % sequence + b"x" * 900))
print(kept == list(range(1, len(kept) + 1)), len(kept), refused)
"""


def test_file_size_limit_ships_no_partial_record(tmp_path: Path) -> None:
    """The kernel refuses writes (EFBIG): appends raise, and exactly the acknowledged records are shipped."""
    result = subprocess.run(
        [sys.executable, "-c", FILLER, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert result.returncode == 0, result.stderr
    gapless, kept, refused = result.stdout.split()
    assert gapless == "True"
    assert int(refused) > 0
    assert recovered(tmp_path)["full"] == list(range(1, int(kept) + 1))


def test_a_killed_owner_releases_its_lock(tmp_path: Path) -> None:
    """A lock ends with its process, so the next recovery can take the source."""
    killed_writer(tmp_path, "w-1", 1, 0.0)
    assert list(recovered(tmp_path)) == ["w-1"]
