"""A tensorizer file becomes the version that the same tensors in safetensors become; one that lies becomes none."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from contracts.errors import Refused
from contracts.problem import code_of
from contracts.push import WeightsFile
from contracts.wire import encode
from kelvin.export import export_version
from kelvin.progress import Silence
from kelvin.push import push, push_directory
from kelvin.push_command import push_command
from tests.kelvin.doors import Doors
from tests.kelvin.test_push import Told
from tests.snapshotter.house import TENANT, House, open_house, settings_for
from tests.snapshotter.models import Model, default_weights, weight
from tests.snapshotter.reader import versions_of
from tests.snapshotter.tensors_files import TensorsFile

pytestmark = pytest.mark.deep

WEIGHTS = default_weights() | {"model.half": weight((9, 3), 70, "BF16"), "model.long": weight((40_001,), 71, "U8")}
MODEL = Model(shards={"model.safetensors": WEIGHTS})


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with open_house(settings_for(tmp_path / "data")) as opened:
        yield opened


def written(directory: Path, file: TensorsFile | None = None, small: bool = True) -> Path:
    """A file of the model's tensors, in another order, among the model's small files and what else lies around."""
    directory.mkdir(parents=True)
    path = directory / "toy.tensors"
    path.write_bytes((file or TensorsFile(dict(reversed(WEIGHTS.items())), kind=0)).build())
    for name, raw in MODEL.files().items() if small else ():
        if name != "model.safetensors":
            (directory / name).write_bytes(raw)
    return path


def test_the_same_version(house: House, tmp_path: Path) -> None:
    """However the tensors came; nothing of it is sent twice, and nothing of the file but its tensors is kept."""
    told = Told()
    file = written(tmp_path / "a")
    with house.client() as door:
        pushed = push_directory(file, "toy", door, told)
        again = push(MODEL.write(tmp_path / "b"), "toy", door, Silence())
    assert (again.version, again.created) == (pushed.committed.version, False)
    assert again.new_chunks == 0
    assert ("checking", file.stat().st_size) in told.stages
    assert pushed.ignored == ()


def test_there_and_back(house: House, tmp_path: Path) -> None:
    """What the library wrote at an export is the version again, its small files being beside it."""
    with house.client() as door:
        version = push(MODEL.write(tmp_path / "model"), "toy", door, Silence()).version
        export_version(version, tmp_path / "out", "tensors", door, Silence())
        assert push(tmp_path / "out" / "model.tensors", "toy", door, Silence()).version == version


def test_with_another_directory(house: House, tmp_path: Path) -> None:
    """The small files may lie elsewhere; that the weights there are not these is no matter."""
    file, other = written(tmp_path / "a", small=False), tmp_path / "b"
    other.mkdir()
    Model(more={}).write(other)
    (other / "model.bin").write_bytes(b"of no interest")
    run = CliRunner()
    refused = run.invoke(push_command, [str(file), "--name", "toy"], obj=Doors(house))
    assert (refused.exit_code, "config.json" in refused.stderr) == (3, True)
    done = run.invoke(push_command, [str(file), "--name", "toy", "--with", str(other)], obj=Doors(house))
    assert done.exit_code == 0, done.output
    assert versions_of(house.store, TENANT) == [done.stdout.split()[-1]]
    wrong = run.invoke(push_command, [str(other), "--name", "toy", "--with", str(other)], obj=Doors(house))
    assert wrong.exit_code == 2
    with house.client() as door, pytest.raises(Refused, match="is not a directory"):
        push_directory(file, "toy", door, Silence(), beside=tmp_path / "none")


def flipped(file: Path, at: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)


def refusal(house: House, file: Path) -> str:
    with house.client() as door, pytest.raises(Refused) as refused:
        push(file, "toy", door, Silence())
    assert code_of(refused.value.failure) == "artifact_rejected"
    assert versions_of(house.store, TENANT) == []
    return refused.value.failure.message


def test_what_the_library_would_not_notice(house: House, tmp_path: Path) -> None:
    """A flipped bit of a tensor, a file that was cut, a link out of the directory: named, and nothing is sent."""
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
    """The snapshotter reads the index itself: overlaps, other weights beside, an index of safetensors."""
    request = MODEL.request()
    good = TensorsFile(WEIGHTS)

    def ask(file: TensorsFile, path: str = "toy.tensors", beside: tuple[WeightsFile, ...] = ()) -> tuple[int, str]:
        raw = file.build()
        header = WeightsFile(path=path, size=len(raw), header=raw[: 73 + file.index_bytes])
        with house.client() as door:
            body = encode(structs.replace(request, weights=(header, *beside)))
            answer = door.post("/push/v1/plans", content=body)
        return answer.status_code, answer.text

    assert ask(good)[0] == 200
    status, text = ask(replace(good, moved={"model.half": -4}))
    assert (status, "begins at byte" in text) == (422, True)
    status, text = ask(good, beside=request.weights)
    assert (status, "pushed alone" in text) == (422, True)
    status, text = ask(good, path="deep/toy.tensors")
    assert (status, "pushed alone" in text) == (422, True)
