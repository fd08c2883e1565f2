"""The OpenAPI document of the routes below /v1 agrees with the code and the API page: routes, failures, headers."""

import json
import re
from typing import Any

import pytest

from kelvin.contracts.timeline import Stage
from tests.consistency.api_conformance import operations
from tests.consistency.documented_facts import DOCS, Route, differences, failures_of_code, routes_of_front

DOCUMENT: Any = json.loads((DOCS / "openapi-v1.json").read_text())
PARTS: Any = DOCUMENT["components"]
INFERENCE = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
# Failures of predictions, admin calls and pushes. No route below /v1 returns them.
ELSEWHERE = {"schema_mismatch", "conflict", "one_machine_only", "artifact_rejected", "storage_quota_exceeded"}


def described_routes() -> set[Route]:
    return {(method, re.sub(r"\{[^}]*\}", "{}", path)) for method, path in operations(DOCUMENT)}


def described_failures(path: str) -> set[tuple[str, int]]:
    """Return code and status of each error answer of an inference route."""
    found: set[tuple[str, int]] = set()
    for status, answer in DOCUMENT["paths"][path]["post"]["responses"].items():
        if "$ref" in answer:
            (content,) = PARTS["responses"][answer["$ref"].rpartition("/")[2]]["content"].values()
            codes = content["schema"]["allOf"][1]["properties"]["error"]["properties"]["code"]["enum"]
            found |= {(code, int(status)) for code in codes}
    return found


def headers_of_page() -> set[str]:
    """Return the headers of the page's table, in lower case. `-remaining-requests` is short for the full name."""
    page = (DOCS / "api.md").read_text()
    table = page[page.index("### Headers") : page.index("### Cancelling")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    found = [name.lower() for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return {f"x-ratelimit{name}" if name.startswith("-") else name for name in found}


def described_headers() -> set[str]:
    given = {each["name"] for each in PARTS["parameters"].values() if each["in"] == "header"}
    return {name.lower() for name in (*given, *PARTS["headers"])}


def references(part: Any) -> set[str]:
    """Return everything that a part of the document refers to."""
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*(references(each) for each in part.values()))
    return set[str]().union(*(references(each) for each in part)) if isinstance(part, list) else set()


def test_it_describes_every_route() -> None:
    """The document has exactly the routes below /v1."""
    real = {route for route in routes_of_front() if route[1].startswith("/v1")}
    assert differences(described_routes(), real) == []


@pytest.mark.parametrize("path", INFERENCE)
def test_it_describes_every_failure(path: str) -> None:
    """The document has exactly the failures of inference requests, with their status."""
    real = {(code, status) for code, status, _ in failures_of_code() if code not in ELSEWHERE}
    assert differences(described_failures(path), real) == []


def test_it_describes_every_header() -> None:
    """The document has exactly the headers of the page, and the HTTP headers `allow` and `age`."""
    documented = headers_of_page() - {"x-kelvin-schema-hash"}  # predictions only
    assert differences(described_headers() - {"allow", "age"}, documented) == []


def test_it_holds_together() -> None:
    """The document defines exactly what it refers to. Its stages are those of the code."""
    named = {f"#/components/{kind}/{name}" for kind in PARTS if kind != "securitySchemes" for name in PARTS[kind]}
    assert references(DOCUMENT) == named
    stages = PARTS["schemas"]["timeline"]["properties"]["stamps"]["items"]["properties"]["stage"]["enum"]
    assert stages == list(Stage)
