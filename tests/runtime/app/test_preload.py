"""The zygote has imported all that its children need, has one thread, and has used no device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.processes import Installation
from tests.runtime.versions import make_llama

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.deep


def _after_fork(installation: Installation, *options: str) -> dict[str, Any]:
    version = installation.publish(make_llama(seed=7))
    if not list((installation.data / "store" / "acme" / "attestations").glob(f"{version.id}/*")):
        standby = installation.fork()
        standby.seal(version)
        standby.reap()
    env = os.environ | {"KELVIN_DATA": str(installation.data), "KELVIN_LIFELINE_FD": "-1"}
    command = [sys.executable, *options, "-m", "tests.runtime.after_fork", version.id]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert done.stdout, done.stderr.decode()
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.fixture(scope="module")
def facts(installation: Installation) -> dict[str, Any]:
    """Facts about one child, from its fork to its drain."""
    return _after_fork(installation)


def test_nothing_is_imported_after_the_fork(facts: dict[str, Any]) -> None:
    """A later import would delay a waiting request."""
    assert facts["imported"] == []
    assert facts["modules"] > 1000, "and something was there"


def test_imports_leave_one_thread(facts: dict[str, Any]) -> None:
    assert facts["threads"] == 1


def test_no_device_is_touched(facts: dict[str, Any]) -> None:
    """A device context would not survive the fork."""
    assert not facts["cuda"]
