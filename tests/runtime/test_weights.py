"""Weights on a device: whichever way a model is bound, it computes on the device's copies."""

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from runtime import binding
from runtime.binding import How, compare
from runtime.restore import restore
from runtime.serving import Serving, Wiring
from runtime.weights import Weights, bind_weights, pinned_files
from tests.runtime.restoring import DEADLINE_S, VERSION, Heard, bind_of, by_library, copied, generate
from tests.runtime.versions import MemoryLease, make_llama
from tests.weightcache.lanes import needs_device

CPU = torch.device("cpu")
HOWS: tuple[How, ...] = ("library", "fast")
VERSIONS = (VERSION, make_llama(tie_word_embeddings=False))


@pytest.fixture
def device_of_copies(monkeypatch: pytest.MonkeyPatch) -> list[Weights]:
    """Weights put in here are "on a device": the library takes its tensors back to the CPU, as it does with CUDA's."""
    there: list[Weights] = []
    load = binding._bind_by_library

    def taking_back(family: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
        away = {tensor.data_ptr() for weights in there for tensor in weights.tensors.values()}
        return load(family, config, {n: t.clone() if t.data_ptr() in away else t for n, t in tensors.items()})

    monkeypatch.setattr(binding, "_bind_by_library", taking_back)
    return there


@pytest.mark.parametrize("version", VERSIONS, ids=["tied", "not tied"])
@pytest.mark.parametrize("how", HOWS)
def test_a_model_computes_on_the_device(how: How, version: Any, device_of_copies: list[Weights]) -> None:
    """Every parameter is a copy there, ties and values are the library's, and nothing looks into the lease any more."""
    lease = MemoryLease(version)
    files, weights = pinned_files(lease), copied(lease)
    device_of_copies.append(weights)
    bound = bind_weights(weights, files, how, CPU)
    there = {tensor.data_ptr() for tensor in weights.tensors.values()}
    assert {parameter.data_ptr() for parameter in bound.module.parameters()} == there
    gc.collect()
    assert not lease.in_use
    assert compare(bound.module, bind_weights(lease.weights(), files, "library", CPU).module) == ()


def test_control(device_of_copies: list[Weights]) -> None:
    """Given the device's tensors, the library's loader makes a model of other memory, which is refused."""
    lease = MemoryLease(VERSION)
    weights = copied(lease)
    device_of_copies.append(weights)
    with pytest.raises(Exception, match="is not the verified tensor"):
        bind_weights(Weights(lease, weights.tensors), pinned_files(lease), "library", CPU)


def test_known_answers_are_recorded_on_a_device(device_of_copies: list[Weights]) -> None:
    """The first start of an engine that no seal knows: by the library, then by hand where that is exact."""
    lease, heard = MemoryLease(VERSION), Heard()

    def acquire(tenant: str, version: str) -> Weights:
        device_of_copies.append(copied(lease))
        return device_of_copies[-1]

    serving = restore(bind_of(lease), Wiring(heard.take, heard.busy.append), acquire)
    assert isinstance(serving, Serving)
    generate(serving, heard)
    assert heard.tokens == by_library(lease)
    assert serving.recorded is not None
    assert serving.recorded.fast_bind
    assert serving.thread.stop(DEADLINE_S)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("version", VERSIONS, ids=["tied", "not tied"])
def test_known_answers_are_recorded_on_a_gpu(version: Any) -> None:
    """As above, over CUDA's memory: the tokens are those of a CPU."""
    lease, heard = MemoryLease(version), Heard()

    def acquire(tenant: str, version: str) -> Weights:
        there = {name: tensor.cuda() for name, tensor in lease.weights().tensors.items()}
        return Weights(lease, there, on_host=lambda: lease.weights().tensors)

    serving = restore(replace(bind_of(lease), device_class="gpu"), Wiring(heard.take, heard.busy.append), acquire)
    assert isinstance(serving, Serving)
    generate(serving, heard)
    assert heard.tokens == by_library(lease)
    assert serving.recorded is not None
    assert serving.thread.stop(DEADLINE_S)
