"""Kelvin installs alone: the wheel works in an empty environment, and nobody else provides one of its names."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {
    "activator", "blobstore", "coldstart_bench", "contracts", "controlplane", "filters", "kelvin", "runtime", "service",
    "snapshotter", "spool", "telemetry", "weightcache",
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a release would build it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in sorted(NAMES):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(tree)]
    subprocess.run(command, check=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.deep
def test_the_wheel_holds_our_packages_and_nothing_else(wheel: Path) -> None:
    """No test, example or stray folder is shipped."""
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == NAMES


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_it_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """`kelvin --version` needs no extra, and each of our top-level names belongs to our distribution alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    said = subprocess.run([str(python.parent / "kelvin"), "--version"], check=True, capture_output=True, text=True)
    assert said.stdout.startswith("kelvin, version ")
    listing = (
        "import importlib.metadata as m\n"
        "for name, owners in m.packages_distributions().items(): print(f'{name}={sorted(set(owners))}')"
    )
    owners = subprocess.run([str(python), "-c", listing], check=True, capture_output=True, text=True, cwd=tmp_path)
    provided = dict(line.split("=", 1) for line in owners.stdout.splitlines())
    assert {name: provided.get(name) for name in NAMES} == dict.fromkeys(NAMES, "['kelvin-serving']")
