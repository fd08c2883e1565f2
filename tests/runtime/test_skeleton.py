"""A bound model loses its weights' memory and gets other memory: every family, each way of binding."""

import signal
from pathlib import Path

import pytest
import torch

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import Refused
from runtime.binding import How, compare
from runtime.families import SERVED
from runtime.weights import Skeleton
from tests.runtime.engine.models import CONFIGS, TinyModel, tiny
from tests.runtime.test_binding import HOWS, ReadOnlyFile, bound_over, in_child
from weightcache import libc


def _emptied(model: TinyModel, path: Path, how: How) -> tuple[Skeleton, ReadOnlyFile]:
    """Bound over a mapping that is there no more."""
    file = ReadOnlyFile(path, model)
    skeleton = Skeleton(SERVED[model.architecture], bound_over(model, file.tensors, how).module)
    skeleton.empty(file.tensors)
    file.tensors.clear()
    libc.unmap(file.address, file.size)
    return skeleton, file


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_filled_again_it_is_as_if_bound_anew(name: str, how: How, tmp_path: Path) -> None:
    """Ties, experts' matrices, buffers and all; a touch of what was unmapped would end this process."""
    model = tiny(name)
    skeleton, _ = _emptied(model, tmp_path / "old", how)
    assert all(parameter.is_meta for parameter in skeleton.module.parameters())
    new = ReadOnlyFile(tmp_path / "new", model)
    skeleton.fill(new.tensors)
    fresh = bound_over(model, new.tensors, how)
    for mine, theirs in zip(skeleton.module.parameters(), fresh.module.parameters(), strict=True):
        assert new.holds(mine) or not new.holds(theirs), "only what is fused may be a copy"
    assert compare(skeleton.module, fresh.module) == ()


def test_an_empty_one_can_t_answer(tmp_path: Path) -> None:
    """Of what it is given it makes nothing that could be read, let alone a token."""
    skeleton, _ = _emptied(tiny("llama tied"), tmp_path / "old", "fast")
    embed = skeleton.module.get_input_embeddings()  # type: ignore[operator]
    assert embed(torch.tensor([1, 2])).is_meta


def test_a_view_of_what_was_unmapped_is_the_end(tmp_path: Path) -> None:
    """Control of the tests here: had a parameter stayed where it was, they would not have gone on."""
    model = tiny("llama tied")
    file = ReadOnlyFile(tmp_path / "old", model)
    stale = next(bound_over(model, file.tensors, "fast").module.parameters())

    def look() -> None:
        libc.unmap(file.address, file.size)
        stale.sum()

    assert in_child(look) == -signal.SIGSEGV


def test_tensors_of_another_version_are_refused(tmp_path: Path) -> None:
    """One more than its parameters take: nothing is served over what does not fit."""
    model = tiny("llama tied")
    skeleton, _ = _emptied(model, tmp_path / "old", "fast")
    new = ReadOnlyFile(tmp_path / "new", model)
    with pytest.raises(Refused) as caught:
        skeleton.fill({**new.tensors, "surplus": torch.ones(3)})
    assert isinstance(caught.value.failure, ArtifactRejected)
