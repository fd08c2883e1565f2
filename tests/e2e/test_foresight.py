"""A model whose calls recur has its weights in memory before the next one, though nobody asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from coldstart_bench.installation import Installation
from tests.e2e.calls import complete
from tests.e2e.commands import run
from tests.e2e.inside import at_rest, cache
from tests.e2e.models import make_tiny, prompt_of

pytestmark = pytest.mark.deep

MODEL = "foreseen"
PAUSE_S = 4.0
TRIES = 6


def _idle(kelvin: Installation) -> Any:
    found = json.loads(run(kelvin, "explain", "idle", MODEL, "--json"))
    return next(version for version in found["versions"] if "prod" in version["aliases"])


def _asked(kelvin: Installation) -> Any:
    """The same without a process of its own: often."""
    found = kelvin.admin.request("GET", f"/admin/v1/models/{MODEL}/idle")
    return next(version for version in found["versions"] if "prod" in version["aliases"])


def _call(kelvin: Installation) -> None:
    assert complete(kelvin, MODEL, prompt_of([5, 9]), max_tokens=2).status == 200


def _is_brought(kelvin: Installation) -> bool:
    return bool(_asked(kelvin)["foresight"]["brought"])


def _rest(kelvin: Installation) -> None:
    kelvin.wait(lambda: (_asked(kelvin)["idle_s"] or 0) >= PAUSE_S, "it pauses")


def _comes_ahead(kelvin: Installation) -> bool:
    """Call, forget everything, and wait for it to come back by itself; False where it came while it was forgotten."""
    _call(kelvin)
    kelvin.forget("host")
    if _is_brought(kelvin):
        _rest(kelvin)
        return False
    kelvin.wait(lambda: _is_brought(kelvin) or _asked(kelvin)["idle_s"] > 3 * PAUSE_S, "it comes ahead")
    return _is_brought(kelvin)


def test_weights_come_before_the_call(watched: Installation, scratch: Path) -> None:
    """After three pauses of some seconds: all of them, from the disk, shortly before; the start finds them in memory,
    and `kelvin explain idle` tells what was expected, and that it came. Its control: after one pause they do not.
    """
    kelvin = watched
    kelvin.push(make_tiny(scratch / "foreseen", "llama", seed=72), MODEL)  # of which no pause is known
    kelvin.admin.request("PUT", f"/admin/v1/models/{MODEL}/scale", {"max": 1})
    at_rest(kelvin)
    _call(kelvin)
    kelvin.forget("host")
    _rest(kelvin)
    before = cache(kelvin)
    assert _idle(kelvin)["foresight"]["why"] == "few"
    for _ in range(2):
        _call(kelvin)
        assert cache(kelvin)["leases_hot"] == before["leases_hot"], "what nobody expected is read from the disk"
        _rest(kelvin)
    assert any(_comes_ahead(kelvin) for _ in range(TRIES))
    told = _idle(kelvin)["foresight"]
    assert (told["why"], told["brought"]) == (None, True)
    assert told["alike"] >= 3
    assert "a call is expected in" in run(kelvin, "explain", "idle", MODEL)
    at_rest(kelvin)
    before = cache(kelvin)
    _call(kelvin)
    after = cache(kelvin)
    assert after["leases_hot"] == before["leases_hot"] + 1
    assert after["chunk_reads"] == before["chunk_reads"]
    assert after["foreseen_bytes"]["leased"] > before["foreseen_bytes"].get("leased", 0)
    kelvin.wait(lambda: _asked(kelvin)["foresight"]["came"] >= 1, "it is counted")
    assert " came, " in run(kelvin, "explain", "idle", MODEL)
    kelvin.to_zero(MODEL)
