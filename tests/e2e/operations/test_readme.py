"""What the README prints works as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
CURLS = [block for block in BLOCKS if "curl" in block]


@pytest.fixture(scope="module")
def tour(kelvin: Installation) -> Installation:
    """The README's model, pushed under the README's name."""
    kelvin.push(ROOT / "examples" / "tinylm" / "model", "tinylm")
    return kelvin


def test_there_are_examples() -> None:
    """The control: an extraction that finds nothing would pass everything."""
    assert len(CURLS) >= 2


@pytest.mark.parametrize("block", CURLS, ids=range(len(CURLS)))
def test_a_curl_example_works_as_printed(tour: Installation, block: str) -> None:
    """Run by a shell, with the two variables that the README sets pointing here."""
    environment = {**os.environ, "KELVIN_DATA": str(tour.data), "KELVIN_URL": f"https://localhost:{tour.port}"}
    done = subprocess.run(["bash", "-euc", block], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"error"' not in done.stdout
    assert "tinylm" in done.stdout


def test_the_python_example_works_as_printed(tour: Installation, tmp_path: Path) -> None:
    """The official client, with nothing but address, key and CA."""
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    environment = {**os.environ, "KELVIN_DATA": str(tour.data), "KELVIN_URL": f"https://localhost:{tour.port}"}
    script = tmp_path / "example.py"
    script.write_text(block)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
