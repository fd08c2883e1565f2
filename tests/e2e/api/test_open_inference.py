"""schemathesis calls the Open Inference Protocol's routes by our document: no 5xx, nothing undocumented."""

import json
from pathlib import Path
from typing import Any

import pytest

from coldstart_bench.harness.installation import Installation
from tests.consistency.api_conformance import drive, operations, with_examples
from tests.consistency.documented_facts import DOCS, routes_of_front
from tests.runtime.predictor import models

pytestmark = pytest.mark.deep

DOCUMENT = json.loads((DOCS / "open-inference.json").read_text())
BODY = {
    "id": "42",
    "inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": [[1, 2, 3, 4], [0.5, -1, 0, 9]]}],
    "outputs": [{"name": "y"}],
}
# The run must get each of these answers, otherwise it tests too little.
REACHED = {("get", 200), ("get", 404), ("post", 200), ("post", 400), ("post", 404)}


@pytest.fixture(scope="module")
def version(kelvin: Installation, scratch: Path) -> str:
    """A version of a model to call."""
    directory = scratch / "described"
    directory.mkdir()
    (directory / "model.onnx").write_bytes(models.regression().SerializeToString())
    return kelvin.push(directory, "described")


def filled(version: str) -> Any:
    """The document with examples of things that exist."""
    infer = {operation for operation in operations(DOCUMENT) if operation[0] == "POST"}
    parameters = {"model": "described", "version": version[:12]}
    return with_examples(DOCUMENT, parameters, dict.fromkeys(infer, BODY))


def test_it_describes_every_route() -> None:
    """The document has exactly the protocol's routes."""
    real = {route for route in routes_of_front() if route[1].startswith("/v2")}
    named = {
        (method, path.replace("{model}", "{}").replace("{version}", "{}")) for method, path in operations(DOCUMENT)
    }
    assert named == real


def test_as_described(kelvin: Installation, version: str, tmp_path: Path) -> None:
    """Every answer is documented, in the documented form, and below 500."""
    key = (kelvin.data / "default.key").read_text().strip()
    url = f"https://localhost:{kelvin.port}"
    verdict = drive(url, kelvin.data / "ca.pem", filled(version), tmp_path, key, examples=40)
    assert verdict.sound, verdict.said
    reached = {(method.lower(), status) for (method, path), seen in verdict.statuses.items() if path for status in seen}
    assert reached >= REACHED


def test_an_undocumented_answer_is_found(kelvin: Installation, version: str, tmp_path: Path) -> None:
    """Negative control: with an answer removed from the document, the run fails."""
    key = (kelvin.data / "default.key").read_text().strip()
    document = filled(version)
    path = "/v2/models/{model}"
    del document["paths"][path]["get"]["responses"]["200"]
    url = f"https://localhost:{kelvin.port}"
    verdict = drive(url, kelvin.data / "ca.pem", document, tmp_path, key, examples=5, only=path)
    assert not verdict.sound
    assert "Undocumented" in verdict.said
