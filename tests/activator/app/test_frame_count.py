"""What the door does for a request that uses none of its features stays little: counted in calls, not in time."""

from pathlib import Path

from tests.activator.world import world

REQUESTS = 40
MOST = 325  # frames; a stage that a request does not use costs it none, or one


async def counted(tmp_path: Path, planted: int = 0) -> int:
    """Frames that a request enters, where nothing else is done between two of them."""
    path = tmp_path / "counted"
    async with world(tmp_path, program="tests.activator.calling", counted=path, planted=planted) as here:
        await here.replica("a")
        for _ in range(REQUESTS):
            assert (await here.post()).status == 200
    return min(int(line) for line in path.read_text().splitlines()[-REQUESTS + 1 :])


async def test_a_plain_request_enters_few_frames(tmp_path: Path) -> None:
    """Who adds some to each of them finds that here, and not in a bench a month later."""
    assert await counted(tmp_path) <= MOST


async def test_frames_that_are_added_are_counted(tmp_path: Path) -> None:
    """The negative control."""
    assert await counted(tmp_path, planted=MOST) > MOST
