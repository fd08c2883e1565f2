"""Check what there may be beside the processor: an NVIDIA driver, torch's build, CRIU. torch is not imported.

Of these a model needs torch alone.
"""

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from contracts.gpu import Degraded, GpuFacts, Healthy, Unhealthy, judge
from kelvin.checks.kernel import try_text
from kelvin.policy.findings import Finding, Level, as_bytes
from service.nvml import opened

CHECK_S: Final = 10.0
_DRIVER: Final = Path("/proc/driver/nvidia/version")


def check_devices() -> Iterator[Finding]:
    """CRIU's own check runs for CHECK_S at most."""
    driver = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", try_text(_DRIVER))
    yield judge_driver(driver[1] if driver else "", _version("torch"))
    with opened() as gpus:
        yield from map(judge_gpu, () if gpus is None else gpus.look())
    yield Finding("CRIU", Level.NOTE, _criu(), "none: processes are forked, not restored")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _criu() -> str:
    """What `criu check` said last, and whether it is content."""
    program = shutil.which("criu")
    if program is None:
        return "not installed"
    try:
        done = subprocess.run([program, "check"], capture_output=True, text=True, timeout=CHECK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"refuses: {type(error).__name__}"
    lines = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
    return f"{'works' if done.returncode == 0 else 'refuses'}: {lines[-1][:200]}"


def judge_driver(nvidia: str, torch: str) -> Finding:
    """The versions of NVIDIA's driver and of torch; empty where there is none."""
    installed = f"torch {torch}" if torch else "torch is not installed"
    seen = f"NVIDIA driver {nvidia}; {installed}" if nvidia else f"no NVIDIA driver; {installed}"
    if not torch:
        return Finding("GPU", Level.FAIL, seen, "no model can run", "pip install 'kelvin-serving[runtime]'")
    if nvidia:
        return Finding("GPU", Level.NOTE, seen, "models compute on the processor: the path to a GPU was never run")
    return Finding("GPU", Level.NOTE, seen, "models compute on the processor")


def judge_gpu(facts: GpuFacts) -> Finding:
    """What a runtime in a pod would make of it."""
    check = f"{facts.name} health"
    match judge(facts):
        case Unhealthy(reason):
            return Finding(check, Level.FAIL, reason, "a runtime in a pod serves nothing on it", "reset or replace it")
        case Degraded(reason):
            return Finding(check, Level.WARN, reason, "none yet", "drain its node when it suits, and reset it")
        case Healthy():
            known = (f"{facts.temperature_c} C" if facts.temperature_c is not None else "", _memory_of(facts))
            return Finding(check, Level.OK, ", ".join(each for each in known if each) or "nothing is known against it")


def _memory_of(facts: GpuFacts) -> str:
    if facts.memory_used_bytes is None or facts.memory_total_bytes is None:
        return ""
    return f"{as_bytes(facts.memory_used_bytes)} of {as_bytes(facts.memory_total_bytes)} in use"
