"""Level prices, computed by hand: the price book's device, memory by level, and measured restore times."""

import pytest

from controlplane.billing.price_book import parse_price_book
from controlplane.registry.policy.domain import VersionKey
from controlplane.scaling.policy.breakeven import Level
from controlplane.scaling.policy.eta import RestoreHistory
from controlplane.scaling.warmth.warmth_cost import GIB, PROCESS_BYTES, WarmthCost
from kelvin.contracts.timeline import Stage, StageSpan
from tests.controlplane.builders import key
from tests.controlplane.scaling.autoscaler_fixture import FAST, FakeVersions, replace_scale
from tests.controlplane.virtual_time import VirtualClock

BOOK = parse_price_book(
    """
currency = "EUR"
[[prices]]
from = 2020-01-01
per_tokens = 1_000
prompt = 1
cached = 1
completion = 1
request = 0
[prices.device."*"]
restore = 20
active = 40
idle = 10
[prices.device."cpu-4"]
restore = 200
active = 400
idle = 100
""",
    "book.toml",
)


def test_warmth_prices_match_a_hand_computation() -> None:
    """Prices use the replica's device class, the memory of weights, KV and process, and the price of waiting."""
    catalogue, history = FakeVersions(), RestoreHistory[VersionKey]()
    catalogue.add("m", replace_scale(FAST, wait_price=1000))
    found = catalogue.find(key())
    assert found is not None
    total = found[1].registration.total_bytes
    spans = (StageSpan(Stage.PROMOTED, 0), StageSpan(Stage.LEASED, 0), StageSpan(Stage.READY, 2_000_000))
    history.record_start(key(), total, spans, parked=True, bytes_s=None, tier="nvme")
    refill = (StageSpan(Stage.PROMOTED, 0), StageSpan(Stage.LEASED, 0), StageSpan(Stage.READY, 900_000))
    history.record_deep_wake(key(), total, refill, "host")
    history.record_wake(key(), total, 0.5)
    warmth_cost = WarmthCost(BOOK, history, VirtualClock(), kv_bytes=GIB, memory_price=3.0)
    warm, asleep, empty, zero = warmth_cost.find_prices(*found).level_prices
    assert (warm.level, asleep.level, empty.level, zero.level) == tuple(Level)
    kept = (total + PROCESS_BYTES) / GIB
    assert (warm.hold, warm.wake) == pytest.approx((10 + 3 * (kept + 1), 0.0))
    assert (asleep.hold, asleep.wake) == pytest.approx((3 * kept, 0.5 * 1020))
    assert (empty.hold, empty.wake) == pytest.approx((3 * PROCESS_BYTES / GIB, 0.9 * 1020))
    assert (zero.hold, zero.wake) == pytest.approx((0.0, 2.0 * 1020))
    dearer = warmth_cost.find_prices(*found, "cpu-4").level_prices[0]
    assert dearer.hold == pytest.approx(100 + 3 * (kept + 1))
    assert warmth_cost.currency == "EUR"
    # The model is small, so a sleeper's memory is nearly all its process.
    assert [step.level for step in warmth_cost.level_changes(*found)] == [Level.WARM, Level.ASLEEP, Level.ZERO]
    assert warmth_cost.fetch_times(key()).keys() == {"nvme", "host"}
