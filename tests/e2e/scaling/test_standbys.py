"""The standby pool learns that models start together, and shows its cost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.commands import run
from tests.e2e.https_client import all_at_once, complete
from tests.e2e.installation_processes import services
from tests.e2e.tiny_models import make_tiny, prompt_of

pytestmark = pytest.mark.deep

MODELS = ("one", "two", "three")
WAVES = 10


@pytest.fixture(scope="module")
def house(watched: Installation, scratch: Path) -> Iterator[Installation]:
    """An installation with three models at zero and no other replica."""
    for seed, name in enumerate(MODELS):
        watched.push(make_tiny(scratch / "standbys" / name, "llama", seed=80 + seed), name)
    watched.scale_to_zero("llama")
    yield watched
    for name in MODELS:
        watched.scale_to_zero(name)


def device(house: Installation) -> Any:
    return house.admin.request("GET", "/admin/v1/status")["device"]


def pool(house: Installation) -> Any:
    (found,) = device(house)["pools"]
    return found


def shown_at_once(house: Installation) -> tuple[Any, list[str]]:
    """Return the device status and metrics of one moment, between two equal looks at the pool."""
    found: list[Any] = []

    def stood_still() -> bool:
        before = device(house)
        found[:] = before, house.admin.text("/admin/v1/metrics").splitlines()
        names = ("wanted", "hits", "misses")
        after = pool(house)
        return all(before["pools"][0][name] == after[name] for name in names)

    house.wait(stood_still, "a look met no change")
    return found[0], found[1]


def wake_all(house: Installation) -> tuple[int, int]:
    """Start all models at once from zero. Return how many starts found a standby, and how many did not."""
    for name in MODELS:
        house.scale_to_zero(name)
    house.wait(lambda: pool(house)["parked"] >= pool(house)["wanted"], "as many are parked as are wanted")
    before = pool(house)
    calls = [lambda name=name: complete(house, name, prompt_of([5, 9]), max_tokens=2) for name in MODELS]
    assert [answer.status for answer in all_at_once(*calls)] == [200] * len(MODELS)
    after = pool(house)
    return after["hits"] - before["hits"], after["misses"] - before["misses"]


def test_models_that_wake_together_find_standbys(house: Installation) -> None:
    """Once the pool has seen the models start together, each start finds a standby."""
    assert pool(house)["target"] == 0.95
    for _ in range(WAVES):  # even requests sent together may be served one after another
        wake_all(house)
        if pool(house)["wanted"] >= len(MODELS):
            break
    assert wake_all(house) == (len(MODELS), 0)
    assert pool(house)["why"] in ("bursts", "rate"), "what it has seen, not the least that is asked for"


def test_the_platforms_memory_is_shown(house: Installation) -> None:
    """The admin API, the metrics page and `kelvin status` show the memory of real processes."""
    assert wake_all(house)[0] >= 1, "one was parked"
    house.wait(lambda: pool(house)["parked"] >= pool(house)["wanted"], "as many are parked as are wanted")
    seen, page = shown_at_once(house)
    (found,) = seen["pools"]
    zygote = services(house)["runtime.app.zygote"].memory_full_info()
    assert 0.5 < seen["zygote"]["pss"] / zygote.pss < 2.0
    assert found["parked"] <= found["kept"]
    # A forked process has a few private megabytes, and shares most of its mappings.
    assert (1 << 20) * found["parked"] < found["memory"]["private"] < found["memory"]["pss"]
    assert found["memory"]["private"] <= found["budget_bytes"]
    series = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page if not line.startswith("#")}
    own = 'process="controlplane"'
    assert series[f'kelvin_standbys{{{own},device="cpu",state="wanted"}}'] == found["wanted"]
    assert series[f'kelvin_platform_memory_bytes{{{own},of="zygote",measure="pss"}}'] > 0
    assert series[f'kelvin_standby_takes_total{{{own},device="cpu",taker="start",result="hit"}}'] == found["hits"]
    assert series[f"kelvin_standby_probability{{{own}}}"] >= 0.95
    assert f"{found['hits']} starts found one, {found['misses']} did not" in run(house, "status")
