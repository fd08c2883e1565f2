"""Rules of the house that no linter knows."""

import ast
import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


SOURCES = _tracked("*.py")
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in ("tests", "examples")]

FLOORS = sorted((ROOT / "coldstart_bench" / "loaders").glob("floor*.py"))


def _is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _is_silent(text: str) -> bool:
    """Whether a module begins without a docstring."""
    return not ast.get_docstring(ast.parse(text))


def _beyond(text: str) -> list[str]:
    """Statements of an `__init__.py` that are neither its docstring, an import nor `__all__`."""
    body = ast.parse(text).body[1:]
    return [ast.unparse(node) for node in body if not isinstance(node, ast.ImportFrom) and not _is_all(node)]


def _reads_environment(text: str) -> bool:
    return "os.environ" in text or "os.getenv" in text


def test_a_module_says_what_it_is() -> None:
    """Every module begins with a docstring, and `__init__` holds nothing else."""
    assert [path for path in PRODUCT if _is_silent(path.read_text())] == []
    assert {
        path: beyond for path in PRODUCT if path.name == "__init__.py" if (beyond := _beyond(path.read_text()))
    } == {}


def test_the_environment_is_read_in_settings_alone() -> None:
    """`os.environ` and `os.getenv` stand in `settings.py`, in the programs of the bench, and nowhere else."""
    others = [path for path in PRODUCT if path.name != "settings.py" and "coldstart_bench" not in path.parts]
    assert [path for path in others if _reads_environment(path.read_text())] == []


@pytest.mark.parametrize(
    ("rule", "wrong", "right"),
    [
        pytest.param(_is_silent, "import os", '"""This."""\nimport os', id="no docstring"),
        pytest.param(_beyond, '"""This."""\nx = 1', '"""This."""\nfrom a import b\n__all__ = ["b"]', id="logic"),
        pytest.param(_reads_environment, "os.environ['A']", "environ(name)", id="the environment"),
        pytest.param(_reads_environment, "os.getenv('A')", "getenv(name)", id="a variable"),
    ],
)
def test_a_rule_sees_it(rule: Callable[[str], object], wrong: str, right: str) -> None:
    """Negative control of those that look at all modules at once."""
    assert rule(wrong)
    assert not rule(right)


@pytest.mark.parametrize("floor", FLOORS, ids=lambda path: path.name)
def test_a_floor_is_small_and_imports_nothing_of_ours(floor: Path) -> None:
    """A floor that anyone can read in a minute."""
    assert len(floor.read_text().splitlines()) <= 60
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for node in ast.walk(ast.parse(floor.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.partition(".")[0] for name in names} & ours


# The programs that ratios are to. Another digest belongs to a design note which has both programs' figures.
FROZEN = {
    "floor.py": "23dad36440350088",
    "floor_device.py": "64ab7c54931ca871",
    "floor_fork.py": "ddfd29eb08fcc97a",
    "floor_front.py": "8467415180dcae8f",
    "floor_memory.py": "23b1ed2ccd177f83",
    "floor_read.py": "8e891700ff729459",
}


def test_floors_are_frozen() -> None:
    """A ratio of today is to the same program as one of before."""
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in FLOORS} == FROZEN


def _makes_a_type(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    typed = len(node.args) > 1 or any(word.arg == "type" for word in node.keywords)
    return called in ("msgspec.convert", "msgspec.json.Decoder") or (called == "msgspec.json.decode" and typed)


def _types_made(text: str) -> list[int]:
    """Lines that let msgspec make a type ready, for whichever thread comes first."""
    return [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.expr) and _makes_a_type(node)]


def test_types_are_made_ready_in_one_place() -> None:
    """By `contracts/wire.py`, one at a time: two threads that do it at once end the process."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in PRODUCT}
    made = {name: _types_made(text) for name, text in texts.items() if "msgspec." in text}
    assert [name for name, lines in made.items() if lines] == ["contracts/wire.py"]


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("msgspec.json.decode(raw)", []),
        ("msgspec.json.decode(raw, type=End)", [1]),
        ("x = msgspec.json.Decoder(End).decode(raw)", [1]),
        ("msgspec.convert(found, Claims)", [1]),
    ],
)
def test_types_made(line: str, want: list[int]) -> None:
    """The rule sees each way."""
    assert _types_made(line) == want


# Who may decode JSON, and why. The bench decodes what its own programs print.
DECODERS = {
    "contracts/wire.py": "turns all that can be wrong into BadJson",
    "snapshotter/policy/strict_json.py": "refuses keys that occur twice, which needs Python's own parser",
}


def _decodes_json(text: str) -> bool:
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    named = ((ast.unparse(call.func), call) for call in calls)
    return any(
        name in ("json.loads", "json.load", "msgspec.json.decode") or (name.endswith(".json") and not call.args)
        for name, call in named
    )


def test_json_is_decoded_in_one_place() -> None:
    """A caller that names one kind of error misses another: RecursionError is no ValueError."""
    ours = [path for path in PRODUCT if "coldstart_bench" not in path.parts]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in ours}
    assert sorted(name for name, text in texts.items() if "json" in text and _decodes_json(text)) == sorted(DECODERS)


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("found = json.loads(raw)", True),
        ("found = json.load(file)", True),
        ("found = msgspec.json.decode(raw)", True),
        ("found = client.get(path).json()", True),
        ("raw = json.dumps(found)", False),
        ("found = decode_any(raw)", False),
    ],
)
def test_json_decoded(line: str, want: bool) -> None:
    """The rule sees each way."""
    assert _decodes_json(line) is want
