"""The trial's authority and certificate, made by the commands of docs/operations/cluster-install.md."""

import re
import subprocess
from pathlib import Path
from typing import Final

from tests.manifests.test_component_order import PAGE

_COMMANDS: Final = re.findall(r"^openssl req (?:.*\\\n)*.*$", PAGE, re.MULTILINE)


def test_a_strict_client_accepts_them(tmp_path: Path) -> None:
    """Python verifies strictly from 3.13 on: an authority must state that it signs certificates."""
    assert len(_COMMANDS) == 2, "one for the authority, one for the front door"
    subprocess.run(["bash", "-ec", "\n".join(_COMMANDS)], cwd=tmp_path, check=True, capture_output=True)
    verify = [
        "openssl",
        "verify",
        "-x509_strict",
        "-verify_hostname",
        "localhost",
        "-CAfile",
        "ca.crt",
        "fullchain.pem",
    ]
    done = subprocess.run(verify, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
