"""The client and the snapshotter are killed at random moments of a push. Nothing is torn, and a repeated push
completes.

`KELVIN_TEST_KILLS` is the number of kills (default 6).
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.snapshotter.house import TENANT
from tests.snapshotter.models import Model, default_weights, weight
from tests.snapshotter.process import Process, process_over
from tests.snapshotter.reader import assert_whole, read_version, versions_of

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[4]
KILLS = int(os.environ.get("KELVIN_TEST_KILLS", "6"))
PUSH_S = 120


def many_chunks(seed: int) -> Model:
    """Return a model of about forty chunks, none shared with another seed."""
    weights = default_weights(seed * 1000)
    weights |= {f"model.extra.{n}": weight((3000,), seed * 1000 + 500 + n) for n in range(25)}
    return Model(shards={"model.safetensors": weights})


class Client:
    """A push that runs as a process."""

    def __init__(self, data: Path, directory: Path, *more: str) -> None:
        command = [sys.executable, "-m", "tests.kelvin.pusher", str(data / "run"), str(directory), "--name", "toy"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([*command, "--json", *more], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stderr is not None
        self.began = self.process.stderr.readline()

    def is_over(self, within_s: float) -> bool:
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def result(self) -> dict[str, Any]:
        """Return the JSON that it printed. It must succeed."""
        out, err = self.process.communicate(timeout=PUSH_S)
        assert self.process.returncode == 0, (out, err)
        found: dict[str, Any] = json.loads(out)
        return found


@contextmanager
def pushing(data: Path, directory: Path, *more: str) -> Iterator[Client]:
    client = Client(data, directory, *more)
    try:
        yield client
    finally:
        client.kill()


def staged(data: Path) -> dict[str, bytes]:
    """Return the staged chunks of weights by digest. Files that the snapshotter removes meanwhile are skipped."""
    found: dict[str, bytes] = {}
    for push in (data / "staging" / TENANT).glob("[!.]*/"):
        try:
            small = json.loads((push / "plan.json").read_bytes())["file_digests"]
            found |= {
                path.name: path.read_bytes() for path in (push / "chunks").glob("[!.]*") if path.name not in small
            }
        except FileNotFoundError:
            continue
    return found


def assert_nothing_is_torn(data: Path) -> None:
    """Check that no version or chunk is partial, and that staging holds at most four directories."""
    assert_whole(data / "store", TENANT)
    for name, chunk in staged(data).items():
        assert blake3(chunk).hexdigest() == name
    assert len(list((data / "staging" / TENANT).glob("*"))) <= 4


def dry_run(data: Path, directory: Path) -> dict[str, Any]:
    with pushing(data, directory, "--dry-run") as client:
        return client.result()


@pytest.mark.timeout(120 + 20 * KILLS)
def test_push_survives_kills_at_random_moments(tmp_path: Path) -> None:
    """Whichever side is killed, each push ends with its version, by the client's retries or by a new push."""
    data, chance = tmp_path / "data", random.Random(KILLS)
    kills = {"client": 0, "snapshotter": 0, "both": 0}
    expected: dict[str, Model] = {}
    with process_over(data) as process:
        while sum(kills.values()) < KILLS:
            model = many_chunks(len(expected))
            directory = model.write(tmp_path / f"model-{len(expected)}")
            dry = dry_run(data, directory)
            version = dry["version"]
            pushed = push_under_fire(process, directory, dry["missing_chunks"], kills, chance)
            assert pushed["version"] == version
            expected[version] = model
            assert_nothing_is_torn(data)
            assert staged(data) == {}
        assert sorted(versions_of(data / "store", TENANT)) == sorted(expected)
        for version, model in expected.items():
            _, tensors = read_version(data / "store", TENANT, version)
            assert tensors == {name: each.data for name, each in model.shards["model.safetensors"].items()}
    print(f"kills: {kills} in {len(expected)} pushes")


def push_under_fire(
    process: Process, directory: Path, chunks: int, kills: dict[str, int], chance: random.Random
) -> dict[str, Any]:
    """Push until it succeeds, with kills at random moments while there are kills left."""
    limit = ["--limit-rate", chance.choice(["256K", "1M", "100M"]), "--parallel", chance.choice(["1", "4"])]
    while True:
        had = len(staged(process.data))
        with pushing(process.data, directory, *limit) as client:
            while sum(kills.values()) < KILLS and not client.is_over(chance.uniform(0.0, 1.5)):
                victim = chance.choice(list(kills))
                if victim != "snapshotter":
                    client.kill()
                if victim != "client":
                    assert process.end(signal.SIGKILL) == -signal.SIGKILL
                assert_nothing_is_torn(process.data)
                if victim != "client":
                    process.start()
                kills[victim] += 1
                if victim != "snapshotter":
                    break
            else:
                pushed = client.result()
                assert pushed["sent_chunks"] <= chunks - had
                return pushed


def test_staged_chunks_are_not_sent_again(tmp_path: Path) -> None:
    """After a client dies, the next one sends only the remaining chunks, or all of them if staging is lost."""
    data = tmp_path / "data"
    directory = many_chunks(0).write(tmp_path / "model")
    with process_over(data) as process:
        chunks = dry_run(data, directory)["missing_chunks"]
        killed_half_way(data, directory)
        had = chunks - dry_run(data, directory)["missing_chunks"]
        assert 5 <= had < chunks
        with pushing(data, directory) as client:
            assert client.result()["sent_chunks"] == chunks - had
        other = many_chunks(1).write(tmp_path / "other")
        killed_half_way(data, other)
        process.end(signal.SIGKILL)
        shutil.rmtree(data / "staging")
        process.start()
        with pushing(data, other) as client:
            assert client.result()["sent_chunks"] == chunks  # the control


def killed_half_way(data: Path, directory: Path) -> None:
    """Kill a client after at least five of its chunks are staged and before it ends."""
    with pushing(data, directory, "--limit-rate", "64K", "--parallel", "1") as client:
        while len(staged(data)) < 5:
            assert not client.is_over(0.02)
