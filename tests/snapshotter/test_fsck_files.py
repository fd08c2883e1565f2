"""What a check finds in a tensorizer file that is kept as it is, and in its index; done as it says, all is well."""

import json
from pathlib import Path

import pytest

from tests.snapshotter.bench import TENANT, Bench, push
from tests.snapshotter.models import default_weights
from tests.snapshotter.planted import Store, flip
from tests.snapshotter.tensors_files import KeptModel
from tests.snapshotter.test_fsck import HARMS, check, mend

KEPT = (KeptModel(), KeptModel(shards={"model.safetensors": default_weights(seed=70)}))


@pytest.mark.deep
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("kind", ["packs", "index"])
def test_a_kept_file_in_every_way(tmp_path: Path, kind: str, harm: str) -> None:
    """Likewise of a tensorizer file that is kept as it is, and of its index."""
    named = tuple(push(Bench.over(tmp_path), model).version for model in KEPT)
    one, two = sorted((tmp_path / "store" / TENANT / kind).glob("*.tensors"))
    right = one.read_bytes()
    assert check(tmp_path, named=named)[0] == []
    raw = HARMS[harm](right, two.read_bytes())
    if raw is None:
        one.unlink()
    else:
        one.write_bytes(raw)
    findings, _ = check(tmp_path, named=named)
    assert any(one.name in finding.key for finding in findings), findings
    for _ in range(3):
        mend(tmp_path, findings, *KEPT)
        findings, _ = check(tmp_path, named=named)
    assert findings == []
    assert one.read_bytes() == right


def test_a_byte_of_no_chunk(tmp_path: Path) -> None:
    """A bit of a kept file that no version needs is found too: the file is not what was pushed."""
    push(Bench.over(tmp_path), KEPT[0])
    (path,) = (tmp_path / "store" / TENANT / "packs").glob("*.tensors")
    flip(Store(tmp_path / "store", ""), path, -1)
    (finding,) = check(tmp_path)[0]
    assert (finding.key, finding.fault) == (f"{TENANT}/packs/{path.name}", "its bytes do not match its name")


def test_an_index_that_lies_of_a_kept_file(tmp_path: Path) -> None:
    """Well formed and a byte off: the index is named, not the file."""
    version = push(Bench.over(tmp_path), KEPT[0]).version
    (path,) = (tmp_path / "store" / TENANT / "index").glob("*.tensors")
    raw = path.read_bytes()
    at = json.loads(raw)["chunks"][0][1][0][0]
    path.write_bytes(raw.replace(b"[%d," % at, b"[%d," % (at - 1), 1))
    findings, _ = check(tmp_path)
    assert [finding.key for finding in findings] == [
        f"{TENANT}/index/{path.name}", f"{TENANT}/manifests/{version}"
    ]  # fmt: skip
    mend(tmp_path, findings, KEPT[0])
    assert (check(tmp_path)[0], path.read_bytes()) == ([], raw)
