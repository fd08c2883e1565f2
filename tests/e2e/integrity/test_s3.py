"""An installation with its store in S3 (moto): push, cold start, and a store that fails or returns wrong bytes."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coldstart_bench.harness.installation import Installation, running_installation
from tests.e2e.commands import run
from tests.e2e.conftest import SETTINGS
from tests.e2e.https_client import complete
from tests.e2e.installation_processes import refused_start, supervisor
from tests.e2e.integrity.test_kept_file import as_tensors
from tests.e2e.tiny_models import greedy_continuation, make_tiny, prompt_of, text_of
from tests.faults.fault_proxy import FaultProxy
from tests.faults.http_faults import SLOW_DOWN, ClosedConnection, LostAnswer, TruncatedBody, flipped, truncated
from tests.faults.s3_buckets import ENVIRONMENT, Buckets

pytestmark = pytest.mark.deep

PROMPT = [8, 12, 15]


@pytest.fixture(scope="module")
def proxy(buckets: Buckets) -> Iterator[FaultProxy]:
    """A proxy between the installation and its store."""
    with FaultProxy(buckets.host, buckets.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def bucket(buckets: Buckets) -> str:
    """The bucket with the versions."""
    return buckets.make()


@pytest.fixture(scope="module")
def up(scratch: Path, llama: Path, buckets: Buckets, bucket: str, proxy: FaultProxy) -> Iterator[Installation]:
    """`kelvin up --store s3://...` with a model that was pushed despite four faults."""
    url = buckets.url(bucket, "here", port=proxy.port, read_s=5)
    with running_installation(
        scratch / "s3", settings={**SETTINGS, **ENVIRONMENT}, options=["--store", url]
    ) as installation:
        proxy.inject(SLOW_DOWN, method="PUT", holding="/packs/")
        proxy.inject(LostAnswer(), method="PUT", holding="/packs/")
        proxy.inject(TruncatedBody(1000), method="GET", holding="/packs/")
        proxy.inject(LostAnswer(), method="PUT", holding="/manifests/")
        installation.push(llama, "llama")
        assert sum(seen.fault is not None for seen in proxy.seen) == 4
        yield installation


@pytest.fixture
def cold(up: Installation, proxy: FaultProxy) -> Iterator[Installation]:
    """The installation without cached chunks. The store works again afterwards."""
    up.empty_tier("host")
    up.empty_tier("nvme")
    proxy.forget()
    yield up
    proxy.lift()
    up.wait(lambda: complete(up, "llama", prompt_of(PROMPT), max_tokens=2).status == 200, "it serves again")


def test_model_is_served_from_s3(cold: Installation, llama: Path, proxy: FaultProxy) -> None:
    """The chunks come from S3, the answer is the model's, and the data directory has no store."""
    answer = complete(cold, "llama", prompt_of(PROMPT), max_tokens=6)
    assert answer.status == 200
    assert answer.json["choices"][0]["text"].strip() == text_of(llama, greedy_continuation(llama, PROMPT, 6))
    assert proxy.count("GET", "/here/default/packs/") > 0
    assert not (cold.data / "store").exists()
    for command in (["fsck"], ["collect", "--dry-run"]):
        run(cold, *command)


def test_a_kept_file_is_read_by_ranges(cold: Installation, proxy: FaultProxy, scratch: Path) -> None:
    """A tensorizer file is kept unchanged in the bucket, and a replica is restored from ranges of it."""
    directory = make_tiny(scratch / "kept-s3", "llama", seed=78)
    path = as_tensors(directory)
    run(cold, "push", str(path), "--name", "kept")
    cold.empty_tier("host")
    cold.empty_tier("nvme")
    proxy.forget()
    answer = complete(cold, "kept", prompt_of(PROMPT), max_tokens=6)
    assert answer.text.strip() == text_of(directory, greedy_continuation(directory, PROMPT, 6))
    assert proxy.count("GET", ".tensors") > 5
    out = scratch / "kept-s3-out"
    run(cold, "export", "kept", str(out), "--format", "tensors")
    assert (out / "model.tensors").read_bytes() == path.read_bytes()


def test_flaky_store_is_waited_for(cold: Installation, proxy: FaultProxy) -> None:
    """A cut answer, a short one and a 503 are retried, and the request succeeds."""
    for fault in (TruncatedBody(100), truncated(100), SLOW_DOWN):
        proxy.inject(fault, method="GET", holding="/packs/")
    assert complete(cold, "llama", prompt_of(PROMPT), max_tokens=2).status == 200
    assert sum(seen.fault is not None for seen in proxy.seen) == 3


def test_wrong_bytes_are_refused_by_name(cold: Installation, proxy: FaultProxy, buckets: Buckets, bucket: str) -> None:
    """With one wrong bit in each pack read, the answer names a chunk and has no token."""
    with proxy.faulty(flipped(1234), method="GET", holding="/packs/"):
        answer = complete(cold, "llama", prompt_of(PROMPT), max_tokens=2)
    assert answer.status >= 500
    assert answer.json["error"]["code"] == "chunk_corrupt"
    manifest = json.loads(buckets.get(f"{bucket}/here/default/manifests/{cold.model('llama')['version']}"))
    assert any(chunk["digest"] in answer.raw.decode() for chunk in manifest["chunks"])


def test_unavailable_store_serves_cached_versions_only(up: Installation, proxy: FaultProxy) -> None:
    """Without the store, replicas serve and starts from NVMe work. A start that needs it is `unavailable`."""
    assert complete(up, "llama", prompt_of(PROMPT), max_tokens=2).status == 200
    with proxy.faulty(ClosedConnection()):
        assert complete(up, "llama", prompt_of(PROMPT), max_tokens=2).status == 200
        up.empty_tier("host")
        assert complete(up, "llama", prompt_of(PROMPT), max_tokens=2).status == 200
        up.empty_tier("nvme")
        up.empty_tier("host")
        answer = complete(up, "llama", prompt_of(PROMPT), max_tokens=2)
        assert (answer.status, answer.json["error"]["code"]) == (503, "unavailable")
    up.wait(lambda: complete(up, "llama", prompt_of(PROMPT), max_tokens=2).status == 200, "it serves again")


def test_secrets_are_where_they_are_needed(up: Installation) -> None:
    """No command line and no log has the secret key, and only processes that use the store have it."""
    secret = ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]
    holders = set()
    for process in supervisor(up).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a standby may have ended
            words = process.cmdline()
            assert secret not in " ".join(words)
            if secret in process.environ().values():
                holders.add(words[-1])
    assert holders == {"weightcache", "snapshotter"}
    assert not any(secret in path.read_text() for path in (up.data / "logs").iterdir())


def test_a_store_that_can_never_work_is_one_line(tmp_path: Path, buckets: Buckets) -> None:
    """`kelvin up` exits at once, names the setting and the rule, and leaves no process."""
    said = refused_start(tmp_path / "data", ENVIRONMENT, options=["--store", buckets.url("nobody", "x")])
    place = f"KELVIN_STORE=s3://nobody/x/ at http://{buckets.host}:{buckets.port}"
    assert f"can't start: {place}: the bucket does not exist (S3 answered NoSuchBucket, 404)" in said
    assert "Traceback" not in said
