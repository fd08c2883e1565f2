"""Check what the machine has besides the CPU: an NVIDIA driver, torch, CRIU. Running a model needs only torch.

The version of torch is read from its package metadata, so torch is not imported.
"""

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kelvin.devices.gpu_policy import DegradedGpu, GpuFacts, HealthyGpu, UnhealthyGpu, judge_gpu_health
from kelvin.devices.nvml import open_gpus
from kelvin.doctor.finding_policy import Finding, FindingLevel, format_bytes
from kelvin.doctor.kernel_checks import try_read_text

CHECK_S: Final = 10.0
_DRIVER: Final = Path("/proc/driver/nvidia/version")


def check_devices() -> Iterator[Finding]:
    """Yield findings about the driver, torch, each GPU and CRIU. `criu check` runs for at most CHECK_S seconds."""
    driver = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", try_read_text(_DRIVER))
    yield judge_driver(driver[1] if driver else "", _version("torch"))
    with open_gpus() as gpus:
        yield from map(judge_gpu, () if gpus is None else gpus.read_facts())
    yield Finding("CRIU", FindingLevel.NOTE, _check_criu(), "none: processes are forked, not restored")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _check_criu() -> str:
    """Return whether `criu check` succeeds, and the last line that it prints."""
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
    """Judge the versions of NVIDIA's driver and of torch. An empty text means that it is not installed."""
    installed = f"torch {torch}" if torch else "torch is not installed"
    seen = f"NVIDIA driver {nvidia}; {installed}" if nvidia else f"no NVIDIA driver; {installed}"
    if not torch:
        return Finding("GPU", FindingLevel.FAIL, seen, "no model can run", "pip install 'kelvin-serving[runtime]'")
    if nvidia:
        return Finding("GPU", FindingLevel.NOTE, seen, "models run on the CPU: GPU support was never tested")
    return Finding("GPU", FindingLevel.NOTE, seen, "models run on the CPU")


def judge_gpu(facts: GpuFacts) -> Finding:
    """Judge a GPU by the same health policy that a runtime in a pod applies."""
    check = f"{facts.name} health"
    match judge_gpu_health(facts):
        case UnhealthyGpu(reason):
            return Finding(
                check, FindingLevel.FAIL, reason, "a runtime in a pod refuses to use it", "reset or replace it"
            )
        case DegradedGpu(reason):
            return Finding(check, FindingLevel.WARN, reason, "none yet", "drain its node at a good time, and reset it")
        case HealthyGpu():
            known = (f"{facts.temperature_c} C" if facts.temperature_c is not None else "", _memory_of(facts))
            return Finding(
                check, FindingLevel.OK, ", ".join(each for each in known if each) or "no problem is reported"
            )


def _memory_of(facts: GpuFacts) -> str:
    if facts.memory_used_bytes is None or facts.memory_total_bytes is None:
        return ""
    return f"{format_bytes(facts.memory_used_bytes)} of {format_bytes(facts.memory_total_bytes)} in use"
