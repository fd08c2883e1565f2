"""Look for what there may be beside the processor: an NVIDIA driver, torch's build, CRIU. torch is not imported."""

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from kelvin.policy.machine import DeviceFacts
from kelvin.probes.kernel import try_text
from service.nvml import opened

CHECK_S: Final = 10.0
_DRIVER: Final = Path("/proc/driver/nvidia/version")


def look_at_devices() -> DeviceFacts:
    """CRIU's own check runs for CHECK_S at most."""
    driver = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", try_text(_DRIVER))
    said, works = _criu()
    with opened() as gpus:
        seen = () if gpus is None else gpus.look()
    return DeviceFacts(
        nvidia=driver[1] if driver else "", torch=_version("torch"), criu=said, criu_works=works, gpus=seen
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _criu() -> tuple[str | None, bool]:
    """What `criu check` said last, and whether it is content; None where it is not installed."""
    program = shutil.which("criu")
    if program is None:
        return None, False
    try:
        done = subprocess.run([program, "check"], capture_output=True, text=True, timeout=CHECK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__, False
    lines = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
    return lines[-1][:200], done.returncode == 0
