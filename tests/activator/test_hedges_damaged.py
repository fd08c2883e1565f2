"""A late request at replicas whose memory was found wrong: each is blamed once, and the request is counted once."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from activator.line import Replica
from activator.throttler import Throttler
from contracts.control import Feed
from contracts.frames import FrameKind
from tests.activator.hedging import Ground, ground, outcome
from tests.activator.replica import Call, Script
from tests.activator.test_hedges import OK, Turn, damaged, heard, late, says


async def begun(call: Call) -> None:
    """A token of an answer that is told when it is whole: it is heard of, and can be taken back."""
    await call.write(FrameKind.BEAT, tokens=1)


def _retries(here: Ground) -> dict[tuple[str, ...], int]:
    """By the failure, and what followed."""
    (family,) = [each for each in here.page.families() if each.name == "kelvin_retries_total"]
    return {labels[-2:]: int(value) for labels, value in family.values.items()}


@pytest.mark.parametrize(
    ("first", "second", "came", "blamed"),
    [
        pytest.param(None, None, "neither", {"a": 1, "b": 1}, id="both, before either began"),
        pytest.param(None, begun, "second", {"b": 1}, id="the second, which had begun"),
        pytest.param(begun, None, "first", {"a": 1}, id="the first, which had begun"),
    ],
)
async def test_each_is_blamed_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: Script | None,
    second: Script | None,
    came: str,
    blamed: dict[str, int],
) -> None:
    """It is sent again, once, to who is there then; that is one retry, and one late request."""
    counted: Counter[str] = Counter()
    report_failed = Throttler.report_failed

    def counting(self: Throttler, replica: Replica, code: str | None = None) -> None:
        counted[replica.row.runtime_id] += 1
        report_failed(self, replica, code)

    monkeypatch.setattr(Throttler, "report_failed", counting)

    async with ground(tmp_path) as here:
        begins = asyncio.Event()

        async def at_first(call: Call) -> None:
            await begins.wait()
            if first is not None:
                await first(call)

        asked, _, _ = await late(here, one := Turn(damaged, at_first), other := Turn(damaged, second))
        here.attempts._hedges = None  # what is sent again is not late once more
        await here.replica("c", says("c"))
        begins.set()
        async with asyncio.timeout(30):
            while came != "neither" and here.came() != {came: 1}:
                await asyncio.sleep(0.001)
        gone = tuple({"a", "b"} - blamed.keys())  # else it could be sent to who was outrun
        here.throttler.apply(Feed(revision=2, full=False, removed_replicas=gone))
        other.gate.set()
        one.gate.set()
        assert await outcome(asked) is OK
        assert heard(asked) == "ccc"
        assert (dict(counted), here.came()) == (blamed, {came: 1})
        assert _retries(here) == {("weights_damaged", "again"): 1}
