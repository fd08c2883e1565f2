"""`kelvin status` of an installation whose versions a cluster runs: through an activator, as an operator types it."""

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
from tests.controlplane.control_plane_server import feed
from tests.controlplane.machine_fixture import ROOT
from tests.eventually import eventually
from tests.kelvin.cli.operations.test_recovery_commands import kelvin


@contextmanager
def activator(data: Path) -> Iterator[str]:
    """A program beside the control plane; where it listens."""
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
    """Of the cluster nothing that is a machine's; each model with what runs of it, why nothing does, and what waits for
    a node. JSON has the same.
    """
    data = tmp_path / "data"

    async def status(url: str, holds: Callable[[str], Any], *words: str) -> str:
        """What it prints, once that is so."""
        said = ""
        try:
            async with asyncio.timeout(60):
                while True:
                    place = ("--url", url, "--data", str(data))
                    code, said = await asyncio.to_thread(kelvin, "status", *place, *words)
                    if code == 0 and holds(said):
                        return said
        except TimeoutError:
            raise AssertionError(said) from None

    with running(tmp_path, **SPOT):
        async with inside(tmp_path) as door, feed(door) as reader:
            await register(door)
            await eventually(lambda: bool(knative.services()), "its Service")
            with activator(data) as url:
                text = await status(url, lambda said: "zero" in said)
                assert re.search(r"controlplane +│ +yes +│ +yes", text)
                assert re.search(rf"m +│ +{digest('a')[:12]} +│ +1 +│ +zero +│ +0 +│ +0-1", text)
                assert not re.search("weight cache|standbys|slots|pending|None|null|last start", text)
                knative.becomes_ready()
                it = Scene(knative, door, reader)
                await it.told(lambda line: line.revisions)
                it.pod("one", unscheduled(100))
                text = await status(url, lambda said: "pending" in said)
                where = r"pending \(gpu in eu-1a, on spot capacity alone\)"
                assert re.search(rf"{where}: 1 replica: 1\d\d s by now, \d+ s guessed in all", text)
                version = f"m@{digest('a')[:12]}: no replica could be started"
                text = await status(url, lambda said: "no replica" in said)
                assert f"\n{version}: no node has room for it\n" in text
                it.fails("ImagePullBackOff")
                text = await status(url, lambda said: "image" in said)
                assert f"\n{version}: its image can't be pulled\n" in text
                knative.pods("two")
                text = await status(url, lambda said: re.search("│ ready +│ 1 ", said))
                assert "no replica" not in text
                (model,) = json.loads(await status(url, lambda said: True, "--json"))["models"]
                assert [each["runtime_id"] for each in model["versions"][0]["replicas"]] == ["two"]
