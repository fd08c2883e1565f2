"""`dataclasses.replace` on a msgspec struct raises at run time, and mypy does not notice. Find such calls."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import pytest

from tests.consistency.test_code_rules import PRODUCT

STRUCTS: Final = frozenset({"Struct", "Wire"})
Kinds = Mapping[str, tuple[bool, frozenset[str]]]  # class name -> (is it a struct, its fields)


def kinds_of(trees: Iterable[ast.Module]) -> Kinds:
    """Return structs and dataclasses with inherited fields. A name counts as a struct if all classes are structs."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        classes.setdefault(node.name, []).append(node)

    def line_of(name: str, seen: frozenset[str] = frozenset()) -> Iterator[ast.ClassDef]:
        for node in classes.get(name, ()) if name not in seen else ():
            yield node
            for base in node.bases:
                yield from line_of(_last(base), seen | {name})

    found = {}
    for name in classes:
        line = list(line_of(name))
        fields = {ast.unparse(each.target) for node in line for each in node.body if isinstance(each, ast.AnnAssign)}
        is_dataclass = any("dataclass" in ast.unparse(each) for node in line for each in node.decorator_list)
        if is_dataclass or any(_last(base) in STRUCTS for node in line for base in node.bases):
            found[name] = (not is_dataclass, frozenset(fields))
    return found


def _last(base: ast.expr) -> str:
    return ast.unparse(base).rpartition(".")[2]


def replaced_structs(tree: ast.Module, kinds: Kinds) -> list[int]:
    """Return the lines that call `dataclasses.replace` on a struct.
    The argument is annotated as a struct, or the replaced fields exist only on structs.
    """
    own = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        for alias in node.names
        if alias.name == "replace"
    } | {"dataclasses.replace"}
    return [
        call.lineno
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module)
        for call in ast.walk(scope)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in own and call.args
        if _is_struct(call, _annotated(scope), kinds)
    ]


def _annotated(scope: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module) -> dict[str, str]:
    """Return the annotated names of a function and their annotations."""
    if isinstance(scope, ast.Module):
        return {}
    given = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
    found = {each.arg: ast.unparse(each.annotation) for each in given if each.annotation is not None}
    return found | {
        ast.unparse(node.target): ast.unparse(node.annotation)
        for node in ast.walk(scope)
        if isinstance(node, ast.AnnAssign)
    }


def _is_struct(call: ast.Call, annotated: Mapping[str, str], kinds: Kinds) -> bool:
    kind = kinds.get(annotated.get(ast.unparse(call.args[0]), ""))
    if kind is not None:
        return kind[0]
    wanted = {each.arg for each in call.keywords if each.arg is not None}
    fitting = [is_struct for is_struct, fields in kinds.values() if wanted and wanted <= fields]
    return bool(fitting) and all(fitting)


def test_structs_are_replaced_by_their_own_function() -> None:
    """Product code replaces fields of structs with `msgspec.structs.replace`."""
    texts = {str(path): path.read_text() for path in PRODUCT}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    kinds = kinds_of(trees.values())
    those = [
        name for name, text in texts.items() if "dataclasses" in text and "replace" in text
    ]  # a call needs both words in the file
    assert {name: lines for name in those if (lines := replaced_structs(trees[name], kinds))} == {}


CLASSES: Final = """
from dataclasses import dataclass, replace
class Row(Wire, frozen=True):
    limits: int
class Wider(Row, frozen=True):
    name: str
@dataclass
class Entry:
    name: str
"""


@pytest.mark.parametrize(
    ("line", "count"),
    [
        pytest.param("def f(row: Row): return replace(row, limits=1)", 1, id="annotated as a struct"),
        pytest.param("def f(row: Wider): return replace(row, name='x')", 1, id="annotated as a struct that inherits"),
        pytest.param("x = replace(rows[0], limits=1)", 1, id="a field that only structs have"),
        pytest.param("def f(entry: Entry): return replace(entry, name='x')", 0, id="a dataclass"),
        pytest.param("x = replace(found, name='x')", 0, id="a field that dataclasses have too"),
        pytest.param("x = structs.replace(rows[0], limits=1)", 0, id="msgspec's own function"),
    ],
)
def test_dataclasses_replace_of_a_struct_is_found(line: str, count: int) -> None:
    tree = ast.parse(CLASSES + line)
    assert len(set(replaced_structs(tree, kinds_of([tree])))) == count
