"""A service's process: what was imported is out of the collector's sight before it serves."""

import subprocess
import sys

import pytest

REPORT = "import gc; from service.run import run_service\nasync def main(stop): print(gc.get_freeze_count())\n"


@pytest.mark.parametrize(
    ("call", "frozen"),
    [
        pytest.param("run_service(main, None)", True, id="a service"),
        pytest.param("import asyncio; asyncio.run(main(None))", False, id="a loop on its own"),
    ],
)
def test_a_service_has_frozen_what_it_imported(call: str, frozen: bool) -> None:
    """A full collection while it serves doesn't go through it."""
    done = subprocess.run([sys.executable, "-c", REPORT + call], capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 10_000) == frozen
