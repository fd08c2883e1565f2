"""A file's path decides whether it is served, ignored or refused, and no path leads out of the directory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.file_roles import (
    MAX_PATHS,
    FileRole,
    check_paths,
    choose_weights,
    find_path_fault,
    role_of,
)


@pytest.mark.parametrize(
    ("path", "want"),
    [
        pytest.param("config.json", FileRole.PINNED, id="the config is pinned"),
        pytest.param("chat_template.jinja", FileRole.PINNED, id="the chat template is pinned"),
        pytest.param("model.safetensors", FileRole.WEIGHTS, id="safetensors are weights"),
        pytest.param("model.safetensors.index.json", FileRole.INDEX, id="the index is checked, not kept"),
        pytest.param("README.md", FileRole.IGNORED, id="a readme is left out"),
        pytest.param(".gitattributes", FileRole.IGNORED, id="git's attributes are left out"),
        pytest.param("modules.json", FileRole.PINNED, id="which modules follow an encoder is pinned"),
        pytest.param("1_Pooling/config.json", FileRole.PINNED, id="so is a module's config"),
        pytest.param("1_Pooling/x/config.json", FileRole.IGNORED, id="but none further below"),
        pytest.param("2_Dense/model.safetensors", FileRole.IGNORED, id="a module's weights are not the model's"),
        pytest.param("2_Dense/pytorch_model.bin", FileRole.PICKLE, id="a module's pickle is a pickle"),
        pytest.param("original/config.json", FileRole.IGNORED, id="a config below is not the model's"),
        pytest.param("onnx/model.safetensors", FileRole.IGNORED, id="weights below are not the model's"),
        pytest.param("tokenizer.model", FileRole.IGNORED, id="a sentencepiece model is not used"),
        pytest.param("vocab.json", FileRole.IGNORED, id="a slow tokenizer's vocabulary is not used"),
        pytest.param("pytorch_model.bin", FileRole.PICKLE, id="a torch checkpoint is a pickle"),
        pytest.param("original/consolidated.00.pth", FileRole.PICKLE, id="a pickle below is a pickle"),
        pytest.param("a.pt", FileRole.PICKLE, id="pt"),
        pytest.param("a.pkl", FileRole.PICKLE, id="pkl"),
        pytest.param("a.pickle", FileRole.PICKLE, id="pickle"),
        pytest.param("a.ckpt", FileRole.PICKLE, id="ckpt"),
        pytest.param("a.npy", FileRole.PICKLE, id="an array file may hold objects"),
        pytest.param("a.npz", FileRole.PICKLE, id="so may an archive of them"),
        pytest.param("A.BIN", FileRole.PICKLE, id="capitals hide nothing"),
        pytest.param("modeling_toy.py", FileRole.CODE, id="code"),
        pytest.param("kernels/fast.so", FileRole.CODE, id="compiled code"),
    ],
)
def test_role_of(path: str, want: FileRole) -> None:
    """Dangerous files are refused anywhere. Only files at the top of the directory are served."""
    assert role_of(path) is want


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/etc/passwd", id="absolute"),
        pytest.param("../up.json", id="up"),
        pytest.param("a/../../up.json", id="down and up"),
        pytest.param("a/./b", id="a dot segment"),
        pytest.param("a//b", id="an empty segment"),
        pytest.param("a/", id="a trailing slash"),
        pytest.param("", id="empty"),
        pytest.param("a\\b", id="a backslash"),
        pytest.param("a\0b", id="a NUL"),
        pytest.param("a\nb", id="a newline"),
        pytest.param("\ud800", id="half a surrogate pair"),
        pytest.param("é" * 257, id="513 bytes"),
    ],
)
def test_refuses_paths(path: str) -> None:
    """Paths that lead out, or that other systems read differently, are refused with an encodable message."""
    with pytest.raises(Refused) as caught:
        check_paths([path])
    assert isinstance(caught.value.failure, ArtifactRejected)
    caught.value.failure.message.encode()


@given(st.lists(st.text(st.characters(exclude_characters="/\\", exclude_categories=["C"]), min_size=1), min_size=1))
def test_accepts_ordinary_paths(segments: list[str]) -> None:
    """Any path of ordinary segments is accepted, up to 512 bytes."""
    path = "/".join(segments)
    ordinary = not {".", ".."} & set(segments) and len(path.encode()) <= 512
    assert (find_path_fault(path) is None) == ordinary


def test_refuses_a_path_twice_and_too_many() -> None:
    """A repeated path and too many paths are refused."""
    with pytest.raises(Refused, match="named twice"):
        check_paths(["a", "b", "a"])
    check_paths(str(number) for number in range(MAX_PATHS))
    with pytest.raises(Refused, match="at most"):
        check_paths(str(number) for number in range(MAX_PATHS + 1))


@pytest.mark.parametrize(
    ("paths", "indexed", "want"),
    [
        pytest.param(["model.safetensors"], None, ("model.safetensors",), id="the only file"),
        pytest.param(["toy.safetensors"], None, ("toy.safetensors",), id="the only file, whatever its name"),
        pytest.param(["b.safetensors", "a.safetensors"], {"a.safetensors", "b.safetensors"},
                     ("a.safetensors", "b.safetensors"), id="those of the index, in name order"),
        pytest.param(["a.safetensors", "consolidated.safetensors"], {"a.safetensors"},
                     ("a.safetensors",), id="others beside an index are left out"),
    ],
)  # fmt: skip
def test_chooses_weights(paths: list[str], indexed: set[str] | None, want: tuple[str, ...]) -> None:
    """The files in the index are the weights. Without an index, the only file is."""
    assert choose_weights(paths, None if indexed is None else frozenset(indexed)) == want


@pytest.mark.parametrize(
    ("paths", "indexed", "want"),
    [
        pytest.param([], None, "no safetensors weights", id="no weights"),
        pytest.param(["a.safetensors", "b.safetensors"], None, "2 safetensors files", id="several without an index"),
        pytest.param(["a.safetensors"], {"b.safetensors"}, "is missing", id="an index that names what is not there"),
        pytest.param(["a.safetensors"], {"\ud800"}, "is missing", id="an index that names what can't be written"),
        pytest.param(["a.safetensors", "model.safetensors"], {"a.safetensors"}, "does not name it",
                     id="a single file beside an index of others"),
        pytest.param(["a.safetensors"], set(), "must name", id="an index of nothing"),
    ],
)  # fmt: skip
def test_refuses_an_unclear_choice(paths: list[str], indexed: set[str] | None, want: str) -> None:
    """If two readers could choose different weights, the directory is refused."""
    with pytest.raises(Refused, match=want) as caught:
        choose_weights(paths, None if indexed is None else frozenset(indexed))
    caught.value.failure.message.encode()
