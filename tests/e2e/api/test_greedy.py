"""Greedy answers equal `transformers.generate` in float32, alone and in changing batches."""

import random
from functools import partial
from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.https_client import all_at_once, complete, connect, headers
from tests.e2e.tiny_models import FAMILIES, greedy_continuation, make_tiny, prompt_of, text_of

PROMPTS = ([4, 8, 15, 16, 23, 42], [7] * 3 + list(range(3, 40)))  # the second alone is longer than any window


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_greedy_equals_generate_alone(kelvin: Installation, request: pytest.FixtureRequest, family: str) -> None:
    directory: Path = request.getfixturevalue(family)
    answer = complete(kelvin, family, prompt_of([4, 8, 15, 16, 23, 42]), max_tokens=24)
    assert answer.text.strip() == text_of(directory, greedy_continuation(directory, [4, 8, 15, 16, 23, 42], 24))
    usage = answer.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 24, 30)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_greedy_equals_generate_in_company(kelvin: Installation, request: pytest.FixtureRequest, family: str) -> None:
    """Twelve prompts of mixed lengths at once, beside clients that disconnect, give `generate`'s text."""
    directory: Path = request.getfixturevalue(family)
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.choice((1, 3, 17, 60, 130)))] for _ in range(12)]
    wanted = [text_of(directory, greedy_continuation(directory, prompt, 16)) for prompt in prompts]
    quitters = [_start_and_quit(kelvin, family, rng.randrange(1, 6)) for _ in range(4)]
    answers = all_at_once(*[partial(complete, kelvin, family, prompt_of(ids), max_tokens=16) for ids in prompts])
    assert [answer.text.strip() for answer in answers] == wanted
    assert all(quitters)


def _start_and_quit(kelvin: Installation, model: str, events: int) -> int:
    """Read some lines of a stream and disconnect. Return the number of lines."""
    connection = connect(kelvin)
    body = f'{{"model": "{model}", "prompt": "w1 w2", "max_tokens": 300, "stream": true}}'
    connection.request("POST", "/v1/completions", body, headers(kelvin))
    answer = connection.getresponse()
    read = sum(1 for _ in zip(range(events), answer, strict=False))
    connection.close()
    return read


@pytest.mark.deep
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "qwen2"}))
def test_greedy_equals_generate_in_every_family(kelvin: Installation, scratch: Path, family: str) -> None:
    """Each family, pushed and started from zero, gives `generate`'s text for two requests at once."""
    directory, name = make_tiny(scratch / family, family, seed=5), family.replace("_", "-")
    kelvin.push(directory, name)
    kelvin.admin.request("PUT", f"/admin/v1/models/{name}/scale", {"max": 1})
    answers = all_at_once(*[partial(complete, kelvin, name, prompt_of(ids), max_tokens=24) for ids in PROMPTS])
    assert [answer.status for answer in answers] == [200, 200]
    wanted = [text_of(directory, greedy_continuation(directory, ids, 24)) for ids in PROMPTS]
    assert [answer.text.strip() for answer in answers] == wanted
    kelvin.scale_to_zero(name)
