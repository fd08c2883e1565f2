"""A process may have as many descriptors as it was allowed, and no fewer."""

import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RAISES = """
import resource
from service.startup import raise_descriptors
raise_descriptors()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    """Which stays what it was."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(
        [sys.executable, "-c", RAISES],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(hard)] * 2
