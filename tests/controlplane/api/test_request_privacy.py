"""Unknown body fields and header values appear in no log and no database of the control plane."""

from pathlib import Path

from tests.controlplane.control_plane_server import ADMIN, connect_client, control_plane_process, push
from tests.controlplane.route_list import admin_calls
from tests.eventually import eventually

MARK = "xyzzy4711"
BODIES = ({MARK: MARK}, {"max": MARK}, f'{{"{MARK}": '.encode(), f'"{MARK}"'.encode(), [MARK])


async def _ask_all(data: Path) -> int:
    """Send each body to each admin route. Return how many calls were refused."""
    await eventually(lambda: (data / "run" / "control.sock").exists())
    headers = {**ADMIN, "x-mark": MARK, "cookie": MARK, "user-agent": MARK}
    refused = 0
    async with connect_client(data) as client:
        await push(client)
        for method, path in admin_calls():
            for body in BODIES if method in ("POST", "PUT") else ({MARK: MARK},):
                status, _ = await client.request(method, f"/admin/v1{path}?{MARK}={MARK}", body, headers)
                assert status != 500
                refused += status == 400
    return refused


def places(root: Path) -> list[str]:
    """Return the files that contain the mark."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(root)) for path in files if MARK.encode() in path.read_bytes())


async def test_request_content_is_not_kept(data: Path) -> None:
    """This holds at log level `debug`, for every route. Negative control: a mark in the log or the data is found."""
    with control_plane_process(data, log_level="debug") as process:
        assert await _ask_all(data) > 20
        process.terminate()
        assert process.wait(60) == 0
    assert (data.parent / "controlplane.log").read_text()
    assert places(data.parent) == []
    with (data.parent / "controlplane.log").open("a") as log:
        log.write(f'{{"told": "{MARK}"}}\n')
    (data / "planted").write_text(MARK)
    assert places(data.parent) == ["controlplane.log", "data/planted"]
