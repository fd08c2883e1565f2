"""`kelvin status` for a cluster installation: the command runs against an activator, as an operator types it."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldstart_bench.harness.installation import free_port
from tests.cluster.fake_knative import FakeKnative, inside, register, running
from tests.cluster.test_pending import SPOT, Scene, unscheduled
from tests.controlplane.builders import digest
from tests.controlplane.control_plane_server import open_feed
from tests.controlplane.machine_fixture import ROOT
from tests.eventually import eventually
from tests.kelvin.cli.operations.test_recovery_commands import kelvin


@contextmanager
def activator(data: Path) -> Iterator[str]:
    """Run an activator as a process beside the control plane and yield its URL."""
    port = free_port()
    environment = {**os.environ, "KELVIN_DATA": str(data), "KELVIN_PORT": str(port)}
    with (data.parent / "activator.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "activator"], cwd=ROOT, env=environment, stderr=log)
    try:
        yield f"https://localhost:{port}"
    finally:
        process.kill()
        process.wait(60)


async def test_what_runs_and_what_does_not(knative: FakeKnative, tmp_path: Path) -> None:
    """The output has no lines of a single machine. Each model shows its replicas, why it has none, and what waits for a
    node. JSON has the same.
    """
    data = tmp_path / "data"

    async def status(url: str, holds: Callable[[str], Any], *words: str) -> str:
        """Return the output once it fulfils the condition."""
        output = ""
        try:
            async with asyncio.timeout(60):
                while True:
                    place = ("--url", url, "--data", str(data))
                    code, output = await asyncio.to_thread(kelvin, "status", *place, *words)
                    if code == 0 and holds(output):
                        return output
        except TimeoutError:
            raise AssertionError(output) from None

    with running(tmp_path, **SPOT):
        async with inside(tmp_path) as client, open_feed(client) as reader:
            await register(client)
            await eventually(lambda: bool(knative.services()), "its Service")
            with activator(data) as url:
                text = await status(url, lambda output: "zero" in output)
                assert re.search(r"controlplane +│ +yes +│ +yes", text)
                assert re.search(rf"m +│ +{digest('a')[:12]} +│ +1 +│ +zero +│ +0 +│ +0-1", text)
                assert not re.search("weight cache|standbys|slots|pending|None|null|last start", text)
                knative.becomes_ready()
                it = Scene(knative, client, reader)
                await it.read_until(lambda line: line.revisions)
                it.pod("one", unscheduled(100))
                text = await status(url, lambda output: "pending" in output)
                where = r"pending \(gpu in eu-1a, on spot capacity alone\)"
                assert re.search(rf"{where}: 1 replica: 1\d\d s by now, \d+ s guessed in all", text)
                version = f"m@{digest('a')[:12]}: no replica could be started"
                text = await status(url, lambda output: "no replica" in output)
                assert f"\n{version}: no node has room for it\n" in text
                it.fails("ImagePullBackOff")
                text = await status(url, lambda output: "image" in output)
                assert f"\n{version}: its image can't be pulled\n" in text
                knative.pods("two")
                text = await status(url, lambda output: re.search("│ ready +│ 1 ", output))
                assert "no replica" not in text
                (model,) = json.loads(await status(url, lambda output: True, "--json"))["models"]
                assert [each["runtime_id"] for each in model["versions"][0]["replicas"]] == ["two"]
