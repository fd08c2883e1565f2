"""A request that uses no optional feature enters few Python frames. Frames are counted because times vary."""

from pathlib import Path

from tests.activator.world import world

REQUESTS = 100
MOST = 335  # frames, on a quiet machine 324; a stage that a request does not use costs it none, or one


async def counted(tmp_path: Path, planted: int = 0) -> int:
    """Return the smallest number of frames that one request enters."""
    path = tmp_path / "counted"
    async with world(tmp_path, program="tests.activator.frame_counting", counted=path, planted=planted) as here:
        await here.replica("a")
        for _ in range(REQUESTS):
            assert (await here.post()).status == 200
    return min(int(line) for line in path.read_text().splitlines()[-REQUESTS + 1 :])


async def test_a_plain_request_enters_few_frames(tmp_path: Path) -> None:
    """A change that adds frames to every request fails here."""
    assert await counted(tmp_path) <= MOST


async def test_control_added_frames_are_counted(tmp_path: Path) -> None:
    """Negative control: added frames are counted."""
    assert await counted(tmp_path, planted=MOST) > MOST
