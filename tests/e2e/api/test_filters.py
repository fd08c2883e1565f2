"""Filters over HTTPS: a policy pushed with a model, lost filters, and installations without filters."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coldstart_bench.harness.installation import Installation, InstallationFailed, running_installation
from tests.e2e.conftest import SETTINGS
from tests.e2e.https_client import Answer, complete, post
from tests.e2e.installation_processes import services
from tests.e2e.installation_state import log_lines
from tests.e2e.tiny_models import greedy_continuation, make_tiny, prompt_of, text_of
from tests.kelvin.pods import was_probed

pytestmark = pytest.mark.deep

PROMPT = (5, 17, 23, 11)
TOKENS = 24
MANY_TOKENS = 400
ADDRESS = "jo@example.org"
CARD = "4111 1111 1111 1111"
POLICY: dict[str, Any] = {
    "format": 1,
    "deadline_ms": 5000,
    "filters": [
        {"filter": "pii", "input": {"CREDIT_CARD": "stop"}, "output": {"EMAIL_ADDRESS": "redact", "IP_ADDRESS": "stop"}}
    ],
}


@dataclass(frozen=True, slots=True)
class Talkative:
    """A model directory whose model writes an e-mail address after a few words, and that text."""

    directory: Path
    text: str

    def with_policy(self, directory: Path, policy: object) -> Path:
        """Copy the model with a policy into `directory`."""
        directory.mkdir(parents=True)
        for path in self.directory.iterdir():
            (directory / path.name).write_bytes(path.read_bytes())
        (directory / "kelvin-filters.json").write_text(json.dumps(policy))
        return directory


@pytest.fixture(scope="module")
def talkative(scratch: Path) -> Talkative:
    """A random model in which one greedily chosen word is renamed to an e-mail address."""
    directory = make_tiny(scratch / "talkative", "llama", seed=7)
    said = greedy_continuation(directory, PROMPT, TOKENS)
    word = next(token - 3 for token in said[2:] if token > 2 and token not in PROMPT)
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace(f'"▁w{word}"', f'"▁{ADDRESS}"'))
    text = text_of(directory, said)
    assert ADDRESS in text
    return Talkative(directory, text)


@pytest.fixture(scope="module")
def filtering(scratch: Path, talkative: Talkative) -> Iterator[Installation]:
    """An installation with filters, and the model with and without the policy."""
    with running_installation(scratch / "filtering", settings={**SETTINGS, "KELVIN_FILTERS": "on"}) as installation:
        installation.push(talkative.directory, "plain")
        installation.push(talkative.with_policy(scratch / "filtered", POLICY), "filtered")
        yield installation


def _ask(kelvin: Installation, model: str, prompt: str = "", **fields: object) -> Answer:
    return complete(kelvin, model, prompt or prompt_of(PROMPT), max_tokens=TOKENS, **fields)


def test_filtered_answers_are_redacted(filtering: Installation, talkative: Talkative) -> None:
    """Streamed, whole and cached answers are redacted, and a prompt with a card number is refused.
    Without the policy the model's full text is returned. Usage counts the computed tokens.
    """
    whole, streamed = _ask(filtering, "filtered"), _ask(filtering, "filtered", stream=True)
    plain = _ask(filtering, "plain")
    assert plain.text.strip() == talkative.text
    assert whole.text.strip() == streamed.text.strip() == talkative.text.replace(ADDRESS, "<EMAIL_ADDRESS>")
    assert streamed.done
    assert whole.json["usage"]["completion_tokens"] == plain.json["usage"]["completion_tokens"] == TOKENS

    body = {"model": "filtered", "prompt": prompt_of(PROMPT), "temperature": 0, "max_tokens": TOKENS, "stream": True}
    first, again = (post(filtering, "/v1/completions", body, idempotency_key="once") for _ in range(2))
    assert first.text.strip() == whole.text.strip()
    assert again.raw == first.raw

    refused = _ask(filtering, "filtered", f"pay with {CARD}")
    assert (refused.status, refused.json["error"]["code"]) == (400, "content_filter")
    assert CARD not in refused.raw.decode()
    assert _ask(filtering, "plain", f"pay with {CARD}").status == 200
    assert not any(ADDRESS in json.dumps(line) or CARD in json.dumps(line) for line in log_lines(filtering))


def test_filtered_answer_streams(filtering: Installation) -> None:
    """A long filtered answer is streamed in pieces.
    Their number depends on the machine: a piece holds what the engine made while the filters checked the piece before.
    `tests/runtime/surface/test_filter_pipeline.py` tests the timing.
    """
    answer = complete(filtering, "filtered", prompt_of(PROMPT), max_tokens=MANY_TOKENS, stream=True)
    assert answer.done
    pieces = [event for event in answer.events if any(choice["text"] for choice in event["choices"])]
    assert len(pieces) > 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_lost_filters_are_replaced(filtering: Installation, talkative: Talkative, number: signal.Signals) -> None:
    """While filters are killed or hung, no address passes: answers are redacted or refused.
    The watchdog kills hung ones. `test_hung_processes.py` tests other services.
    """
    _ask(filtering, "filtered")
    lost = services(filtering)["kelvin.filters"]
    filtering.wait(lambda: was_probed(lost.pid), "the watchdog has probed the filters")
    lost.send_signal(number)
    wanted = talkative.text.replace(ADDRESS, "<EMAIL_ADDRESS>")

    def is_back() -> bool:
        answer = _ask(filtering, "filtered")
        assert ADDRESS not in answer.raw.decode()
        return answer.status == 200 and answer.text.strip() == wanted

    filtering.wait(is_back, "the filters are back")
    assert not lost.is_running()
    shown = filtering.admin.text("/admin/v1/metrics")
    assert 'verdict="redact"' in shown


def test_filtered_model_is_refused_without_filters(kelvin: Installation, scratch: Path, talkative: Talkative) -> None:
    """A model with a policy is refused if filters are off. A malformed policy is refused with value and rule."""
    with pytest.raises(InstallationFailed, match=r"kelvin-filters\.json.*KELVIN_FILTERS=off"):
        kelvin.push(talkative.with_policy(scratch / "no-filters", POLICY), "filtered")
    wrong = talkative.with_policy(scratch / "wrong-filters", POLICY | {"deadline_ms": 1})
    with pytest.raises(InstallationFailed, match=r"kelvin-filters\.json.*>= 10.*deadline_ms"):
        kelvin.push(wrong, "filtered")
