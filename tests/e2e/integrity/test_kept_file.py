"""`kelvin push x.tensors`: the store keeps the file unchanged, and replicas are restored from it.

Damage in it is refused by name.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors

from coldstart_bench.harness.installation import Installation
from tests.e2e.commands import run
from tests.e2e.https_client import complete
from tests.e2e.tiny_models import greedy_continuation, make_tiny, prompt_of, text_of
from tests.snapshotter.models import Weight
from tests.snapshotter.tensors_files import TensorsFile

pytestmark = pytest.mark.deep

PROMPT = [8, 12, 15]
MODEL = "kept"


def as_tensors(directory: Path) -> Path:
    """Write the directory's weights to a tensorizer file beside it."""
    tensors = {
        name: Weight(each["dtype"], tuple(each["shape"]), bytes(each["data"]))
        for name, each in safetensors.deserialize((directory / "model.safetensors").read_bytes())  # type: ignore[no-untyped-call]
    }
    path = directory / "model.tensors"
    path.write_bytes(TensorsFile(tensors, index_bytes=256 << 10).build())
    return path


@pytest.fixture(scope="module")
def directory(scratch: Path) -> Path:
    """A model of its own, so that its chunks are in one place."""
    return make_tiny(scratch / "kept", "llama", seed=77)


@pytest.fixture(scope="module")
def kept(kelvin: Installation, directory: Path) -> Path:
    """The model's tensorizer file, pushed."""
    path = as_tensors(directory)
    assert json.loads(run(kelvin, "push", str(path), "--name", MODEL, "--json"))["created"]
    return path


@pytest.fixture
def cold(kelvin: Installation, kept: Path) -> Installation:
    """The installation with the model at zero and only the store filled."""
    kelvin.scale_to_zero(MODEL)
    kelvin.empty_tier("host")
    kelvin.empty_tier("nvme")
    return kelvin


def stored(kelvin: Installation) -> Path:
    (path,) = (kelvin.data / "store" / "default" / "packs").glob("*.tensors")
    return path


def test_model_is_restored_from_the_kept_file(cold: Installation, directory: Path, kept: Path, tmp_path: Path) -> None:
    """The stored file is identical, the answer is the model's, and the export is the file again."""
    assert stored(cold).read_bytes() == kept.read_bytes()
    answer = complete(cold, MODEL, prompt_of(PROMPT), max_tokens=6)
    assert answer.status == 200, answer.raw
    assert answer.text.strip() == text_of(directory, greedy_continuation(directory, PROMPT, 6))
    version = cold.model(MODEL)["version"]
    said = run(cold, "export", f"{MODEL}@{version}", str(tmp_path / "out"), "--format", "tensors")
    assert "as they were pushed" in said
    assert (tmp_path / "out" / "model.tensors").read_bytes() == kept.read_bytes()
    run(cold, "fsck")


def test_a_wrong_byte_is_refused(cold: Installation, directory: Path) -> None:
    """A wrong byte is refused by its chunk and found by fsck. Once repaired, the request succeeds."""
    path = stored(cold)
    whole = path.read_bytes()
    spans: dict[str, Any] = dict(json.loads((path.parent.parent / "index" / path.name).read_bytes())["chunks"])
    digest = list(spans)[-1]
    at = spans[digest][-1][0]
    path.chmod(0o600)
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
    answer = complete(cold, MODEL, prompt_of(PROMPT), max_tokens=2)
    assert (answer.status, answer.json["error"]["code"]) == (500, "chunk_corrupt")
    assert digest in answer.raw.decode()
    assert path.name in run(cold, "fsck", code=1, errors=False)
    path.write_bytes(whole)
    answer = complete(cold, MODEL, prompt_of(PROMPT), max_tokens=6)
    assert answer.text.strip() == text_of(directory, greedy_continuation(directory, PROMPT, 6))
