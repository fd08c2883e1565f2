"""A tensorizer file gives the same version as the same tensors in safetensors. A damaged one is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from kelvin.cli.artifacts.export_command import export_version
from kelvin.cli.artifacts.progress import Progress
from kelvin.cli.artifacts.push import push_directory
from kelvin.cli.artifacts.push_command import push_command
from kelvin.cli.artifacts.push_source import TensorsOptions
from kelvin.contracts.artifacts.push_api import WeightsFile
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import encode
from tests.kelvin.cli.artifacts.test_export_command import hashes, read_by_library
from tests.kelvin.cli.artifacts.test_push import FAST, Told
from tests.kelvin.cli_targets import SnapshotterTarget, push
from tests.snapshotter.house import TENANT, House
from tests.snapshotter.models import Model, default_weights, weight
from tests.snapshotter.reader import versions_of
from tests.snapshotter.tensors_files import TensorsFile

pytestmark = pytest.mark.deep

WEIGHTS = default_weights() | {"model.half": weight((9, 3), 70, "BF16"), "model.long": weight((40_001,), 71, "U8")}
MODEL = Model(shards={"model.safetensors": WEIGHTS})


def written(directory: Path, file: TensorsFile | None = None, small: bool = True) -> Path:
    """Write a tensorizer file with the model's tensors in another order, by default with the small files."""
    directory.mkdir(parents=True)
    path = directory / "toy.tensors"
    path.write_bytes((file or TensorsFile(dict(reversed(WEIGHTS.items())), kind=0)).build())
    for name, raw in MODEL.files().items() if small else ():
        if name != "model.safetensors":
            (directory / name).write_bytes(raw)
    return path


def objects(house: House) -> list[bytes]:
    """Return the tensorizer files that the store keeps."""
    return [path.read_bytes() for path in (house.store / TENANT / "packs").glob("*.tensors")]


@pytest.mark.parametrize("repack", [pytest.param(False, id="as it is"), pytest.param(True, id="repacked")])
def test_tensorizer_push_gives_the_same_version(house: House, tmp_path: Path, repack: bool) -> None:
    """The version doesn't depend on the format, or on whether the file is kept or repacked. No chunk is sent twice."""
    progress = Told()
    file = written(tmp_path / "a")
    with house.client() as client:
        pushed = push_directory(file, "toy", client, progress, tensors=TensorsOptions(repack=repack))
        assert objects(house) == ([] if repack else [file.read_bytes()])
        again = push(MODEL.write(tmp_path / "b"), "toy", client, Progress())
    assert (again.version, again.created) == (pushed.committed.version, False)
    assert again.new_chunks == 0
    assert ("checking", file.stat().st_size) in progress.stages
    assert pushed.ignored == ()


def test_tensorizer_export_pushes_to_the_same_version(house: House, tmp_path: Path) -> None:
    """A file written by the library at an export is pushed to the same version, with its small files beside it."""
    with house.client() as client:
        version = push(MODEL.write(tmp_path / "model"), "toy", client, Progress()).version
        export_version(version, tmp_path / "out", "tensors", client, Progress())
        assert push(tmp_path / "out" / "model.tensors", "toy", client, Progress()).version == version


def test_kept_tensorizer_file_is_exported_unchanged(house: House, tmp_path: Path) -> None:
    """The exported file is the pushed one, byte for byte. An export as safetensors has the same tensors."""
    file = written(tmp_path / "a")
    run = CliRunner()
    pushed = run.invoke(push_command, [str(file), "--name", "toy"], obj=SnapshotterTarget(house))
    version = pushed.stdout.split()[-1]
    with house.client() as client:
        exported = export_version(version, tmp_path / "out", "tensors", client, Progress())
        assert exported.as_pushed
        assert (tmp_path / "out" / "model.tensors").read_bytes() == file.read_bytes()
        plain = export_version(version, tmp_path / "plain", "safetensors", client, Progress())
        assert not plain.as_pushed
        assert push(tmp_path / "plain", "toy", client, Progress()).version == version
    names = {"config.json", "tokenizer.json", "generation_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, "model.tensors"}


def test_the_library_reads_it_in_the_store(house: House, tmp_path: Path) -> None:
    """The library opens the stored object in place, and its hashes match."""
    with house.client() as client:
        version = push(MODEL.write(tmp_path / "model"), "toy", client, Progress()).version
        export_version(version, tmp_path / "out", "tensors", client, Progress())
        push(tmp_path / "out" / "model.tensors", "toy", client, Progress())
    (path,) = (house.store / TENANT / "packs").glob("*.tensors")
    assert read_by_library(path) == hashes(WEIGHTS)


def test_an_original_that_is_not_what_was_pushed(house: House, tmp_path: Path) -> None:
    """The client compares an exported file with the digest from the push. If the index is wrong about the file, the
    library writes another one, and the export says that it isn't the pushed one."""
    file = written(tmp_path / "a")
    with house.client() as client:
        version = push(file, "toy", client, Progress()).version
    (path,) = (house.store / TENANT / "packs").glob("*.tensors")
    flipped(path, file.stat().st_size - 1)  # a byte of no chunk, so the version itself is intact
    index = house.store / TENANT / "index" / path.name
    assert refused_export(house, version, tmp_path / "out") == "chunk_corrupt"
    flipped(path, file.stat().st_size - 1)
    raw = index.read_bytes()
    index.write_bytes(raw.replace(b'"size":', b'"size":1'))
    with house.client() as client:
        assert not export_version(version, tmp_path / "other", "tensors", client, Progress()).as_pushed
    index.write_bytes(raw)
    with house.client() as client:
        assert export_version(version, tmp_path / "out", "tensors", client, Progress()).as_pushed
    with house.client("umbrella") as other:
        assert other.get(f"/push/v1/originals/{version}").status_code == 404


def refused_export(house: House, version: str, directory: Path) -> str:
    with house.client() as client, pytest.raises(Refused) as refused:
        export_version(version, directory, "tensors", client, Progress(), FAST.retry_policy)
    assert not directory.exists()
    return refused.value.failure.code


def test_small_files_may_lie_in_another_directory(house: House, tmp_path: Path) -> None:
    """The small files may be in another directory, given by `--with`. Other weights there don't matter."""
    file, other = written(tmp_path / "a", small=False), tmp_path / "b"
    other.mkdir()
    Model(more={}).write(other)
    (other / "model.bin").write_bytes(b"of no interest")
    run = CliRunner()
    refused = run.invoke(push_command, [str(file), "--name", "toy"], obj=SnapshotterTarget(house))
    assert (refused.exit_code, "config.json" in refused.stderr) == (3, True)
    done = run.invoke(push_command, [str(file), "--name", "toy", "--with", str(other)], obj=SnapshotterTarget(house))
    assert done.exit_code == 0, done.output
    assert versions_of(house.store, TENANT) == [done.stdout.split()[-1]]
    for option in (["--with", str(other)], ["--repack"]):
        wrong = run.invoke(push_command, [str(other), "--name", "toy", *option], obj=SnapshotterTarget(house))
        assert (wrong.exit_code, "only for a .tensors file" in wrong.stderr) == (2, True)
    with house.client() as client, pytest.raises(Refused, match="is not a directory"):
        push_directory(file, "toy", client, Progress(), tensors=TensorsOptions(tmp_path / "none"))


def flipped(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def refusal(house: House, file: Path) -> str:
    with house.client() as client, pytest.raises(Refused) as refused:
        push(file, "toy", client, Progress())
    assert refused.value.failure.code == "artifact_rejected"
    assert versions_of(house.store, TENANT) == []
    return refused.value.failure.message


def test_damaged_tensorizer_file_is_refused(house: House, tmp_path: Path) -> None:
    """A flipped bit, a truncated file and a link out of the directory are each refused, and no version is stored."""
    file = written(tmp_path / "a")
    whole = file.read_bytes()
    flipped(file, len(whole) - 20)
    assert "do not match the hash" in refusal(house, file)
    file.write_bytes(whole[:-5000])
    assert "but the file has" in refusal(house, file)
    file.write_bytes(whole)
    (tmp_path / "a" / "config.json").rename(tmp_path / "config.json")
    (tmp_path / "a" / "config.json").symlink_to(tmp_path / "config.json")
    assert "link out of the directory" in refusal(house, file)


def test_a_client_that_checks_nothing_is_refused_too(house: House, tmp_path: Path) -> None:
    """The snapshotter checks the index itself: overlaps, other weights beside it, a file in a subdirectory."""
    request = MODEL.request()
    good = TensorsFile(WEIGHTS)

    def ask(file: TensorsFile, path: str = "toy.tensors", beside: tuple[WeightsFile, ...] = ()) -> tuple[int, str]:
        raw = file.build()
        header = WeightsFile(path=path, size=len(raw), header=raw[: 73 + file.index_bytes])
        with house.client() as client:
            body = encode(structs.replace(request, weights=(header, *beside)))
            answer = client.post("/push/v1/plans", content=body)
        return answer.status_code, answer.text

    assert ask(good)[0] == 200
    status, text = ask(replace(good, moved={"model.half": -4}))
    assert (status, "begins at byte" in text) == (422, True)
    status, text = ask(good, beside=request.weights)
    assert (status, "pushed alone" in text) == (422, True)
    status, text = ask(good, path="deep/toy.tensors")
    assert (status, "pushed alone" in text) == (422, True)
