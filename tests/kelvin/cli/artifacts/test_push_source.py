"""A push reads exactly the files that were scanned, and nothing outside the directory."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kelvin.cli.artifacts.push_source import scan
from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.push_api import Piece, PlannedChunk
from kelvin.contracts.errors import InvalidRequest, Refused
from tests.snapshotter.models import Model, default_weights, resharded


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(Refused) as caught:
        call()
    failure = caught.value.failure
    assert isinstance(failure, ArtifactRejected | InvalidRequest)
    return failure.param or "", failure.message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Model().write(tmp_path / "model")


def test_scan_splits_small_files_and_weights(model: Path) -> None:
    """Small files are read whole, weights by their header, and other files by name. Hidden directories are skipped."""
    (model / ".git").mkdir()
    (model / ".git" / "hook.py").write_bytes(b"")
    (model / "sub").mkdir()
    (model / "sub" / "notes.txt").write_bytes(b"")
    source = scan(model)
    assert [file.path for file in source.small] == ["config.json", "generation_config.json", "tokenizer.json"]
    assert [file.path for file in source.weights] == ["model.safetensors"]
    assert source.ignored_paths == ("README.md", "sub/notes.txt", ".git/")
    request = source.request("toy")
    want = Model(more=Model().more | {"sub/notes.txt": b""}).request()
    assert request.weights == want.weights
    assert request.other_paths == want.other_paths
    assert sorted(request.small_files, key=str) == sorted(want.small_files, key=str)
    source.check_unchanged()


def test_index_decides_which_shards_are_pushed(tmp_path: Path) -> None:
    """The index lists the safetensors files of the model. Other files are left out."""
    model = Model(shards=resharded(default_weights(), 3, seed=1)).write(tmp_path / "m")
    (model / "consolidated.safetensors").write_bytes(b"unread")
    source = scan(model)
    assert len(source.weights) == 3
    assert "consolidated.safetensors" in source.ignored_paths


def test_chunk_is_its_pieces_with_padding(model: Path) -> None:
    """A chunk is its pieces in order, each padded with zeros."""
    raw = (model / "model.safetensors").read_bytes()
    config = (model / "config.json").read_bytes()
    pieces = (
        Piece(path="model.safetensors", offset=100, length=50, pad=14),
        Piece(path="config.json", offset=0, length=10, pad=22),
    )
    data = scan(model).read_chunk(PlannedChunk(length=96, pieces=pieces))
    assert data == raw[100:150] + bytes(14) + config[:10] + bytes(22)


def put(path: str, content: bytes = b"") -> Callable[[Path], object]:
    """Return a function that writes a file into the model directory."""

    def make(model: Path) -> None:
        (model / path).parent.mkdir(exist_ok=True)
        (model / path).write_bytes(content)

    return make


def link(path: str, target: str) -> Callable[[Path], object]:
    return lambda model: (model / path).symlink_to(target)


def pipe(model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")


INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("make", "path", "reason"),
    [
        pytest.param(put("pytorch_model.bin"), "pytorch_model.bin", "pickles", id="a pickle"),
        pytest.param(put("sub/x.py"), "sub/x.py", "code", id="code below"),
        pytest.param(link("a.txt", "/etc/passwd"), "a.txt", "hf download", id="a link to elsewhere"),
        pytest.param(link("a.txt", "../../x"), "a.txt", "out of the directory", id="a link upwards"),
        pytest.param(link("sub", "/etc"), "sub", "out of the directory", id="a directory elsewhere"),
        pytest.param(link("a.txt", "nothing"), "a.txt", "link to nothing", id="a broken link"),
        pytest.param(pipe, WEIGHTS, "not a regular file", id="a named pipe"),
        pytest.param(lambda model: (model / WEIGHTS).unlink(), WEIGHTS, "is required", id="no weights"),
        pytest.param(put(WEIGHTS, b"PK\3\4" + bytes(100)), WEIGHTS, "its header claims", id="an archive"),
        pytest.param(put("b.safetensors"), INDEX, "is required", id="two files of weights"),
        pytest.param(put("config.json", b" " * (2 << 20)), "config.json", "the limit is", id="a config that is large"),
        pytest.param(put(os.fsdecode(b"\xff.txt")), "", "UTF-8", id="a name that is no text"),
    ],
)
def test_refuses(model: Path, make: Callable[[Path], object], path: str, reason: str) -> None:
    """The refusal names file and reason before anything is sent. The message can be encoded as UTF-8."""
    make(model)
    param, message = refusal(lambda: scan(model))
    assert path in param
    assert reason in message
    message.encode()


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    """A path without a directory is refused."""
    assert "is not a directory" in refusal(lambda: scan(tmp_path / "none"))[1]


def test_link_within_the_directory_is_followed(tmp_path: Path) -> None:
    """A link to a file of the directory is read as that file. A linked subdirectory is skipped."""
    model = Model().write(tmp_path / "model")
    (model / "blobs").mkdir()
    (model / "model.safetensors").rename(model / "blobs" / "w")
    (model / "model.safetensors").symlink_to("blobs/w")
    (model / "again").symlink_to("blobs")
    (tmp_path / "link").symlink_to(model)
    source = scan(tmp_path / "link")
    assert [file.path for file in source.weights] == ["model.safetensors"]
    assert "again/" in source.ignored_paths
    source.check_unchanged()


def rewrite(path: Path) -> None:
    """Change a byte in place."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def replace(path: Path) -> None:
    """Replace the file by another with the same bytes and time."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def bend_header(path: Path) -> None:
    """Change a byte of the header, and restore size and time."""
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[9] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("change", [rewrite, replace, grow, touch, bend_header, Path.unlink])
def test_changed_file_is_noticed_before_commit(model: Path, change: Callable[[Path], None], name: str) -> None:
    """Any change of a file after the scan is an error before the commit. Unchanged files are not."""
    source = scan(model)
    source.check_unchanged()
    change(model / name)
    param, message = refusal(source.check_unchanged)
    assert param == name
    assert "changed" in message or "can't be read" in message


def test_a_read_of_a_changed_file_is_refused(model: Path) -> None:
    """A chunk never mixes two states of a file."""
    source = scan(model)
    chunk = PlannedChunk(length=8, pieces=(Piece(path="model.safetensors", offset=0, length=8, pad=0),))
    source.read_chunk(chunk)
    rewrite(model / "model.safetensors")
    assert "changed" in refusal(lambda: source.read_chunk(chunk))[1]
