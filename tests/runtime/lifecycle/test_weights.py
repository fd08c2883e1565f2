"""Weights on a device, with either bind method, and models whose weights are detached and attached again."""

import gc
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from runtime.lifecycle.version_restore import restore
from runtime.lifecycle.weights import DetachableModel, Weights, bind_weights, read_pinned_files
from runtime.models import binding
from runtime.models.binding import BindMethod, find_differences
from runtime.models.families import SERVED
from tests.runtime.driving import DEADLINE_S, EventRecorder
from tests.runtime.models.test_binding import HOWS, ReadOnlyFile, bound_over, in_child
from tests.runtime.restoring import VERSION, bind_of, copy_weights, generate, generate_by_library
from tests.runtime.tiny_decoders import CONFIGS, TinyModel, tiny
from tests.runtime.versions import MemoryLease, make_llama
from tests.weightcache.client.lanes import needs_device
from weightcache.client import libc

CPU = torch.device("cpu")
VERSIONS = (VERSION, make_llama(tie_word_embeddings=False))


@pytest.fixture
def device_of_copies(monkeypatch: pytest.MonkeyPatch) -> list[Weights]:
    """Weights in this list are "on a device": the library copies their tensors to the CPU, as it does with CUDA's."""
    there: list[Weights] = []
    load = binding._bind_by_library

    def taking_back(family: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
        away = {tensor.data_ptr() for weights in there for tensor in weights.tensors.values()}
        return load(family, config, {n: t.clone() if t.data_ptr() in away else t for n, t in tensors.items()})

    monkeypatch.setattr(binding, "_bind_by_library", taking_back)
    return there


@pytest.mark.parametrize("version", VERSIONS, ids=["tied", "not tied"])
@pytest.mark.parametrize("how", HOWS)
def test_a_model_computes_on_the_device(how: BindMethod, version: Any, device_of_copies: list[Weights]) -> None:
    """Every parameter is a device copy with the library's ties and values, and nothing uses the lease."""
    lease = MemoryLease(version)
    files, weights = read_pinned_files(lease), copy_weights(lease)
    device_of_copies.append(weights)
    bound = bind_weights(weights, files, how, CPU)
    there = {tensor.data_ptr() for tensor in weights.tensors.values()}
    assert {parameter.data_ptr() for parameter in bound.module.parameters()} == there
    gc.collect()
    assert not lease.in_use
    assert find_differences(bound.module, bind_weights(lease.weights(), files, "library", CPU).module) == ()


def test_library_binding_of_device_tensors_is_refused(device_of_copies: list[Weights]) -> None:
    """The library would load device tensors into other memory, which is refused."""
    lease = MemoryLease(VERSION)
    weights = copy_weights(lease)
    device_of_copies.append(weights)
    with pytest.raises(Exception, match="is not the verified tensor"):
        bind_weights(Weights(lease, weights.tensors), read_pinned_files(lease), "library", CPU)


def test_known_answers_are_recorded_on_a_device(device_of_copies: list[Weights]) -> None:
    """A first start without a known seal runs by the library, then by the fast bind if that is exact."""
    lease, recorder = MemoryLease(VERSION), EventRecorder()

    def acquire(tenant: str, version: str) -> Weights:
        device_of_copies.append(copy_weights(lease))
        return device_of_copies[-1]

    serving = restore(bind_of(lease), recorder.callbacks, acquire)
    generate(serving, recorder)
    assert recorder.tokens == generate_by_library(lease)
    assert serving.recorded_seal is not None
    assert serving.recorded_seal.fast_bind
    assert serving.thread.stop(DEADLINE_S)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("version", VERSIONS, ids=["tied", "not tied"])
def test_known_answers_are_recorded_on_a_gpu(version: Any) -> None:
    """On a GPU the tokens are those of a CPU."""
    lease, recorder = MemoryLease(version), EventRecorder()

    def acquire(tenant: str, version: str) -> Weights:
        there = {name: tensor.cuda() for name, tensor in lease.weights().tensors.items()}
        return Weights(lease, there, build_host_tensors=lambda: lease.weights().tensors)

    serving = restore(replace(bind_of(lease), device_class="gpu"), recorder.callbacks, acquire)
    generate(serving, recorder)
    assert recorder.tokens == generate_by_library(lease)
    assert serving.recorded_seal is not None
    assert serving.thread.stop(DEADLINE_S)


def _emptied(model: TinyModel, path: Path, how: BindMethod) -> tuple[DetachableModel, ReadOnlyFile]:
    """Return a model bound over a mapping that is unmapped."""
    file = ReadOnlyFile(path, model)
    skeleton = DetachableModel(SERVED[model.architecture], bound_over(model, file.tensors, how).module)
    skeleton.detach_weights(file.tensors)
    file.tensors.clear()
    libc.unmap(file.address, file.size)
    return skeleton, file


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_attached_weights_equal_a_new_binding(name: str, how: BindMethod, tmp_path: Path) -> None:
    """Attached again, a model equals a newly bound one. A touch of unmapped memory would kill this process."""
    model = tiny(name)
    skeleton, _ = _emptied(model, tmp_path / "old", how)
    assert all(parameter.is_meta for parameter in skeleton.module.parameters())
    new = ReadOnlyFile(tmp_path / "new", model)
    skeleton.attach_weights(new.tensors)
    fresh = bound_over(model, new.tensors, how)
    for mine, theirs in zip(skeleton.module.parameters(), fresh.module.parameters(), strict=True):
        assert new.holds(mine) or not new.holds(theirs), "only what is fused may be a copy"
    assert find_differences(skeleton.module, fresh.module) == ()


def test_an_empty_one_can_t_answer(tmp_path: Path) -> None:
    """Its output is a meta tensor, without values."""
    skeleton, _ = _emptied(tiny("llama tied"), tmp_path / "old", "fast")
    embed = skeleton.module.get_input_embeddings()  # type: ignore[operator]
    assert embed(torch.tensor([1, 2])).is_meta


def test_read_of_unmapped_weights_kills_the_process(tmp_path: Path) -> None:
    """Negative control: a parameter over unmapped memory kills the process."""
    model = tiny("llama tied")
    file = ReadOnlyFile(tmp_path / "old", model)
    stale = next(bound_over(model, file.tensors, "fast").module.parameters())

    def look() -> None:
        libc.unmap(file.address, file.size)
        stale.sum()

    assert in_child(look) == -signal.SIGSEGV


def test_tensors_of_another_version_are_refused(tmp_path: Path) -> None:
    """A surplus tensor is refused."""
    model = tiny("llama tied")
    skeleton, _ = _emptied(model, tmp_path / "old", "fast")
    new = ReadOnlyFile(tmp_path / "new", model)
    with pytest.raises(Refused) as caught:
        skeleton.attach_weights({**new.tensors, "surplus": torch.ones(3)})
    assert isinstance(caught.value.failure, ArtifactRejected)
