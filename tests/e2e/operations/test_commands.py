"""Every command, as a user types it, against an installation."""

import csv
import io
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors

from coldstart_bench.harness.installation import Installation
from tests.e2e import bench_command
from tests.e2e.commands import run, run_to_end
from tests.e2e.https_client import complete, post
from tests.e2e.installation_state import cache, change, chunk_reads, is_recorded, wait_cache_idle
from tests.e2e.tiny_models import make_tiny
from tests.snapshotter.models import Weight
from tests.snapshotter.tensors_files import TensorsFile


@pytest.fixture(scope="module")
def two(kelvin: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A model with two versions. `prod` is the first."""
    directory = tmp_path_factory.mktemp("two")
    first = kelvin.push(make_tiny(directory / "a", "llama", seed=4), "two")
    second = kelvin.push(make_tiny(directory / "b", "llama", seed=5), "two")
    yield first, second
    kelvin.scale_to_zero("two")


def test_a_second_push_is_the_same_version(kelvin: Installation, llama: Path) -> None:
    """A second push sends nothing, and prints the same version."""
    version = kelvin.model("llama")["version"]
    assert kelvin.push(llama, "llama") == version
    result = json.loads(run(kelvin, "push", str(llama), "--name", "llama", "--json"))
    assert (result["version"], result["created"], result["new_chunks"]) == (version, False, 0)


def test_a_pickle_is_refused_by_name(kelvin: Installation, llama: Path, tmp_path: Path) -> None:
    """A pickle is refused with its name and exit code 3, and no version is created."""
    shutil.copytree(llama, tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pytorch_model.bin" in run(kelvin, "push", str(tmp_path / "model"), "--name", "pickled", code=3)
    assert "pickled" not in run(kelvin, "models")


def test_status_and_models(kelvin: Installation, two: tuple[str, str]) -> None:
    """All processes are healthy, and the model is listed with its `prod` version."""
    found = json.loads(run(kelvin, "status", "--json"))
    assert all(row["healthy"] and row["ready"] for row in found["processes"])
    assert {row["name"] for row in found["processes"]} >= {
        "activator",
        "cache",
        "controlplane",
        "snapshotter",
        "zygote",
    }
    assert set(found["cache"]) == {
        "chunk_faults",
        "manifest_faults",
        "attestation_faults",
        "unverified_versions",
        "healed_chunks",
        "healed_manifests",
        "refused_chunks",
        "examined_chunks",
        "sweeps",
        "damaged",
    }
    assert two[0][:12] in run(kelvin, "models")
    shown = run(kelvin, "status")
    assert "zygote" in shown
    assert "weight cache: faulty copies: " in shown


def test_deploy_moves_prod_and_requests_follow(kelvin: Installation, two: tuple[str, str]) -> None:
    """The next request is answered by the deployed version. An unknown version is refused."""
    first, second = two
    before = complete(kelvin, "two", "w1 w2 w3", max_tokens=6)
    run(kelvin, "deploy", f"two@{second[:12]}")
    after = complete(kelvin, "two", "w1 w2 w3", max_tokens=6)
    pinned = complete(kelvin, f"two@{first[:16]}", "w1 w2 w3", max_tokens=6)
    assert (before.status, after.status, pinned.status) == (200, 200, 200)
    assert pinned.text == before.text != after.text
    assert kelvin.model("two")["version"] == second
    assert "0123456789ab" in run(kelvin, "deploy", "two@0123456789ab", code=1)
    run(kelvin, "deploy", f"two@{first}")


def test_a_split_shares_a_model_until_a_deploy(kelvin: Installation, two: tuple[str, str]) -> None:
    """Both versions of a split answer, by session. A deploy ends the split."""
    first, second = two
    shown = run(kelvin, "models", "split", "two", f"{first[:12]}=1", f"{second[:12]}=3")
    assert shown == f"{second[:12]} 3 (75.0%)\n{first[:12]} 1 (25.0%)\n"
    assert kelvin.model("two")["split"] == {first: 1, second: 3}
    assert f"{second[:12]}=3" in run(kelvin, "models")
    assert "0123456789ab" in run(kelvin, "models", "split", "two", f"{first[:12]}=1", "0123456789ab=1", code=1)
    assert "split" in run(kelvin, "versions", "delete", f"two@{second[:12]}", code=1)
    body = {"model": "two", "prompt": "w1 w2 w3", "temperature": 0, "max_tokens": 1}
    answers = [post(kelvin, "/v1/completions", body, x_kelvin_session=f"s-{at}") for at in range(16)]
    assert {answer.headers["x-kelvin-version"] for answer in answers} == {first, second}
    run(kelvin, "deploy", f"two@{first}")
    assert kelvin.model("two")["split"] == {}
    assert run(kelvin, "models", "split", "two") == "two: prod gets all requests\n"


def test_deploy_prefetches_bytes_before_any_request(kelvin: Installation, two: tuple[str, str]) -> None:
    """A deployed version is prefetched, so its first request reads no chunk. The other version reads (control)."""
    first, second = two
    wait_cache_idle(kelvin)  # no late prefetch fills the cache after it was emptied
    kelvin.empty_tier("host")
    assert cache(kelvin)["host"]["versions"] == 0
    run(kelvin, "deploy", f"two@{second[:12]}")
    kelvin.wait(lambda: cache(kelvin)["host"]["versions"] == 1, "the version is in the host tier")
    wait_cache_idle(kelvin)
    before = chunk_reads(kelvin)
    assert complete(kelvin, "two", "w1 w2 w3", max_tokens=2).status == 200
    assert chunk_reads(kelvin) == before
    assert complete(kelvin, f"two@{first[:16]}", "w1 w2 w3", max_tokens=2).status == 200
    assert chunk_reads(kelvin) > before
    run(kelvin, "deploy", f"two@{first}")


def test_only_stated_scale_settings_are_set(kelvin: Installation, two: tuple[str, str]) -> None:
    """Options that are not given keep their value, and a bad value is refused with its rule."""
    result = json.loads(run(kelvin, "scale", "two", "--max", "2", "--target", "3.5", "--json"))
    assert (result["max"], result["target"]) == (2, 3.5)
    result = json.loads(run(kelvin, "scale", "two", "--window", "8", "--grace", "1", "--json"))
    assert (result["max"], result["window_s"], result["grace_s"]) == (2, 8.0, 1.0)
    result = json.loads(run(kelvin, "scale", "two", "--average", "weighted", "--json"))
    assert (result["window_s"], result["average"]) == (8.0, "weighted")
    result = json.loads(run(kelvin, "scale", "two", "--average", "linear", "--backlog", "2.5", "--json"))
    assert (result["average"], result["backlog_s"]) == ("linear", 2.5)
    run(kelvin, "scale", "two", "--backlog", "0")
    assert "0" in run(kelvin, "scale", "two", "--max", "0", code=2)


def test_a_minimum_is_kept_without_a_request(kelvin: Installation, two: tuple[str, str]) -> None:
    """`--min 1` starts a replica, also of a stopped model. `--min 0` lets it end."""
    run(kelvin, "stop", "two")
    run(kelvin, "scale", "two", "--min", "1")
    kelvin.wait(lambda: kelvin.model("two")["state"] == "ready", "a replica is kept")
    run(kelvin, "scale", "two", "--min", "0", "--window", "6", "--grace", "0")
    run(kelvin, "stop", "two")
    kelvin.wait(lambda: kelvin.model("two")["state"] == "zero", "it was let go")


def test_stopped_model_is_at_zero_at_once(kelvin: Installation, two: tuple[str, str]) -> None:
    """A stop does not wait for window and grace."""
    run(kelvin, "scale", "two", "--window", "600", "--grace", "600")
    assert complete(kelvin, "two", "w1", max_tokens=1).status == 200
    run(kelvin, "stop", "two")
    kelvin.wait(lambda: kelvin.model("two")["state"] == "zero", "it is at zero")
    run(kelvin, "scale", "two", "--window", "60", "--grace", "30")


def test_timeline_draws_the_start(kelvin: Installation, two: tuple[str, str], tmp_path: Path) -> None:
    """The waterfall has every stage, and the floor if one was measured."""
    kelvin.scale_to_zero("two")
    answer = complete(kelvin, "two", "w1", max_tokens=1, stream=True)
    request_id = answer.headers["x-request-id"]
    drawn = run(kelvin, "timeline", request_id, "--floor-ms", "5")
    assert "cold" in drawn
    for stage in ("promoted", "leased", "bound", "prefilled", "first_token", "floor"):
        assert stage in drawn
    report = tmp_path / "bench.json"
    size = next(row["weight_bytes"] for row in kelvin.model("two")["versions"] if row["version"] == two[0])
    row = {"size_bytes": size, "tier": "host", "system": "floor", "median_s": 0.005}
    report.write_text(json.dumps({"rows": [row], "machine": {}, "commit": None}))
    assert "floor" in run(kelvin, "timeline", request_id, "--floor", str(report))
    assert json.loads(run(kelvin, "timeline", request_id, "--json"))["request_id"] == request_id
    assert "req_nothing" in run(kelvin, "timeline", "req_nothing", code=1)


def test_logs_are_shown_by_process(kelvin: Installation) -> None:
    """Log lines are JSON. For an unknown process the known ones are listed."""
    lines = run(kelvin, "logs", "controlplane", "--lines", "3").splitlines()
    assert 1 <= len(lines) <= 3
    assert all(json.loads(line)["process"] == "controlplane" for line in lines)
    assert "zygote" in run(kelvin, "logs", "nobody", code=1)


def test_fsck_is_clean_and_finds_a_planted_fault(kelvin: Installation) -> None:
    """A flipped byte is found with exit code 1, and a clean store has no fault."""
    assert "no fault" in run(kelvin, "fsck")
    pack = next(path for path in (kelvin.data / "store").rglob("packs/*") if path.is_file())
    whole = pack.read_bytes()
    pack.chmod(0o600)
    pack.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    try:
        run(kelvin, "fsck", code=1)
    finally:
        pack.write_bytes(whole)
    run(kelvin, "fsck")


@pytest.mark.deep
def test_a_deleted_version_is_gone_and_comes_back(kelvin: Installation, two: tuple[str, str], tmp_path: Path) -> None:
    """`prod` can't be deleted. Another version is then 404 and marked by `collect`, until it is pushed again."""
    first, second = two
    run(kelvin, "deploy", f"two@{first[:12]}")
    assert "prod" in run(kelvin, "versions", "delete", f"two@{first[:12]}", code=1)
    kelvin.scale_to_zero("two")
    assert second in run(kelvin, "versions", "delete", f"two@{second[:12]}")
    assert complete(kelvin, f"two@{second[:12]}", "w1", max_tokens=1).status == 404
    health = {row["version"]: row["health"] for row in json.loads(run(kelvin, "versions", "list", "two", "--json"))}
    assert health == {first: "ready", second: "deleted"}
    assert "was deleted" in run(kelvin, "deploy", f"two@{second[:12]}", code=1)
    result = json.loads(run(kelvin, "collect", "--run", "--json"))
    assert (result["freed"], [each["version"] for each in result["condemned"]]) == ([], [second])
    assert "1 versions to no model" in run(kelvin, "fsck")
    assert kelvin.push(make_tiny(tmp_path / "b", "llama", seed=5), "two") == second
    assert complete(kelvin, f"two@{second[:12]}", "w1", max_tokens=1).status == 200
    kelvin.scale_to_zero("two")


@pytest.mark.deep
def test_an_export_is_what_was_pushed(kelvin: Installation, llama: Path, tmp_path: Path) -> None:
    """The export has the small files unchanged and each tensor bit by bit."""
    out = tmp_path / "out"
    result = json.loads(run(kelvin, "export", "llama", str(out), "--json"))
    assert result["version"] == kelvin.model("llama")["version"]
    files = {path.name for path in out.iterdir()}
    assert files == set(result["files"]) == {path.name for path in llama.iterdir()}
    for name in files - {"model.safetensors"}:
        assert (out / name).read_bytes() == (llama / name).read_bytes()
    ours, theirs = (dict(safetensors.deserialize((at / "model.safetensors").read_bytes())) for at in (out, llama))  # type: ignore[no-untyped-call]
    assert ours == theirs
    assert "exists already" in run(kelvin, "export", "llama", str(out), code=1)
    assert "nobody" in run(kelvin, "export", "nobody", str(tmp_path / "no"), code=1)
    assert "0123456789ab" in run(kelvin, "export", "llama@0123456789ab", str(tmp_path / "no"), code=1)


@pytest.mark.deep
def test_a_tensorizer_file_is_the_same_version(kelvin: Installation, llama: Path, tmp_path: Path) -> None:
    """Repacked, a tensorizer file gives the version of the safetensors file. A flipped bit in it is refused."""
    raw = (llama / "model.safetensors").read_bytes()
    read = safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
    tensors = {name: Weight(each["dtype"], tuple(each["shape"]), bytes(each["data"])) for name, each in read}
    file = tmp_path / "llama.tensors"
    file.write_bytes(TensorsFile(tensors, index_bytes=256 << 10).build())
    words = ("push", str(file), "--name", "llama", "--with", str(llama), "--repack", "--json")
    result = json.loads(run(kelvin, *words))
    assert (result["version"], result["created"]) == (kelvin.model("llama")["version"], False)
    broken = bytearray(file.read_bytes())
    broken[-100] ^= 1
    file.write_bytes(broken)
    assert "do not match the hash" in run(kelvin, *words[:-1], code=3)


def test_billing_report_in_every_format(kelvin: Installation) -> None:
    """Table, CSV and JSON show the same tokens. A wrong month is refused."""
    answer = complete(kelvin, "llama", "w1", max_tokens=1)
    assert answer.status == 200
    month = time.strftime("%Y-%m", time.gmtime())
    words = ("billing", "report", "--tenant", "default", "--month", month, "--format")
    kelvin.wait(lambda: is_recorded(kelvin, answer.headers["x-request-id"]), "the request is in the ledger")
    result = json.loads(run(kelvin, *words, "json"))
    assert result["requests"]["ok"] > 0
    assert result["balance"]["balanced"]
    rows = csv.DictReader(io.StringIO(run(kelvin, *words, "csv")))
    tokens = {row["item"]: int(row["quantity"]) for row in rows if row["section"] == "tokens"}
    assert tokens == {name: result[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    assert re.search(rf"completion tokens\D+{result['completion_tokens']:,}\b", run(kelvin, *words, "table"))
    assert "2026-13" in run(kelvin, "billing", "report", "--tenant", "default", "--month", "2026-13", code=1)


def test_billing_verify_finds_a_row_changed_by_hand(kelvin: Installation) -> None:
    """`verify` names the changed row and its month with exit code 2, and passes before and after."""
    last = complete(kelvin, "llama", "w1", max_tokens=1).headers["x-request-id"]
    kelvin.wait(lambda: is_recorded(kelvin, last), "the request is in the ledger")
    month = time.strftime("%Y-%m", time.gmtime())
    assert f"default {month} (open): " in run(kelvin, "billing", "verify")

    query = "UPDATE ledger_requests SET prompt_tokens = prompt_tokens + ? WHERE request_id = ?"
    assert change(kelvin, query, (1, last)) == 1
    assert f"default {month}: request {last}: " in run(kelvin, "billing", "verify", "--month", month, code=2)
    assert change(kelvin, query, (-1, last)) == 1
    run(kelvin, "billing", "verify", "--tenant", "default")


def test_billing_reconcile_names_a_total_changed_by_hand(kelvin: Installation) -> None:
    """`reconcile` names the changed total with its tokens and money, and exits with 2."""
    last = complete(kelvin, "llama", "w1", max_tokens=1).headers["x-request-id"]
    kelvin.wait(lambda: is_recorded(kelvin, last), "the request is in the ledger")
    month = time.strftime("%Y-%m", time.gmtime())
    assert "the accounts agree" in run(kelvin, "billing", "reconcile", "--month", month)

    query = (
        "UPDATE ledger_request_totals SET completion_tokens = completion_tokens + ? WHERE rowid = "
        "(SELECT rowid FROM ledger_request_totals WHERE billable AND model = 'llama' AND month = ? LIMIT 1)"
    )
    assert change(kelvin, query, (1_000_000, month)) == 1
    words = ("billing", "reconcile", "--month", month)
    result = json.loads(run(kelvin, *words, "--json", code=2, errors=False))
    assert change(kelvin, query, (-1_000_000, month)) == 1
    (wrong,) = [each for each in result["differences"] if each["fails"]]
    assert (wrong["kind"], wrong["tokens"], wrong["amount_micros"]) == ("total_wrong", 1_000_000, 1_500_000)


@pytest.mark.deep
def test_billing_close_freezes_a_month(kelvin: Installation) -> None:
    """A past month can be closed, repeatedly. The current month is refused."""
    now = time.gmtime()
    over = f"{now.tm_year - 1}-01"
    first = run(kelvin, "billing", "close", "--month", over)
    assert f"default {over} is closed: USD 0.00, chain " in first
    assert run(kelvin, "billing", "close", "--tenant", "default", "--month", over) == first
    assert f"default {over} (closed): 1 links hold" in run(kelvin, "billing", "verify", "--month", over)
    assert "closed at" in run(kelvin, "billing", "report", "--month", over)
    assert "can be closed an hour after" in run(
        kelvin, "billing", "close", "--month", time.strftime("%Y-%m", now), code=1
    )


def test_another_installation_is_reached_by_url_ca_and_key(kelvin: Installation) -> None:
    """Commands work with URL, CA and key instead of a data directory."""
    files = ("--ca", str(kelvin.data / "ca.pem"), "--key", str(kelvin.data / "admin.key"))
    status, out, err = run_to_end("models", "--url", f"https://localhost:{kelvin.port}", *files)
    assert status == 0, err
    assert "llama" in out


def test_an_installation_that_is_away_is_a_sentence(tmp_path: Path) -> None:
    """The error names the remedy."""
    status, _, err = run_to_end("models", "--data", str(tmp_path / "none"))
    assert status == 1
    assert "kelvin up" in err


def test_bench_is_a_command() -> None:
    """Options are checked before anything runs."""
    done = bench_command.run("cold", "--sizes", "none")
    assert done.returncode == 2
    assert "numbers of GB" in done.stderr


def test_models_render_for_a_cluster(kelvin: Installation) -> None:
    """`models render` shows the `prod` version with its scale, and refuses what a cluster would refuse."""
    image, version = "registry.example/kelvin@sha256:" + "0" * 64, kelvin.model("llama")["version"]
    words = ("models", "render", "llama", "--image", image, "--store", "s3://models")
    found = json.loads(run(kelvin, *words))
    assert found["metadata"]["name"] == f"llama-{version[:12]}"
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["args"][1]) == (image, version)
    annotations = found["spec"]["template"]["metadata"]["annotations"]
    assert annotations["autoscaling.knative.dev/max-scale"] == str(kelvin.model("llama")["scale"]["max"])
    assert "kubernetes.podspec-nodeselector" in run(kelvin, *words, "--node", "gpu=h100", code=1)
    assert "must be KEY=VALUE" in run(kelvin, *words, "--node", "gpu", code=2)
    inner = ("--control", "https://c:7500", "--snapshotter", "https://s:7501", "--inner-secret", "inner")
    (container,) = json.loads(run(kelvin, *words, *inner))["spec"]["template"]["spec"]["containers"]
    assert {"name": "KELVIN_CONTROL", "value": "https://c:7500"} in container["env"]
    assert "go together" in run(kelvin, *words, *inner[:4], code=2)
    assert "kubernetes.podspec-volumes-hostpath" in run(kelvin, *words, "--cache", "/c", code=1)


@pytest.mark.deep
def test_doctor_beside_a_running_installation(kelvin: Installation) -> None:
    """`kelvin doctor` finds secrets, certificates, store and services in order, and prints no secret."""
    words = ("doctor", "--data", str(kelvin.data), "--read-bytes", str(8 << 20), "--json")
    _, out, err = run_to_end(*words)
    found = {finding["check"]: finding for finding in json.loads(out)["findings"]}
    for check in ("secrets", "certificate of the CA", "certificate that callers see", "store", "services"):
        assert found[check]["level"] == "ok", found[check]
    assert found["backups"]["level"] == "warn", "the tests' installation has none"
    assert kelvin.client.request("GET", "/v1/models")["data"]
    secrets = [(kelvin.data / name).read_text().strip() for name in ("admin.key", "default.key")]
    assert not any(secret in out + err for secret in secrets)
