"""Read facts from the docs and from the code, for `test_docs` to compare. Each checker returns a list of problems."""

import ast
import asyncio
import functools
import importlib
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from activator.routing.request_routes import ListModels, NoRoute, RequestRoute, route
from kelvin.blobstore.memory_store import MemoryStore
from kelvin.contracts import artifact_errors, errors, traffic_errors
from kelvin.ipc.openapi import build_document
from snapshotter.app.app import open_app
from snapshotter.app.settings import SnapshotterSettings
from tests.controlplane.route_list import AnyAttribute, application, routes_in

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
Route = tuple[str, str]  # method, path with its parameters as {}
T = TypeVar("T")


def read(name: str) -> str:
    """Return the text of a page."""
    return (DOCS / name).read_text()


def operations() -> str:
    """Return the text of all how-to pages of operations."""
    return "\n".join(path.read_text() for path in sorted((DOCS / "operations").glob("*.md")))


def tracked(pattern: str) -> list[Path]:
    """Return the tracked files that match; outside a git checkout, the files in `docs`."""
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=False)
    found = [ROOT / line for line in listed.stdout.splitlines()] or list(DOCS.rglob(pattern))
    return [path for path in found if path.exists()]


def differences(documented: Iterable[object], real: Iterable[object]) -> list[str]:
    """Describe what is only in one of the two; [] if they are equal."""
    written, existing = set(documented), set(real)
    missing, invented = existing - written, written - existing
    return sorted([f"not documented: {item}" for item in missing] + [f"not real: {item}" for item in invented])


# Failures.


def failures_of_code() -> set[tuple[str, int, bool]]:
    """Return code, status and retryability of each failure type. `RemoteFailure` has those of another process."""
    named = [kind for module in (errors, artifact_errors, traffic_errors) for kind in vars(module).values()]
    kinds = [kind for kind in named if isinstance(kind, type) and issubclass(kind, errors.Failure)]
    # None means that it depends on the instance. The docs then say that a retry may help.
    return {(kind.code, kind.status, bool(kind.retryable)) for kind in kinds if kind is not errors.RemoteFailure}


def failures_of_docs(text: str) -> set[tuple[str, int, bool]]:
    """Return the rows of the table of failures."""
    rows = re.findall(r"^\| `([a-z_]+)` \| (\d{3}) \| (yes|no) \|", text, re.MULTILINE)
    return {(code, int(status), retryable == "yes") for code, status, retryable in rows}


# Routes.


def routes_of_docs(text: str) -> set[Route]:
    """Return the code spans that begin with a method."""
    found = re.findall(r"`(GET|POST|PUT|DELETE|PATCH) (/[^\s`?]*)[^`]*`", text)
    return {(method, re.sub(r"\{[^}]*\}", "{}", path)) for method, path in found}


def routes_of_app(app: Any) -> set[Route]:
    """Return the routes of an application or router, without the HEAD routes that come with GET."""
    return {(method, re.sub(r"\{[^}]*\}", "{}", path)) for method, path in routes_in(app)}


def routes_of_front() -> set[Route]:
    """Return the activator's routes: its path patterns, and the methods that it accepts for them."""
    tree = ast.parse((ROOT / "activator" / "routing" / "request_routes.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    paths = {re.sub(r"\([^)]*\)", "{}", text) for text in texts if re.fullmatch(r"/[a-z]\S*[^/\s]", text)}
    return {
        (method, path)
        for inner in paths
        for path in (inner, f"/v1{inner}", f"/v2{inner}")
        for method in ("GET", "POST", "PUT", "DELETE")
        if _is_there(route(method, path.replace("{}", "x").encode(), "localhost", "kelvin.test"))
    }


def _is_there(asked: RequestRoute) -> bool:
    """Return whether a route exists. A slash in a model's name, as in `x/infer`, makes no route."""
    return not isinstance(asked, NoRoute | ListModels) or (
        isinstance(asked, ListModels) and "/" not in (asked.model or "")
    )


def routes_of_code(scratch: Path) -> set[Route]:
    """Return all routes that are reachable from outside, directly or through the activator."""
    return routes_of_front().union(*of_services(scratch, routes_of_app))


def described_routes(scratch: Path) -> set[Route]:
    """Return the routes in the services' OpenAPI documents. Raises KeyError for a route without a description."""

    def described(app: Any) -> set[Route]:
        paths = build_document(app, "Kelvin")["paths"].items()
        return {(method.upper(), re.sub(r"\{[^}]*\}", "{}", path)) for path, methods in paths for method in methods}

    return set[Route]().union(*of_services(scratch, described))


def of_services(scratch: Path, look: Callable[[Any], T]) -> tuple[T, T]:
    """Apply `look` to the applications behind the activator: the control plane and the snapshotter."""

    async def of_snapshotter() -> T:
        settings = SnapshotterSettings(data=scratch, store_url="memory:")
        async with open_app(settings, MemoryStore(), cast(Any, AnyAttribute())) as app:
            return look(app)

    return look(application()), asyncio.run(of_snapshotter())


# Layers.


def rules_of_docs(text: str) -> list[str]:
    """Return the rule names in italics at the start of bullets. A `*` in a name is escaped in the page."""
    return [name.replace("\\*", "*") for name in re.findall(r"^- \*((?:[^*\\]|\\\*)+)\*(?=:|$)", text, re.MULTILINE)]


def rules_of_imports() -> list[str]:
    """Return the names of import-linter's contracts."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [each["name"] for each in contracts]


# Settings.


def settings_of_code() -> dict[str, tuple[str | None, str | None]]:
    """Return name -> (default, rule) as the table shows them; None if the code computes it, or there is none."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for path in sorted(path for path in tracked("*settings.py") if path.relative_to(ROOT).parts[0] != "tests"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and re.fullmatch(r"KELVIN_[A-Z0-9_]+", str(node.value)):
                found.setdefault(str(node.value), (None, None))
        scope = vars(importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func).rpartition(".")[2] in ("integer", "number", "text") and len(call.args) > 2:
                found[ast.literal_eval(call.args[1])] = _shown(call, scope)
    return found


def _shown(call: ast.Call, scope: dict[str, Any]) -> tuple[str | None, str | None]:
    name = ast.literal_eval(call.args[1])

    def value_of(expression: ast.expr) -> Any:
        try:
            return eval(ast.unparse(expression), scope)
        except NameError:  # the default is computed from a variable
            return None

    limits = {word.arg: value_of(word.value) for word in call.keywords}
    low, high = (shown(name, limits.get(which)) for which in ("low", "high"))
    rule = None if low is None else f"{low} or more" if high is None else f"{low} to {high}"
    return shown(name, value_of(call.args[2])), rule


def shown(name: str, value: float | str | None) -> str | None:
    """Format a value as people write it: bytes in the largest unit that gives a whole number."""
    if not isinstance(value, int | float) or "BYTES" not in name:
        return f"{value:g}" if isinstance(value, float) else None if value is None else str(value)
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value and value % 1024 == 0:
        value, units = value // 1024, units[1:]
    return f"{value} {units[0]}"


def settings_of_docs(text: str) -> dict[str, tuple[str, str]]:
    """Return name -> (default, rule) of the table's rows."""
    rows = re.findall(r"^\| `(KELVIN_[A-Z0-9_]+|PORT)` \| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    return {name: (default.strip().strip("`"), rule.strip()) for name, default, rule in rows}


def wrong_settings(text: str, real: dict[str, tuple[str | None, str | None]]) -> list[str]:
    """Describe settings that are missing, do not exist, or have another default or rule."""
    written = settings_of_docs(text)
    problems = differences(set(re.findall(r"KELVIN_[A-Z0-9_]+", text)) | set(written), real)
    problems += [f"no row: {name}" for name in sorted(real.keys() - written.keys())]
    for name in sorted(real.keys() & written.keys()):
        for said, meant in zip(written[name], real[name], strict=True):
            if meant is not None and said != meant:
                problems.append(f"{name}: {said!r} instead of {meant!r}")
    return problems


# Metrics.


def metrics_of_docs(text: str) -> set[str]:
    """Return the metric names in code spans."""
    return set(re.findall(r"`(kelvin_[a-z0-9_]+)`", text))


def metrics_of_code() -> set[str]:
    """Return the metric names in string literals of the product. Four literals with the prefix are no metrics."""
    product = [path for path in tracked("*.py") if path.relative_to(ROOT).parts[0] not in ("tests", "coldstart_bench")]
    found = {name for path in product for name in re.findall(r'"(kelvin_[a-z0-9_]+)"', path.read_text())}
    return found - {"kelvin_backend", "kelvin_gate", "kelvin_read_only", "kelvin_recorder"}


# Dependencies, links, names.


def dependencies_of_project() -> set[str]:
    """Return the packages that an installation and its extras require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    return {re.split(r"[^A-Za-z0-9._-]", requirement)[0] for requirement in wanted}


def dependencies_of_docs(text: str) -> set[str]:
    """Return the first column of the tables."""
    return set(re.findall(r"^\| `([A-Za-z0-9._-]+)` \|", text, re.MULTILINE))


def broken_links(path: Path, text: str) -> list[str]:
    """Return a page's relative links whose file or Markdown heading doesn't exist."""
    targets = re.findall(r"\]\(([^)\s]+)\)", _without_code(text))
    return [target for target in targets if not re.match(r"[a-z]+:", target) and not _exists(path, text, target)]


def _exists(path: Path, text: str, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = path.parent / name
    if name and not file.exists():
        return False
    return not anchor or file.suffix not in ("", ".md") or anchor in anchors(file.read_text() if name else text)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings. A second heading of the same text gets `-1`."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", _without_code(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(anchor if anchor not in found else f"{anchor}-1")
    return found


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def unknown_names(text: str, tests: frozenset[str]) -> list[str]:
    """Return the files and tests that a page names and that don't exist."""
    files = re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|toml|md))`", text)
    named = re.findall(r"`(test_\w+)`", text)
    return [name for name in files if not (ROOT / name).exists()] + [name for name in named if name not in tests]


def unlinked_notes(index: str, notes: Iterable[str]) -> list[str]:
    """Return the design notes that the index does not link."""
    return [note for note in notes if f"](design/{note})" not in index]


def commands_of_docs(text: str) -> set[str]:
    """Return the word after `kelvin` in each code span."""
    return set(re.findall(r"`kelvin ([a-z]+)", text))


def unknown_subcommands(text: str, commands: Mapping[str, click.Command]) -> list[str]:
    """Return subcommands that a page names and that don't exist. Groups that also take a name are skipped."""
    found = []
    for name, rest in re.findall(r"`kelvin ([a-z]+) ([a-z]+(?:\|[a-z]+)*)", text):
        group = commands.get(name)
        if isinstance(group, click.Group) and type(group) is click.Group:
            found += [f"{name} {each}" for each in rest.split("|") if each not in group.commands]
    return found


@functools.cache
def names_of_tests() -> frozenset[str]:
    """Return the names of all tests. Read once for all pages."""
    return frozenset(
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    )
