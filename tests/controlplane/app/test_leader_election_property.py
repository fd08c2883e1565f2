"""Property test: two candidates never lead at once, and one leads after all faults are healed. In virtual time."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controlplane.app.candidates import NAMES, open_candidates

STEP = st.tuples(
    st.sampled_from(["start", "stop", "cut", "deaf", "slow", "heal", "heal", "wait"]),
    st.sampled_from(NAMES),
    st.sampled_from([0.5, 1.0, 3.0, 6.0, 11.0, 16.0]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=25))
def test_at_most_one_leader_and_finally_one(steps: list[tuple[str, str, float]]) -> None:
    """This holds for any order of faults. The clocks of the three candidates differ."""

    async def play() -> None:
        async with open_candidates() as it:
            for step, name, seconds in steps:
                line = it.lines[name]
                match step:
                    case "start":
                        it.start(name)
                    case "stop":
                        await it.stop(name)
                    case "cut":
                        line.cut = True
                    case "deaf":
                        line.loses_answers = True
                    case "slow":
                        line.delay_s = seconds / 4
                    case "heal":
                        line.cut = line.loses_answers = False
                        line.delay_s = 0.0
                await it.advance(seconds)
            for name, line in it.lines.items():
                line.cut = line.loses_answers = False
                line.delay_s = 0.0
                it.start(name)
            await it.advance(40)
            assert len(it.working) == 1

    asyncio.run(play())
