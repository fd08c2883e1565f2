"""Rules of the house that no linter knows."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 400


def _tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


SOURCES = _tracked("*.py")
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in ("tests", "examples")]

FLOORS = sorted((ROOT / "coldstart_bench" / "loaders").glob("floor*.py"))


@pytest.mark.skipif(not SOURCES, reason="not a git checkout")
def test_no_file_is_longer_than_it_can_be_read() -> None:
    """400 lines at most."""
    assert [path.name for path in SOURCES if len(path.read_text().splitlines()) > LONGEST] == []


def _is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is(path: Path) -> None:
    """Every module begins with a docstring, `__init__` holds nothing else, and none sleeps while blocking a loop."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "no module docstring"
    if path.name == "__init__.py":
        beyond = [node for node in tree.body[1:] if not isinstance(node, ast.ImportFrom) and not _is_all(node)]
        assert beyond == [], "logic in __init__.py"


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_environment_is_read_in_settings_alone(path: Path) -> None:
    """`os.environ` and `os.getenv` stand in `settings.py`, in the programs of the bench, and nowhere else."""
    if path.name == "settings.py" or "coldstart_bench" in path.parts:
        return
    text = path.read_text()
    assert "os.environ" not in text
    assert "os.getenv" not in text


@pytest.mark.parametrize("floor", FLOORS, ids=lambda path: path.name)
def test_a_floor_is_small_and_imports_nothing_of_ours(floor: Path) -> None:
    """A floor that anyone can read in a minute."""
    assert len(floor.read_text().splitlines()) <= 60
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for node in ast.walk(ast.parse(floor.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.partition(".")[0] for name in names} & ours


def test_there_are_floors() -> None:
    """Else nothing was looked at."""
    assert {path.name for path in FLOORS} >= {"floor.py", "floor_read.py", "floor_memory.py"}
