"""The docs agree with the code: failures, routes, settings, metrics, dependencies, commands, links and names."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.cli.main import main
from kelvin.cli.operations.timeline_command import draw_waterfall
from kelvin.contracts.serving.control_messages import TenantLimits
from kelvin.contracts.timeline import Stage, Stamp
from tests.consistency.documented_facts import (
    DOCS,
    ROOT,
    broken_links,
    commands_of_docs,
    dependencies_of_docs,
    dependencies_of_project,
    described_routes,
    differences,
    failures_of_code,
    failures_of_docs,
    metrics_of_code,
    metrics_of_docs,
    names_of_tests,
    operations,
    read,
    routes_of_code,
    routes_of_docs,
    rules_of_docs,
    rules_of_imports,
    settings_of_code,
    tracked,
    unknown_names,
    unknown_subcommands,
    unlinked_notes,
    wrong_settings,
)


def test_failures() -> None:
    """The docs list exactly the failure codes of the code, with status and retryability."""
    assert differences(failures_of_docs(read("api.md")), failures_of_code()) == []


def test_routes(tmp_path: Path) -> None:
    """The docs list exactly the routes of activator, control plane and snapshotter."""
    assert differences(routes_of_docs(read("api.md")), routes_of_code(tmp_path)) == []


def test_openapi(tmp_path: Path) -> None:
    """Every route that the activator forwards is in its service's OpenAPI document (`kelvin/ipc/openapi.py`)."""
    outer = {route for route in routes_of_code(tmp_path) if route[1].startswith(("/admin/v1/", "/push/v1/"))}
    assert differences(described_routes(tmp_path), outer) == []


def test_settings() -> None:
    """The docs list exactly the settings of the code, with default and rule."""
    assert wrong_settings(operations(), settings_of_code()) == []


def _rows(page: str, heading: str, pattern: str) -> list[str]:
    """Return the first cells of the rows below a heading."""
    section = read(page).partition(f"{heading}\n")[2].partition("\n#")[0]
    return re.findall(rf"^\| `{pattern}` \|", section, re.MULTILINE)


def test_settings_of_tenants_and_models() -> None:
    """The docs have one row for each tenant limit and each scale setting."""
    limits = ["--" + name.replace("_", "-") for name in TenantLimits.__struct_fields__]
    assert differences(_rows("operations/limits.md", "## Options", "(--[a-z-]+)"), limits) == []
    settings = _rows("autoscaling.md", "## Settings of a model", "([a-z_]+)")
    assert differences(settings, ScaleSettings.__struct_fields__) == []


def test_metrics() -> None:
    """The docs list exactly the metrics of the code."""
    assert differences(metrics_of_docs(operations()), metrics_of_code()) == []


def test_dependencies() -> None:
    """The docs list exactly the packages of the project."""
    assert differences(dependencies_of_docs(read("dependencies.md")), dependencies_of_project()) == []


def test_commands() -> None:
    """The API page explains every command, and no page names a command that doesn't exist."""
    assert differences(commands_of_docs(read("api.md")), main.commands) == []
    spoken = {command for path in DOCS.rglob("*.md") for command in commands_of_docs(path.read_text())}
    assert spoken <= set(main.commands)
    pages = (ROOT / "README.md", *DOCS.rglob("*.md"))
    assert [each for path in pages for each in unknown_subcommands(path.read_text(), main.commands)] == []


def test_layers() -> None:
    """The docs list exactly the import rules, by name."""
    assert differences(rules_of_docs(read("architecture.md")), rules_of_imports()) == []


def test_stages() -> None:
    """The docs explain every stage of a timeline, in the order of a cold request."""
    row = r"^\| `([a-z_]+)` \| (?:activator|control plane|runtime) \|"
    rows = re.findall(row, read("architecture.md"), re.MULTILINE)
    assert rows == [str(stage) for stage in Stage]


def test_the_waterfall_is_drawn_so() -> None:
    """The waterfall on the page about slow starts is what the command draws."""
    at_us = (358, 437, 549, 380899, 384916, 420684, 441769, 469033, 470305, 524777, 526611, 587877)
    drawn = draw_waterfall([Stamp(stage, at) for stage, at in zip(Stage, at_us, strict=True)])
    assert f"```\n{drawn}\n```" in read("operations/slow-starts.md")


def test_design_notes_are_linked() -> None:
    assert unlinked_notes(read("README.md"), sorted(path.name for path in (DOCS / "design").glob("*.md"))) == []


@pytest.mark.parametrize("path", tracked("*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link of a page leads to a file, and to a heading of it."""
    assert broken_links(path, path.read_text()) == []


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_what_a_page_names_exists(path: Path) -> None:
    """Every file and test that a page names exists."""
    assert unknown_names(path.read_text(), names_of_tests()) == []


def _without(text: str, part: str) -> str:
    assert part in text
    return text.replace(part, "")


CODES = {("overloaded", 503, True)}
FULL = "| `overloaded` | 503 | yes | full |"
SETTINGS: dict[str, tuple[str | None, str | None]] = {"KELVIN_PORT": ("8443", "0 to 65535")}
PORT_ROW = "| `KELVIN_PORT` | 8443 | 0 to 65535 | the port |"


@pytest.mark.parametrize(
    "find",
    [
        pytest.param(lambda: differences(failures_of_docs(""), CODES), id="a code without a row"),
        pytest.param(lambda: differences(failures_of_docs(FULL.replace("503", "500")), CODES), id="a status"),
        pytest.param(lambda: differences(failures_of_docs("| `gone` | 410 | no | x |"), ()), id="an invented code"),
        pytest.param(lambda: differences(routes_of_docs("`GET /v1/models`"), {("POST", "/v1/models")}), id="a method"),
        pytest.param(lambda: differences(routes_of_docs("`GET /v1/{any}`"), {("GET", "/v1/models")}), id="a path"),
        pytest.param(lambda: differences(rules_of_docs("- *Policy*"), ["Policy is pure"]), id="a rule's name"),
        pytest.param(lambda: wrong_settings("", SETTINGS), id="a setting without a row"),
        pytest.param(lambda: wrong_settings("`KELVIN_PORT`", SETTINGS), id="a setting in prose alone"),
        pytest.param(lambda: wrong_settings(PORT_ROW.replace("8443", "8080"), SETTINGS), id="another default"),
        pytest.param(lambda: wrong_settings(PORT_ROW.replace("65535", "99999"), SETTINGS), id="another rule"),
        pytest.param(lambda: wrong_settings(f"{PORT_ROW}\n`KELVIN_TURBO`", SETTINGS), id="an invented setting"),
        pytest.param(lambda: differences(dependencies_of_docs("| `left-pad` | why |"), ()), id="a dependency"),
        pytest.param(lambda: differences(commands_of_docs("`kelvin dance`"), ()), id="a command"),
        pytest.param(lambda: unknown_subcommands("`kelvin models show M`", main.commands), id="a command of a group"),
        pytest.param(lambda: broken_links(DOCS / "x.md", "[x](nowhere.md#there)"), id="a link"),
        pytest.param(lambda: broken_links(DOCS / "x.md", "[x](README.md#nowhere)"), id="a link to a heading"),
        pytest.param(lambda: unknown_names("`contracts/nothing.py`", frozenset()), id="a file"),
        pytest.param(lambda: unknown_names("`test_nothing`", frozenset()), id="a test"),
        pytest.param(lambda: unlinked_notes("[a](design/0001-a.md)", ["0002-b.md"]), id="a design note"),
    ],
)
def test_a_planted_gap_is_found(find: Callable[[], list[str]]) -> None:
    """Negative control: each check finds its gap."""
    assert find()


def test_what_is_right_is_not_found() -> None:
    """Correct pages cause no findings."""
    assert wrong_settings(PORT_ROW, SETTINGS) == []
    assert differences(failures_of_docs(FULL), CODES) == []
    assert broken_links(DOCS / "x.md", "# Here\n[a](README.md) [b](https://example.com) [c](#here)") == []


def test_a_row_taken_out_of_the_real_pages_is_missed(tmp_path: Path) -> None:
    """A row removed from a real page is found."""
    api, real = read("api.md"), routes_of_code(tmp_path)
    assert differences(failures_of_docs(_without(api, "| `probe_failed` | 500")), failures_of_code())
    assert differences(routes_of_docs(_without(api, "`POST /push/v1/fsck`")), real)
    assert differences(routes_of_docs(_without(api, "`GET /v1/requests/{id}/timeline`")), real)
    assert wrong_settings(_without(operations(), "| `KELVIN_STALL_S` |"), settings_of_code())
    assert differences(metrics_of_docs(_without(operations(), "| `kelvin_firewall_total` |")), metrics_of_code())
