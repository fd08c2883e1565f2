"""`kelvin doctor` beside an installation that runs: what only a running one shows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coldstart_bench.installation import Installation

ROOT = Path(__file__).parents[2]


@pytest.mark.deep
def test_a_running_installation(kelvin: Installation) -> None:
    """Its secrets are guarded, its CA and the certificate that callers see are good, and it serves on."""
    command = [sys.executable, "-m", "kelvin.main", "doctor", "--data", str(kelvin.data), "--read-bytes", str(8 << 20)]
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    for check in ("secrets", "certificate of the CA", "certificate that callers see", "store", "services"):
        assert found[check]["level"] == "ok", found[check]
    assert found["backups"]["level"] == "warn", "the tests' installation has none"
    assert kelvin.door.request("GET", "/v1/models")["data"]
    secrets = [(kelvin.data / name).read_text().strip() for name in ("admin.key", "default.key")]
    assert not any(secret in done.stdout + done.stderr for secret in secrets)
