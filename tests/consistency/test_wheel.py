"""The wheel works in an empty environment, and no other distribution provides one of its names."""

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
NAMES = {"activator", "coldstart_bench", "controlplane", "kelvin", "runtime", "snapshotter", "weightcache"}


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
    """The wheel contains no test, example or stray folder."""
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == NAMES


def _needed(distribution: importlib.metadata.Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield the requirements of a distribution and of these extras, as far as their markers apply here."""
    for each in map(Requirement, distribution.requires or ()):
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield each


def _link_needed(into: Path) -> None:
    """Link the installed wheel's requirements, without extras, from the test environment into `into`."""
    (ours,) = importlib.metadata.distributions(name="kelvin-serving", path=[str(into)])
    todo, seen = [*_needed(ours, frozenset())], set[tuple[str, frozenset[str]]]()
    while todo:
        requirement = todo.pop()
        extras = frozenset(requirement.extras)
        if (requirement.name, extras) in seen:
            continue
        seen.add((requirement.name, extras))
        found = importlib.metadata.distribution(requirement.name)
        todo += _needed(found, extras)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (into / top).exists():
                (into / top).symlink_to(Path(str(found.locate_file(top))))


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_it_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """`kelvin --version` runs without extras, and only our distribution provides our top-level names."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    place = {"base": str(tmp_path / "env"), "platbase": str(tmp_path / "env")}
    _link_needed(Path(sysconfig.get_path("purelib", "venv", place)))
    said = subprocess.run([str(python.parent / "kelvin"), "--version"], check=True, capture_output=True, text=True)
    assert said.stdout.startswith("kelvin, version ")
    listing = (
        "import importlib.metadata as m\n"
        "for name, owners in m.packages_distributions().items(): print(f'{name}={sorted(set(owners))}')"
    )
    owners = subprocess.run([str(python), "-c", listing], check=True, capture_output=True, text=True, cwd=tmp_path)
    provided = dict(line.split("=", 1) for line in owners.stdout.splitlines())
    assert {name: provided.get(name) for name in NAMES} == dict.fromkeys(NAMES, "['kelvin-serving']")
