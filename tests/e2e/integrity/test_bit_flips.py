"""A bit flips in a cached chunk, on NVMe or in host memory of a running replica: the scrub finds and heals it."""

import contextlib
import http.client
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from coldstart_bench.harness.installation import Installation
from tests.e2e.commands import run
from tests.e2e.https_client import Answer, complete, connect, headers, read
from tests.e2e.installation_processes import services
from tests.e2e.installation_state import cache, chunks, replicas, sole_replica
from tests.e2e.tiny_models import greedy_continuation, make_tiny, prompt_of, text_of
from tests.process_state import stop
from tests.weightcache.flips import flip_bit_of_process

pytestmark = pytest.mark.deep

MODEL = "damaged"
PROMPT = [5, 9, 12, 33, 20]
AT = 4096 + 8  # lowest mantissa bit of a float32: damage that no text shows


def serving(kelvin: Installation, scratch: Path) -> Path:
    """Push and start a model that shares no chunk, so each is once in memory and once on NVMe. Return its directory."""
    directory = make_tiny(scratch / "damaged", "llama", seed=71)
    kelvin.push(directory, MODEL)
    kelvin.admin.request("PUT", f"/admin/v1/models/{MODEL}/scale", {"max": 1})
    assert complete(kelvin, MODEL, prompt_of(PROMPT), max_tokens=4).status == 200
    wanted = chunks(kelvin, MODEL)
    kelvin.wait(lambda: all(file(kelvin, digest).exists() for digest in wanted), "every chunk is on NVMe")
    return directory


def file(kelvin: Installation, digest: str) -> Path:
    return kelvin.data / "cache" / "default" / digest[:2] / digest


def agent(kelvin: Installation) -> int:
    return services(kelvin)["weightcache"].pid


def injured(kelvin: Installation) -> tuple[str, bytes, str, bytes]:
    """Return two large chunks with their bytes: (digest, bytes) for memory, then for the disk."""
    found = {digest: file(kelvin, digest).read_bytes() for digest in chunks(kelvin, MODEL)}
    first, second = sorted(found, key=lambda digest: len(found[digest]))[-2:]
    return first, found[first], second, found[second]


def flip_on_disk(kelvin: Installation, digest: str) -> None:
    path = file(kelvin, digest)
    path.chmod(0o600)
    with path.open("r+b") as opened:
        opened.seek(AT)
        byte = opened.read(1)[0]
        opened.seek(AT)
        opened.write(bytes([byte ^ 1]))


def _faults(kelvin: Installation) -> Any:
    return cache(kelvin)["chunk_faults"]


def state(kelvin: Installation, runtime_id: str) -> str | None:
    found: dict[str, str] = {each["runtime_id"]: each["state"] for each in replicas(kelvin, MODEL)}
    return found.get(runtime_id)


def _started(kelvin: Installation, connection: http.client.HTTPSConnection) -> http.client.HTTPResponse:
    """Start a stream and read its first event."""
    body = {"model": MODEL, "prompt": prompt_of(PROMPT), "temperature": 0, "max_tokens": 3000, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), headers(kelvin))
    answer = connection.getresponse()
    assert answer.status == 200
    while not (line := answer.readline()).startswith(b"data: "):
        assert line, "the stream ended"
    return answer


def test_a_flip_on_disk_and_one_in_memory(watched: Installation, scratch: Path) -> None:
    """Both flips are found once, counted and shown, and the file is replaced.
    The replica over the wrong memory ends its stream with an error. A waiting request gets the right text from a new
    replica, which stays. Control: `test_bit_flips_unscrubbed.py`."""
    kelvin, directory = watched, serving(watched, scratch)
    right = text_of(directory, greedy_continuation(directory, PROMPT, 6))
    before = sole_replica(kelvin, MODEL)
    in_memory, memory_bytes, on_disk, disk_bytes = injured(kelvin)
    with contextlib.closing(connect(kelvin)) as connection:
        stream = _started(kelvin, connection)
        stop(before["pid"])  # it stops in the middle of the stream
        answers: list[Answer] = []
        asking = threading.Thread(
            target=lambda: answers.append(complete(kelvin, MODEL, prompt_of(PROMPT), max_tokens=6))
        )
        try:
            asking.start()
            flip_bit_of_process(agent(kelvin), memory_bytes, AT)
            flip_on_disk(kelvin, on_disk)
            both = {"host": {"digest": 1}, "nvme": {"digest": 1}}
            named = [{"tenant": "default", "chunk": in_memory, "pids": [before["pid"]]}]
            kelvin.wait(lambda: cache(kelvin)["damaged"] == named, "the process over the wrong memory is named")
            kelvin.wait(lambda: _faults(kelvin) == both, "both were found, once each")
            kelvin.wait(lambda: state(kelvin, before["runtime_id"]) != "ready", "the replica is sent away")
        finally:
            os.kill(before["pid"], signal.SIGCONT)
        cut = read(stream)
        assert not cut.done
        assert cut.error is not None
        assert cut.error["code"] in (
            "weights_damaged",
            "replica_lost",
        )  # "replica_lost" if it was killed before it handled the notice
    asking.join(60)
    assert [(answer.status, answer.text.strip()) for answer in answers] == [(200, right)]
    kelvin.wait(lambda: state(kelvin, before["runtime_id"]) is None, "the old one is gone")
    after = sole_replica(kelvin, MODEL)
    assert after["pid"] != before["pid"]

    kelvin.wait(lambda: file(kelvin, on_disk).exists(), "the file is kept anew")
    assert blake3(file(kelvin, on_disk).read_bytes()).hexdigest() == on_disk
    assert file(kelvin, on_disk).read_bytes() == disk_bytes
    assert [path.name.split(".")[1] for path in (kelvin.data / "cache" / ".quarantine").iterdir()] == [on_disk]
    kelvin.wait(lambda: cache(kelvin)["damaged"] == [], "no process uses the wrong memory")
    assert sum(cache(kelvin)["healed_chunks"].values()) >= 1
    shown = run(kelvin, "status")
    assert "host chunk digest 1" in shown
    assert "nvme chunk digest 1" in shown
    assert "wrong memory" not in shown
    page = kelvin.admin.text("/admin/v1/metrics")
    for name in ("kelvin_chunk_faults_total", "kelvin_healed_chunks_total", "kelvin_condemned_replicas_total"):
        assert name in page

    passes = cache(kelvin)["sweeps"]
    kelvin.wait(lambda: cache(kelvin)["sweeps"] > passes + 1, "all was looked at again")
    assert _faults(kelvin) == both
    again = complete(kelvin, MODEL, prompt_of(PROMPT), max_tokens=6)
    assert (again.status, again.text.strip()) == (200, right)
    assert sole_replica(kelvin, MODEL)["pid"] == after["pid"], "a replica over good memory is kept"
    kelvin.scale_to_zero(MODEL)
