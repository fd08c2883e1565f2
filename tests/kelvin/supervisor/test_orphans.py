"""A child that is still loading when its supervisor is killed takes nothing from the next installation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kelvin.supervisor.child_group import ChildSpec, specs_of
from kelvin.supervisor.settings import child_environment, load_up


@pytest.mark.parametrize("spec", specs_of(filters=True), ids=lambda spec: spec.name)
def test_late_orphan_makes_no_socket(spec: ChildSpec, tmp_path: Path) -> None:
    """It exits with 0 and creates no socket and no database."""
    reader, writer = os.pipe()
    os.close(writer)
    environment = child_environment(load_up(tmp_path, None, None), reader, uses_store=spec.uses_store)
    try:
        done = subprocess.run(
            [sys.executable, "-m", spec.module], env=environment, pass_fds=[reader], capture_output=True, check=False
        )
    finally:
        os.close(reader)
    assert (done.returncode, b"not starting" in done.stderr + done.stdout) == (0, True), done.stderr
    assert list(tmp_path.rglob("*")) == []
