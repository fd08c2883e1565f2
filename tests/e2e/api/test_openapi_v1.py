"""schemathesis calls the routes below /v1 by our document: no 5xx, nothing undocumented, events in their form.

`tests/consistency/test_openapi_document.py` checks that the document is complete.
"""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from coldstart_bench.harness.installation import Installation
from tests.consistency.api_conformance import drive, operations, with_examples
from tests.consistency.documented_facts import DOCS
from tests.e2e.https_client import post
from tests.runtime.encoder.models import write_encoder

pytestmark = pytest.mark.deep

DOCUMENT = json.loads((DOCS / "openapi-v1.json").read_text())
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 2, "temperature": 0}
# Greedy, because a sampled end token could come first.
TEXT = {"model": "llama", "prompt": "w1 w2", "max_tokens": 2, "temperature": 0}
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/v1/chat/completions"): CHAT,
    ("POST", "/v1/completions"): TEXT,
    ("POST", "/v1/embeddings"): {"model": "described-embeddings", "input": ["w1 w2", "w3"]},
}
# The run must get each of these answers, otherwise it tests too little.
REACHED = {("POST", 200), ("POST", 400), ("GET", 200), ("GET", 404), ("DELETE", 204), ("DELETE", 404)}


@pytest.fixture(scope="module")
def asked(kelvin: Installation, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of an answered request. Also pushes an embedding model."""
    kelvin.push(write_encoder(tmp_path_factory.mktemp("openapi-v1"), pooling="mean_tokens"), "described-embeddings")
    answer = post(kelvin, "/v1/completions", TEXT)
    assert answer.status == 200
    return str(answer.headers["x-request-id"])


def filled(request_id: str) -> Any:
    """The document with examples of things that exist, and short answers.
    Deadlines are left out: their refusals are rightly 5xx.
    """
    document = copy.deepcopy(DOCUMENT)
    parts = document["components"]
    for methods in document["paths"].values():
        for operation in methods.values():
            given = [each.get("$ref", "").rpartition("/")[2] or each for each in operation.get("parameters", ())]
            operation["parameters"] = [
                copy.deepcopy(parts["parameters"][each]) if isinstance(each, str) else each
                for each in given
                if each != "deadline"
            ]
    for name in ("chat_request", "completion_request", "embedding_request"):
        schema = parts["schemas"][name]
        schema["properties"]["model"] = {"enum": ["described-embeddings" if name.startswith("emb") else "llama"]}
        schema["required"] += ["model"]
        if "max_tokens" in schema["properties"]:
            schema["properties"]["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 2}
            schema["required"] += ["max_tokens"]
    return with_examples(document, {"model": "llama", "id": request_id}, BODIES)


def keyed(kelvin: Installation) -> str:
    return (kelvin.data / "default.key").read_text().strip()


def test_as_described(kelvin: Installation, asked: str, tmp_path: Path) -> None:
    """Every answer is documented, in the documented form, and below 500."""
    url = f"https://localhost:{kelvin.port}"
    verdict = drive(url, kelvin.data / "ca.pem", filled(asked), tmp_path, keyed(kelvin), examples=8)
    assert verdict.sound, verdict.said
    reached = {(method, status) for (method, path), seen in verdict.statuses.items() if path for status in seen}
    assert reached >= REACHED
    assert {operation for operation in verdict.statuses if operation[1]} >= operations(DOCUMENT)


def test_an_undocumented_answer_is_found(kelvin: Installation, asked: str, tmp_path: Path) -> None:
    """Negative control: with an invented field, or with an answer removed, the run fails."""
    url = f"https://localhost:{kelvin.port}"
    document = filled(asked)
    document["components"]["schemas"]["model"]["required"].append("colour")
    del document["paths"]["/v1/requests/{id}/timeline"]["get"]["responses"]["200"]
    for path, says in (("/v1/models/{model}", "colour"), ("/v1/requests/{id}/timeline", "Undocumented")):
        verdict = drive(
            url, kelvin.data / "ca.pem", document, tmp_path, keyed(kelvin), examples=1, phases="examples", only=path
        )
        assert not verdict.sound
        assert says in verdict.said


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        pytest.param("/v1/chat/completions", CHAT, "chat_event", id="a chat"),
        pytest.param("/v1/completions", TEXT, "completion_event", id="a completion"),
    ],
)
def test_events_are_as_described(
    kelvin: Installation, asked: str, path: str, body: dict[str, Any], schema: str
) -> None:
    """Every event of a stream is as documented, and the last one has the usage."""
    answer = post(kelvin, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.status == 200
    assert answer.done
    described = jsonschema_rs.validator_for({**DOCUMENT, "$ref": f"#/components/schemas/{schema}"})
    for piece in answer.events:
        described.validate(piece)
    assert answer.events[-1]["usage"]["completion_tokens"] == 2
    with pytest.raises(jsonschema_rs.ValidationError):  # negative control
        described.validate(answer.events[0] | {"object": "list"})
