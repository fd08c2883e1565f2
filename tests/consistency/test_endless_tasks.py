"""No endless coroutine is started as a plain task, because an unexpected error would end it unnoticed.

A coroutine that runs as long as its process or owner belongs in `Loops.start` of `kelvin/process/loops.py`.
"""

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.consistency.test_code_rules import PRODUCT, ROOT

REQUEST = "a part of one request or connection, which ends with it"
TOGETHER = "parts of one loop that share what they see of the cluster, and so are started again together"

# Endless coroutines that are plain tasks all the same: "module: coroutine" -> the reason.
ENDLESS = {
    "activator/request/client_response.py: _send_heartbeats": REQUEST,
    "activator/http/client_connection.py: run": REQUEST,
    "controlplane/api/internal_api.py: _stream": REQUEST,
    "controlplane/knative/custom_resource_controller.py: run": TOGETHER,
    "controlplane/app/leader_election.py: _renew_until_lost": "it ends the moment the lead is lost: no back-off",
    "controlplane/knative/services/node_forecasts.py: _repeat": TOGETHER,
    "controlplane/knative/knative_controller.py: run": TOGETHER,
    "controlplane/knative/services/tenant_namespaces.py: _probe_forever": TOGETHER,
    "kelvin/process/loops.py: run": "makes the tasks of all loops",
}


def _texts() -> dict[str, str]:
    """Return the text of each product module by name."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in PRODUCT if "coldstart_bench" not in path.parts}


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _own_nodes(node)


def _is_endless(node: ast.AST) -> bool:
    """Return whether a statement is `while True` or a loop over `count()`."""
    if isinstance(node, ast.While):
        return isinstance(node.test, ast.Constant) and bool(node.test.value)
    return isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and _called(node.iter) == "count"


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _coroutines(tree: ast.Module) -> dict[str, bool]:
    """Return a module's coroutine functions by name, and whether a function of that name is endless."""
    found: dict[str, bool] = {}
    for each in (node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)):
        found[each.name] = found.get(each.name, False) or any(map(_is_endless, _own_nodes(each)))
    return found


def _endless_tasks(texts: Mapping[str, str]) -> list[str]:
    """Return endless coroutines that are started as tasks. `Loops.start` takes a function, the others a coroutine.

    A function or a method of `self` is looked up in its module, anything else in all modules.
    """
    trees = {name: ast.parse(text) for name, text in texts.items()}
    coroutines = {name: _coroutines(tree) for name, tree in trees.items()}
    anywhere = {called for those in coroutines.values() for called, is_endless in those.items() if is_endless}
    found = set()
    for name, tree in trees.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if _called(call) not in ("create_task", "ensure_future", "start"):
                continue
            for work in (
                each for each in (*call.args, *(it.value for it in call.keywords)) if isinstance(each, ast.Call)
            ):
                called, its_object = _called(work), getattr(work.func, "value", None)
                is_own = its_object is None or ast.unparse(its_object) == "self"
                own = coroutines[name].get(called) if is_own else None
                if called in anywhere if own is None else own:
                    found.add(f"{name}: {called}")
    return sorted(found)


def test_endless_coroutines_are_no_tasks() -> None:
    """Only the coroutines in ENDLESS are started by `Tasks.start` or as a task."""
    assert _endless_tasks(_texts()) == sorted(ENDLESS)


FOREVER = "async def forever(self):\n    while True:\n        await beat()\n"
ONCE = "async def once():\n    await beat()\n"


@pytest.mark.parametrize(
    ("start", "is_found"),
    [
        ("tasks.start(forever(), 'beat')", True),
        ("tasks.start(work=self.forever(), name='beat')", True),
        ("asyncio.create_task(forever(), name='beat')", True),
        ("asyncio.ensure_future(other.forever())", True),
        ("tasks.start(once(), 'beat')", False),
        ("loops.start('beat', forever)", False),
        ("tasks.start_loop('beat', lambda: forever())", False),
    ],
)
def test_endless_task_found(start: str, is_found: bool) -> None:
    """The rule finds each way to start an endless task, in the module that defines it and in another."""
    assert bool(_endless_tasks({"a.py": FOREVER + ONCE + start})) is is_found
    assert bool(_endless_tasks({"a.py": FOREVER + ONCE, "b.py": start})) is is_found


def test_counting_for_ever_is_endless() -> None:
    """A loop over `count()` is endless like `while True`. A loop in an inner function belongs to that function."""
    counts = "async def work():\n    for beat in count():\n        await tell(beat)\ncreate_task(work())"
    inner = "async def work():\n    async def inner():\n        while True:\n            pass\ncreate_task(work())"
    assert _endless_tasks({"a.py": counts}) == ["a.py: work"]
    assert _endless_tasks({"a.py": inner}) == []
