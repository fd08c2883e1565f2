"""Folders stay small and import one another in one direction. import-linter sees only packages."""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("activator", "coldstart_bench", "controlplane", "kelvin", "runtime", "snapshotter", "weightcache")
MAX_FILES = 25

Graph = dict[str, set[str]]


def crowded(root: Path) -> list[str]:
    """Return folders with more than MAX_FILES Python files."""
    folders = [folder for top in (*PACKAGES, "tests") for folder in [root / top, *(root / top).rglob("*/")]]
    counts = {folder: len(list(folder.glob("*.py"))) for folder in folders if folder.is_dir()}
    return [f"{folder.relative_to(root)}: {count} files" for folder, count in counts.items() if count > MAX_FILES]


def folder_graph(sources: dict[str, str]) -> Graph:
    """Return which folder imports which. `sources` maps paths to texts. Modules that start a program are left out."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    graph: Graph = defaultdict(set)
    for path, text in sources.items():
        if path.endswith("__main__.py"):
            continue
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in modules else node.module for name in names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name in modules and (there := str(Path(modules[name]).parent)) != (here := str(Path(path).parent)):
                    graph[here].add(there)
    return graph


def cycle(graph: Graph) -> list[str]:
    """Return one cycle of folders, or []."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_folder_has_more_than_25_files() -> None:
    assert crowded(ROOT) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_of_a_package_import_one_another_in_one_direction(package: str) -> None:
    """Imports inside functions and under TYPE_CHECKING count too."""
    paths = list((ROOT / package).rglob("*.py"))
    assert cycle(folder_graph({str(path.relative_to(ROOT)): path.read_text() for path in paths})) == []


def test_a_cycle_is_found() -> None:
    sources = {
        "a/x/one.py": "from a.y import two",
        "a/y/two.py": "def f():\n    from a.x.one import g",
        "a/__init__.py": "",
    }
    assert set(cycle(folder_graph(sources))) == {"a/x", "a/y"}


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "runtime" / "api").mkdir(parents=True)
    for number in range(MAX_FILES + 1):
        (tmp_path / "runtime" / "api" / f"{number}.py").touch()
    assert crowded(tmp_path) == ["runtime/api: 26 files"]
