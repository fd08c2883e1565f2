"""A model's degradation steps, over HTTPS: in the answer, the usage record and the bill."""

import json
from collections.abc import Iterator

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.commands import run
from tests.e2e.https_client import Answer, complete, post
from tests.e2e.installation_state import is_recorded, record
from tests.e2e.tiny_models import make_tiny


@pytest.fixture(scope="module")
def rung(kelvin: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model for this file."""
    kelvin.push(make_tiny(tmp_path_factory.mktemp("rung"), "llama", seed=6), "rung")
    yield "rung"
    kelvin.scale_to_zero("rung")


def test_a_ladder_is_set_and_shown(kelvin: Installation, rung: str) -> None:
    """Degradation steps are stored and shown in the order of their waits, also per plan, and are not taken without
    need."""
    ladder = ("models", "ladder", rung)
    shown = "cap-output 4: from 2 s of expected wait\ncap-output 2: instead of a refusal\n"
    assert run(kelvin, *ladder, "--cap-output", "2", "--cap-output", "4@2") == shown
    assert run(kelvin, *ladder) == shown
    assert [step["tokens"] for step in kelvin.model(rung)["ladder"]] == [4, 2]
    assert rung in run(kelvin, *ladder, "--fallback", rung, code=1)
    body = {"model": rung, "prompt": "w1 w2 w3", "temperature": 0, "max_tokens": 6}
    answer = post(kelvin, "/v1/completions", body)
    assert answer.status == 200
    assert "x-kelvin-degraded" not in answer.headers
    own = "plan free:\n  cap-output 1: instead of a refusal\n"
    assert run(kelvin, *ladder, "--plan", "free", "--cap-output", "1") == shown + own
    assert run(kelvin, *ladder, "--plan", "free", "--as-others") == shown
    assert run(kelvin, *ladder, "--off") == "rung: gives up nothing\n"


def test_another_model_answers_while_one_starts(kelvin: Installation, rung: str) -> None:
    """While a model starts, its fallback model answers. The record names both models."""
    assert complete(kelvin, rung, "w1 w2", max_tokens=1).status == 200  # the forecast needs one measured start
    run(kelvin, "models", "ladder", rung, "--fallback", "llama@0.001")
    body = {"model": rung, "prompt": "w1 w2 w3", "temperature": 0, "max_tokens": 3}

    answers: list[Answer] = []

    def is_answered_at_zero() -> bool:  # until the activator has the new steps
        kelvin.scale_to_zero(rung)
        assert complete(kelvin, "llama", "w1 w2", max_tokens=1).status == 200
        answers.append(post(kelvin, "/v1/completions", body))
        assert answers[-1].status == 200
        return "x-kelvin-degraded" in answers[-1].headers

    kelvin.wait(is_answered_at_zero, "another model answers")
    answer = answers[-1]
    assert answer.headers["x-kelvin-degraded"] == "fallback=llama"
    assert answer.headers["x-kelvin-version"] == kelvin.model("llama")["version"]
    kelvin.wait(lambda: kelvin.model(rung)["state"] == "ready", "the model that was asked has started")
    kelvin.wait(lambda: "x-kelvin-degraded" not in post(kelvin, "/v1/completions", body).headers, "and answers")
    found = record(kelvin, answer)
    assert (found["model"], found["completion_tokens"], found["degraded"]) == ("llama", 3, "fallback-of=rung")
    run(kelvin, "models", "ladder", rung, "--off")


def billed_steps(kelvin: Installation) -> dict[str, int]:
    """Return this month's billed degradation steps."""
    found = json.loads(run(kelvin, "billing", "report", "--format", "json"))["degraded"]
    assert isinstance(found, dict)
    return found


def test_degraded_answers_are_on_the_bill(kelvin: Installation, rung: str) -> None:
    """The bill counts each fallback answer. A request with `x-kelvin-degrade: never` is not degraded."""
    whole = complete(kelvin, rung, "w1 w2", max_tokens=1)
    kelvin.wait(lambda: is_recorded(kelvin, whole.headers["x-request-id"]), "all before it is in the ledger, too")
    before = billed_steps(kelvin)
    run(kelvin, "models", "ladder", rung, "--fallback", "llama@0.001")
    body = {"model": rung, "prompt": "w3 w2 w1", "temperature": 0, "max_tokens": 2}
    steps: list[str | None] = []

    def is_degraded(**headers: str) -> bool:
        kelvin.scale_to_zero(rung)
        assert complete(kelvin, "llama", "w1 w2", max_tokens=1).status == 200
        answer = post(kelvin, "/v1/completions", body, **headers)
        assert answer.status == 200
        kelvin.wait(lambda: is_recorded(kelvin, answer.headers["x-request-id"]), "it is in the ledger")
        steps.append(answer.headers.get("x-kelvin-degraded"))
        return steps[-1] is not None

    kelvin.wait(is_degraded, "another model answers")
    assert not is_degraded(x_kelvin_degrade="never")
    fell_back = steps.count("fallback=llama")
    assert fell_back == len(steps) - steps.count(None) >= 1
    after = billed_steps(kelvin)
    assert after == {**before, "fallback": before.get("fallback", 0) + fell_back}
    assert "less than asked, fallback" in run(kelvin, "billing", "report")
    assert f"degraded,fallback,,,,{after['fallback']},request" in run(kelvin, "billing", "report", "--format", "csv")
    run(kelvin, "billing", "verify")
    run(kelvin, "models", "ladder", rung, "--off")
