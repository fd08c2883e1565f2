"""An exported version is bit-exact: small files, and tensors as the libraries of both formats read them."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import safetensors

from kelvin.cli.artifacts import export_command as subject
from kelvin.cli.artifacts.export_command import export_version
from kelvin.cli.artifacts.progress import Progress
from kelvin.contracts.artifact_errors import ChunkCorrupt, ChunkMissing, ManifestCorrupt, ManifestMissing
from kelvin.contracts.artifacts.manifest import DTYPE_BYTES
from kelvin.contracts.errors import Refused
from tests.kelvin.cli.artifacts.test_push import FAST, Told
from tests.kelvin.cli_targets import push
from tests.snapshotter.house import TENANT, House
from tests.snapshotter.models import Model, Weight, default_weights, resharded, weight
from tests.snapshotter.planted import Store

EVERY = {f"model.of.{dtype}": weight((3, 5), number, dtype) for number, dtype in enumerate(DTYPE_BYTES)}
ODD: dict[str, Weight] = {
    "model.number": weight((), 50),
    "model.nothing": weight((0, 3), 51),
    "model.many.chunks": weight((30_001,), 52, "U8"),
    "größe": weight((5,), 53, "BF16"),
}
WEIGHTS = default_weights() | EVERY | ODD
MORE = {"chat_template.jinja": b"{{ messages }}\n", "generation_config.json": b'{ "top_k":3 }'}
SHARDED = Model(shards=resharded(WEIGHTS, 3, seed=8), more=MORE)


def pushed(house: House, tmp_path: Path, model: Model = SHARDED) -> str:
    (tmp_path / "model").mkdir(parents=True, exist_ok=True)
    with house.client() as client:
        return push(model.write(tmp_path / "model"), "toy", client, Progress()).version


def exported(house: House, version: str, directory: Path, form: str = "safetensors") -> Path:
    with house.client() as client:
        export_version(version, directory, form, client, Progress(), FAST.retry_policy)
    return directory


def hashes(tensors: dict[str, Weight]) -> dict[str, list[object]]:
    return {name: [list(each.shape), hashlib.sha256(each.data).hexdigest()] for name, each in tensors.items()}


def small(model: Model) -> dict[str, bytes]:
    return {path: raw for path, raw in model.files().items() if path in ("config.json", "tokenizer.json", *MORE)}


def test_safetensors_export_has_bit_exact_tensors(house: House, tmp_path: Path) -> None:
    """Three pushed shards are exported as one file with the same tensors. Its push gives the same version."""
    version = pushed(house, tmp_path)
    directory = exported(house, version, tmp_path / "out")
    raw = (directory / "model.safetensors").read_bytes()
    found = {
        name: Weight(each["dtype"], tuple(each["shape"]), bytes(each["data"]))
        for name, each in safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
    }
    assert found == WEIGHTS
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "model.safetensors"}
    assert files == small(SHARDED)
    with house.client() as client:
        assert push(directory, "toy", client, Progress()).version == version
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_config_of_a_module_comes_back_in_its_directory(house: House, tmp_path: Path) -> None:
    """A module's config keeps its directory, as sentence-transformers needs."""
    name, raw = "1_Pooling/config.json", b'{"pooling_mode_mean_tokens": true}'
    version = pushed(house, tmp_path, Model(more={name: raw}))
    with house.client() as client:
        found = export_version(version, tmp_path / "out", "safetensors", client, Progress(), FAST.retry_policy)
    assert (tmp_path / "out" / name).read_bytes() == raw
    assert found.files == (name, "config.json", "model.safetensors", "tokenizer.json")
    assert found.total_bytes == sum((tmp_path / "out" / path).stat().st_size for path in found.files)


@pytest.mark.deep
def test_tensorizer_export_is_read_by_its_library(house: House, tmp_path: Path) -> None:
    """The tensorizer library reads the same tensors, and its own hashes match. There is no safetensors file."""
    directory = exported(house, pushed(house, tmp_path), tmp_path / "out", "tensors")
    assert {path.name for path in directory.iterdir()} == {*small(SHARDED), "model.tensors"}
    assert read_by_library(directory / "model.tensors") == hashes(WEIGHTS)


def read_by_library(path: Path) -> object:
    """Return shape and SHA-256 of each tensor as the tensorizer library reads them, with its own hash check on."""
    program = (
        "import hashlib, json, sys, tensorizer, torch\n"
        "found = tensorizer.TensorDeserializer(sys.argv[1], device='cpu', verify_hash=True)\n"
        "raw = lambda t: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()\n"
        "print(json.dumps({n: [list(t.shape), hashlib.sha256(raw(t)).hexdigest()] for n, t in found.items()}))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: object = json.loads(done.stdout)
    return found


def test_export_refuses_an_existing_directory(house: House, tmp_path: Path) -> None:
    """An existing directory is left unchanged, even an empty one."""
    version = pushed(house, tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(Refused, match="exists already"):
        exported(house, version, tmp_path / "out")
    with pytest.raises(Refused, match="can't be written"):
        exported(house, version, tmp_path / "missing" / "out")


def refusal(house: House, version: str, directory: Path, form: str = "safetensors") -> str:
    with pytest.raises(Refused) as refused:
        exported(house, version, directory, form)
    assert not directory.exists()
    assert [path.name for path in directory.parent.iterdir() if path.name.startswith(".")] == []
    return refused.value.failure.code


def test_failed_export_leaves_no_directory(house: House, tmp_path: Path) -> None:
    """A corrupt or missing chunk or manifest leaves no directory. After a repair, the export succeeds."""
    version = pushed(house, tmp_path)
    out = tmp_path / "out"
    pack = Store(house.store, version).files("packs")[-1]
    whole = pack.read_bytes()
    pack.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert refusal(house, version, out) == ChunkCorrupt.code
    pack.unlink()
    assert refusal(house, version, out) == ChunkMissing.code
    assert refusal(house, "0" * 64, out) == "not_found"
    assert refusal(house, "nonsense", out) == "not_found"
    pack.write_bytes(whole)
    manifest = house.store / TENANT / "manifests" / version
    raw = manifest.read_bytes()
    for damaged in (raw.replace(b"8192", b"8193"), raw[:100], b"", bytes(len(raw))):
        manifest.write_bytes(damaged)
        assert refusal(house, version, out) == ManifestCorrupt.code
    manifest.unlink()
    assert refusal(house, version, out) == ManifestMissing.code
    manifest.write_bytes(raw)
    exported(house, version, out)


def test_lost_store_is_not_an_unknown_version(house: House, tmp_path: Path) -> None:
    """A named version without a manifest in the store has lost it. A version that no model names doesn't exist."""
    version = pushed(house, tmp_path)
    shutil.rmtree(house.store / TENANT)
    assert refusal(house, version, tmp_path / "out") == ManifestMissing.code
    assert refusal(house, "0" * 64, tmp_path / "out") == "not_found"


def test_a_pack_that_was_written_anew_is_found(house: House, tmp_path: Path) -> None:
    """Chunk locations are cached between calls, and looked up again when they no longer hold."""
    version = pushed(house, tmp_path)
    exported(house, version, tmp_path / "one")
    for kind in ("packs", "index"):
        for path in Store(house.store, version).files(kind):
            path.unlink()
    pushed(house, tmp_path / "other", Model(more={}))  # creates other packs first
    pushed(house, tmp_path)
    exported(house, version, tmp_path / "two")


def test_tenants_are_apart(house: House, tmp_path: Path) -> None:
    """Another tenant's version and chunks don't exist."""
    version = pushed(house, tmp_path)
    digest = json.loads((house.store / TENANT / "manifests" / version).read_bytes())["chunks"][0]["digest"]
    with house.client("umbrella") as client:
        assert client.get(f"/push/v1/manifests/{version}").status_code == 404
        assert client.get(f"/push/v1/chunks/{digest}").status_code == 404
    with house.client() as client:
        assert client.get(f"/push/v1/chunks/{digest}").status_code == 200


def test_another_manifest_and_other_bytes_are_refused(house: House, tmp_path: Path) -> None:
    """The client checks the digests of what it receives."""
    version = pushed(house, tmp_path)
    out = tmp_path / "out"

    class Lying:
        def __init__(self, client: httpx.Client, what: str) -> None:
            self._door, self._what = client, what

        def request(self, method: str, url: str, **more: object) -> object:
            answer = self._door.request(method, url, **more)  # type: ignore[arg-type]
            if self._what in url:
                answer._content = bytes([answer.content[0] ^ 1]) + answer.content[1:]
            return answer

    for what in ("/manifests/", "/chunks/"):
        with house.client() as client, pytest.raises(Refused):
            export_version(version, out, "safetensors", Lying(client, what), Progress(), FAST.retry_policy)  # type: ignore[arg-type]
        assert not out.exists()


def test_too_many_tensors_for_the_other_format(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensorizer index has a fixed size, so the refusal comes before any download."""
    monkeypatch.setattr(subject, "INDEX_BYTES", 200)
    version = pushed(house, tmp_path)
    progress = Told()
    with house.client() as client, pytest.raises(Refused) as refused:
        export_version(version, tmp_path / "out", "tensors", client, progress, FAST.retry_policy)
    assert refused.value.failure.code == "capacity_exceeded"
    assert [stage for stage, _ in progress.stages] == ["looking"]


BROKEN = {
    "a library that fails": ("raise RuntimeError('Metadata overflow')", "Metadata overflow"),
    "no library": ("import sys; sys.stderr.write('tensorizer is not installed'); sys.exit(3)", "pip install"),
    "a library that writes another format": (
        "import sys; open(sys.argv[2], 'wb').write(b'x' * 500)",
        "no tensorizer file",
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize(("program", "want"), [pytest.param(*case, id=name) for name, case in BROKEN.items()])
def test_faulty_tensorizer_library_leaves_no_bad_file(
    house: House, tmp_path: Path, program: str, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export ends with a complete file or no directory, whatever the library does."""
    monkeypatch.setattr(subject, "WRITER", (sys.executable, "-c", program))
    version = pushed(house, tmp_path)
    with pytest.raises(Refused, match=want):
        exported(house, version, tmp_path / "out", "tensors")
    assert not (tmp_path / "out").exists()
