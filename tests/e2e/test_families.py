"""Every served family the whole way: pushed as users push it, restored from zero, answering as `generate` does."""

from functools import partial
from pathlib import Path

import pytest

from coldstart_bench.installation import Installation
from tests.e2e.calls import all_at_once, complete
from tests.e2e.models import FAMILIES, greedy, make_tiny, prompt_of, text_of

pytestmark = pytest.mark.deep

PROMPTS = ([4, 8, 15, 16, 23, 42], [7] * 3 + list(range(3, 40)))  # the second alone is longer than any window


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "qwen2"}))
def test_pushed_and_asked(kelvin: Installation, scratch: Path, family: str) -> None:
    """Push → gate → seal → cold start by HTTP; greedy answers of two requests at once are `generate`'s own."""
    directory, name = make_tiny(scratch / family, family, seed=5), family.replace("_", "-")
    kelvin.push(directory, name)
    kelvin.admin.request("PUT", f"/admin/v1/models/{name}/scale", {"max": 1})
    answers = all_at_once([partial(complete, kelvin, name, prompt_of(ids), max_tokens=24) for ids in PROMPTS])
    assert [answer.status for answer in answers] == [200, 200]
    wanted = [text_of(directory, greedy(directory, ids, 24)) for ids in PROMPTS]
    assert [answer.text.strip() for answer in answers] == wanted
    kelvin.to_zero(name)
