"""`kelvin collect` against a real snapshotter: an unnamed version is marked, then freed after the grace period."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kelvin.cli.artifacts.progress import Progress
from kelvin.cli.artifacts.store_commands import collect_command, fsck_command, request_collection
from kelvin.contracts.errors import Unavailable
from kelvin.contracts.serving.control_messages import Scope
from tests.kelvin.cli_targets import SnapshotterTarget, push
from tests.snapshotter.house import TENANT, House, open_house, settings_for
from tests.snapshotter.models import Model, default_weights, weight
from tests.snapshotter.tensors_files import TensorsFile

OTHER = Model(shards={"model.safetensors": default_weights() | {"model.extra": weight((9000,), 7)}})
GRACE_S = 3600


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with open_house(settings_for(tmp_path / "data", collect_grace_s=GRACE_S)) as opened:
        yield opened


def push_model(house: House, model: Model, directory: Path) -> str:
    with house.client() as client:
        return push(model.write(directory), "toy", client, Progress()).version


def run(house: House, *arguments: str) -> Result:
    return CliRunner().invoke(collect_command, arguments, obj=SnapshotterTarget(house))


def collect(house: House, *arguments: str) -> dict[str, object]:
    result = run(house, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def objects(house: House) -> list[str]:
    root = house.store / TENANT
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def age(house: House) -> None:
    """Make all objects older than the grace period."""
    for path in (house.store / TENANT).rglob("*"):
        found = path.stat()
        os.utime(path, (found.st_atime - 2 * GRACE_S, found.st_mtime - 2 * GRACE_S))


def test_a_deleted_version_goes_after_its_grace(house: House, tmp_path: Path) -> None:
    """A deleted version is first marked, stays until the grace period is over, and is then freed with nothing else."""
    kept = push_model(house, Model(), tmp_path / "a")
    before = objects(house)
    other = push_model(house, OTHER, tmp_path / "b")
    assert collect(house, "--run")["freed"] == []
    house.control.deleted.add(other)
    assert collect(house, "--dry-run")["condemned"] == [{"version": other, "kept_s": GRACE_S}]
    assert not (house.store / TENANT / "condemned").exists()
    assert "no model names version" in run(house, "--run").stdout
    assert (house.store / TENANT / "condemned" / other).exists()
    assert collect(house, "--run")["freed"] == []
    age(house)
    dry = collect(house, "--dry-run")
    assert dry["freed"]
    assert (house.store / TENANT / "manifests" / other).exists()
    report = collect(house, "--run")
    assert report["freed"] == dry["freed"]
    assert objects(house) == before
    assert (report["versions"], report["packs"]) == (1, 2)
    assert (house.store / TENANT / "manifests" / kept).exists()
    clean = CliRunner().invoke(fsck_command, [], obj=SnapshotterTarget(house))
    assert clean.exit_code == 0, clean.output


def test_a_kept_file_goes_with_its_last_version(house: House, tmp_path: Path) -> None:
    """A kept tensorizer file stays while a version needs one of its chunks, then is freed with its index. A file
    without an index, from an interrupted push, is freed by age."""
    weights = default_weights() | {"model.extra": weight((9000,), 7)}
    model, path = Model(shards={"model.safetensors": weights}).write(tmp_path / "b"), tmp_path / "b" / "x.tensors"
    path.write_bytes(TensorsFile(weights).build())
    with house.client() as client:
        other = push(path, "toy", client, Progress()).version
        sharing = push(Model().write(tmp_path / "a"), "toy", client, Progress()).version
        assert push(model, "toy", client, Progress()).version == other
    orphan = house.store / TENANT / "packs" / f"{'0' * 64}.tensors"
    orphan.write_bytes(b"cut off")
    house.control.deleted.add(other)
    collect(house, "--run")
    age(house)
    collect(house, "--run")
    assert not orphan.exists()
    assert any(name.endswith(".tensors") for name in objects(house))
    house.control.deleted.add(sharing)
    for _ in range(2):
        collect(house, "--run")
        age(house)
    collect(house, "--run")
    assert objects(house) == []


def test_version_pushed_again_during_grace_is_complete(house: House, tmp_path: Path) -> None:
    """A push within the grace period removes the mark. A push after the version was freed sends everything."""
    push_model(house, Model(), tmp_path / "a")
    other = push_model(house, OTHER, tmp_path / "b")
    house.control.deleted.add(other)
    collect(house, "--run")
    house.control.deleted.clear()
    assert push_model(house, OTHER, tmp_path / "b") == other
    assert collect(house, "--run")["condemned"] == []
    assert not (house.store / TENANT / "condemned" / other).exists()
    house.control.deleted.add(other)
    collect(house, "--run")
    age(house)
    assert collect(house, "--run")["freed"]
    house.control.deleted.clear()
    with house.client() as client:
        committed = push(tmp_path / "b", "toy", client, Progress())
    assert (committed.version, committed.created) == (other, True)
    assert committed.new_chunks


def test_aborted_pushes_are_dropped(house: House, tmp_path: Path) -> None:
    """A push that made no progress for the grace period is removed from staging. Another tenant's push is not."""
    for tenant in (TENANT, "umbrella"):
        plan = house.data / "staging" / tenant / ("0" * 32)
        (plan / "chunks").mkdir(parents=True)
        os.utime(plan, (time.time() - 2 * GRACE_S,) * 2)
    assert collect(house, "--dry-run")["dropped_pushes"] == 0
    assert "dropped 1 pushes" in run(house, "--run").stdout
    assert not (house.data / "staging" / TENANT / ("0" * 32)).exists()
    assert (house.data / "staging" / "umbrella" / ("0" * 32)).exists()


def test_failed_collection_frees_nothing(house: House, tmp_path: Path) -> None:
    """Nothing is freed if a manifest is missing or the registry is unavailable. `--run` or `--dry-run` is required."""
    version = push_model(house, Model(), tmp_path / "a")
    assert run(house).exit_code == 2
    house.control.failures["named"] = [Unavailable("the control plane")]
    assert "control plane" in str(run(house, "--run").exception)
    manifest = house.store / TENANT / "manifests" / version
    raw = manifest.read_bytes()
    manifest.unlink()
    age(house)
    before = objects(house)
    assert version in str(run(house, "--run").exception)
    assert objects(house) == before
    manifest.write_bytes(raw)
    collect(house, "--run")


def test_an_operator_frees_another_tenants(house: House, tmp_path: Path) -> None:
    """An operator may collect another tenant's store, even if deleted. For other keys, other tenants don't exist."""
    with house.client("umbrella") as client:
        push(Model().write(tmp_path / "a"), "toy", client, Progress())
    house.control.deleted.update(registration.version for registration in house.control.registrations)
    with house.client(TENANT, Scope.OPERATOR) as client:
        assert len(request_collection(client, run=True, tenant="umbrella").condemned) == 1
    for tenant in ("umbrella", "nobody"):
        with house.client(TENANT, Scope.ADMIN) as client:
            answer = client.post(f"/push/v1/collect?tenant={tenant}", json={"run": False})
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    with house.client(TENANT, Scope.OPERATOR) as client:
        assert client.post("/push/v1/collect?tenant=../acme", json={"run": False}).status_code == 400
    with house.client(TENANT, Scope.ADMIN) as client:
        assert request_collection(client, run=False, tenant=TENANT).condemned == ()


def test_tenants_are_apart(house: House, tmp_path: Path) -> None:
    """A collection by another tenant frees nothing of this tenant."""
    push_model(house, Model(), tmp_path / "a")
    house.control.deleted.update(registration.version for registration in house.control.registrations)
    age(house)
    before = objects(house)
    with house.client("umbrella") as client:
        answer = client.post("/push/v1/collect", json={"run": True})
    assert (answer.status_code, answer.json()["freed"]) == (200, [])
    assert objects(house) == before
