"""Models start from zero, return to zero, and start once for many waiting requests."""

from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.https_client import all_at_once, complete
from tests.e2e.installation_state import cache, chunk_reads, chunks, wait_cache_idle
from tests.e2e.tiny_models import greedy_continuation, prompt_of, text_of

PROMPT = [5, 9, 12, 33, 20]


def test_first_request_starts_the_model_and_shows_its_timeline(kelvin: Installation) -> None:
    """A request starts the model, and the stream's comment and the timeline show the stages."""
    kelvin.scale_to_zero("llama")
    answer = complete(kelvin, "llama", prompt_of(PROMPT), max_tokens=4, stream=True)
    assert answer.status == 200
    assert answer.done
    assert any(comment.startswith("timeline ") for comment in answer.comments)
    assert kelvin.model("llama")["state"] == "ready"
    timeline = kelvin.client.request("GET", f"/v1/requests/{answer.headers['x-request-id']}/timeline")
    stages = [stamp["stage"] for stamp in timeline["stamps"]]
    assert timeline["cold"]
    assert stages[0] == "routed"
    assert stages[-1] == "done"
    assert {"poked", "promoted", "leased", "bound", "ready", "dispatched", "prefilled"} <= set(stages)
    assert [stamp["at_us"] for stamp in timeline["stamps"]] == sorted(stamp["at_us"] for stamp in timeline["stamps"])


def test_two_hundred_requests_at_zero_cause_one_restore(kelvin: Installation, llama: Path) -> None:
    """200 concurrent requests get the right text from one start, which reads each chunk once."""
    kelvin.scale_to_zero("llama")
    wait_cache_idle(kelvin)
    kelvin.empty_tier("host")
    before, leases = chunk_reads(kelvin), cache(kelvin)["leases_granted"]
    want = greedy_continuation(llama, PROMPT, 6)
    answers = all_at_once(*[lambda: complete(kelvin, "llama", prompt_of(PROMPT), max_tokens=6)] * 200)
    assert [answer.status for answer in answers] == [200] * 200
    assert {answer.text.strip() for answer in answers} == {text_of(llama, want)}
    assert cache(kelvin)["leases_granted"] == leases + 1
    assert chunk_reads(kelvin) - before == len(set(chunks(kelvin, "llama")))


@pytest.mark.deep
def test_a_model_that_nobody_calls_goes_to_zero_by_itself(kelvin: Installation) -> None:
    """After window and grace the model is at zero. The next start reads from the host tier."""
    kelvin.admin.request("PUT", "/admin/v1/models/qwen2/scale", {"window_s": 6, "grace_s": 0})
    assert complete(kelvin, "qwen2", prompt_of(PROMPT), max_tokens=2).status == 200
    kelvin.wait(lambda: kelvin.model("qwen2")["state"] == "zero", "qwen2 is at zero")
    wait_cache_idle(kelvin)
    before = chunk_reads(kelvin)
    assert complete(kelvin, "qwen2", prompt_of(PROMPT), max_tokens=2).status == 200
    assert chunk_reads(kelvin) == before
