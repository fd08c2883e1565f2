"""Code rules that no linter checks."""

import hashlib
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


SOURCES = _tracked("*.py")
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in ("tests", "examples")]

FLOORS = sorted((ROOT / "coldstart_bench" / "programs" / "floors").glob("floor*.py"))


def _reads_environment(text: str) -> bool:
    return "os.environ" in text or "os.getenv" in text


def test_the_environment_is_read_in_settings_alone() -> None:
    """Only `settings.py` and the benchmark programs use `os.environ` or `os.getenv`."""
    others = [path for path in PRODUCT if path.name != "settings.py" and "coldstart_bench" not in path.parts]
    assert [path for path in others if _reads_environment(path.read_text())] == []


def test_no_route_reads_a_body_without_a_bound() -> None:
    """`Request.body` reads a body of any size. `kelvin.ipc.http_bodies` stops at a limit."""
    others = [path for path in PRODUCT if "coldstart_bench" not in path.parts]
    assert [path for path in others if ".body()" in path.read_text()] == []


def test_every_policy_is_named_in_the_purity_rule() -> None:
    """import-linter can't match a suffix of module names, so `pyproject.toml` lists each policy module."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (named,) = (set(each["source_modules"]) for each in contracts if each["name"] == "Policy is pure")
    files = [path.relative_to(ROOT) for path in PRODUCT if path.stem.endswith("_policy")]
    folders = [path.relative_to(ROOT).parent for path in PRODUCT if path.parent.name == "policy"]
    policies = {".".join(path.with_suffix("").parts) for path in (*files, *folders)}
    assert policies == named - {"kelvin.contracts"}


def test_child_processes_import_nothing_of_the_current_directory() -> None:
    """Child processes run with `python -P`: a user's folder may have the name of one of our packages."""
    runs = [path for path in PRODUCT if '"-m"' in path.read_text()]
    assert [path.name for path in runs] == ["python_command.py"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param("os.environ['A']", "environ(name)", id="the environment"),
        pytest.param("os.getenv('A')", "getenv(name)", id="a variable"),
    ],
)
def test_broken_code_rule_is_found(wrong: str, right: str) -> None:
    assert _reads_environment(wrong)
    assert not _reads_environment(right)


# Baseline programs that ratios are measured against. Change a digest with a design note that has both programs'
# figures.
FROZEN = {
    "floor.py": "23dad36440350088",
    "floor_device.py": "64ab7c54931ca871",
    "floor_fork.py": "ddfd29eb08fcc97a",
    "floor_front.py": "8467415180dcae8f",
    "floor_memory.py": "23b1ed2ccd177f83",
    "floor_read.py": "8e891700ff729459",
}


def test_floors_are_frozen() -> None:
    """Ratios stay comparable over time, because the baseline programs don't change."""
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in FLOORS} == FROZEN


def test_there_is_something_to_look_at() -> None:
    """The rules check files that git tracks. Outside a checkout they would check none."""
    assert PRODUCT
