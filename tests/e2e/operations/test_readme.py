"""The README's examples work as printed."""

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
    """The installation with the README's model."""
    kelvin.push(ROOT / "examples" / "tinylm" / "model", "tinylm")
    return kelvin


def test_there_are_examples() -> None:
    """Negative control: with no extracted example, the other tests would test nothing."""
    assert len(CURLS) >= 2


@pytest.mark.parametrize("block", CURLS, ids=range(len(CURLS)))
def test_a_curl_example_works_as_printed(tour: Installation, block: str) -> None:
    """A shell runs the example, with the README's two variables set for this installation."""
    environment = {**os.environ, "KELVIN_DATA": str(tour.data), "KELVIN_URL": f"https://localhost:{tour.port}"}
    done = subprocess.run(["bash", "-euc", block], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"error"' not in done.stdout
    assert "tinylm" in done.stdout


def test_the_python_example_works_as_printed(tour: Installation, tmp_path: Path) -> None:
    """The official client works with address, key and CA."""
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    environment = {**os.environ, "KELVIN_DATA": str(tour.data), "KELVIN_URL": f"https://localhost:{tour.port}"}
    script = tmp_path / "example.py"
    script.write_text(block)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
