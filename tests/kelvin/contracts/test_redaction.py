"""The secret of an API key or token is removed from logs and errors. Other text is unchanged."""

import io
import json
import logging

import pytest

from kelvin.contracts import problem
from kelvin.contracts.errors import NotFound
from kelvin.contracts.redaction import redact
from kelvin.process.log import JsonFormatter

SECRET = "s" * 43
KEY = f"kv-abcdefghijkl-{SECRET}"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param(KEY, "kv-abcdefghijkl-…", id="a key"),
        pytest.param(f"x={KEY}: no", "kv-abcdefghijkl-…: no".join(["x=", ""]), id="in a sentence"),
        pytest.param(f"{KEY} {KEY}", "kv-abcdefghijkl-… kv-abcdefghijkl-…", id="twice"),
        pytest.param(KEY[:30], "kv-abcdefghijkl-…", id="cut short"),
        pytest.param("t eyJhbGciOiJ.eyJzdWIiOiI.c2lnbg", "t eyJhbGciOiJ.…", id="a token"),
        pytest.param("kv-abcdefghijkl", "kv-abcdefghijkl", id="its id is public"),
        pytest.param("the model 'llama' does not exist", "the model 'llama' does not exist", id="no key"),
    ],
)
def test_redaction_keeps_the_key_id(text: str, want: str) -> None:
    """The public key id stays, so that a reader knows which key it was."""
    assert redact(text) == want


def _written() -> bytes:
    failure = NotFound("route", f"/v1/{KEY}")
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter("test"))
    log = logging.Logger("test")
    log.addHandler(handler)
    try:
        raise RuntimeError(KEY)
    except RuntimeError as error:
        log.error("no: %s", KEY, exc_info=error, extra={"path": KEY})
    json.loads(out.getvalue())
    wire = json.dumps(problem.to_wire(failure).message)
    return problem.openai_error(failure) + problem.problem_details(failure) + (wire + out.getvalue()).encode()


def test_every_way_out_redacts() -> None:
    """Both error formats, messages between processes and all fields of a log line are redacted."""
    assert SECRET.encode() not in _written()


def test_output_leaks_secrets_without_redaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without redaction, each of these outputs contains the secret."""
    for module in ("kelvin.contracts.problem", "kelvin.process.log"):
        monkeypatch.setattr(f"{module}.redact", lambda text: text)
    assert _written().count(SECRET.encode()) >= 6
