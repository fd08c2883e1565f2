"""The varlen backend's tables give the right attention: on a CPU with a stand-in kernel, on a GPU with the real one."""

import inspect

import pytest
import torch
from msgspec.structs import replace

from runtime.drivers.native import engine as core
from runtime.drivers.native.batch import SequenceSlice, build_batch, slots_in_blocks
from runtime.drivers.native.sdpa_backend import SdpaBackend
from runtime.drivers.native.varlen_backend import (
    VarlenBackend,
    build_index,
    find_varlen,
    supports_model,
    supports_needed_arguments,
)
from runtime.drivers.schedule_policy import Budget
from tests.runtime.drivers.native.backends import FACTS, LENGTHS, STEPS, Replay, reference_varlen
from tests.runtime.driving import run_to_end
from tests.runtime.tiny_decoders import CONFIGS, CPU, engine, greedy, prompts, reference, tiny, tokens_of

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_varlen_index_holds_lengths_and_slots() -> None:
    """Cumulative lengths of queries and keys, their maxima, and the slots of all keys in order."""
    pieces = [
        SequenceSlice((7,), 17, slots_in_blocks((3, 1), CPU), 1),
        SequenceSlice((8, 9, 10), 4, slots_in_blocks((2,), CPU), 0),
    ]
    index = build_index(build_batch(pieces, CPU), CPU)
    assert index.cu_q.tolist() == [0, 1, 4]
    assert index.cu_k.tolist() == [0, 18, 25]
    assert index.cu_q.dtype == index.cu_k.dtype == torch.int32
    assert (index.max_q, index.max_k) == (3, 18)
    assert index.gather.tolist() == [*range(48, 64), 16, 17, *range(32, 39)]


@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
def test_tables_mean_the_right_attention(window: int | None) -> None:
    """With the stand-in kernel, every mix of pieces and windows is right."""
    replay = Replay(LENGTHS, CPU, torch.float32)
    backend = VarlenBackend(FACTS, replay.blocks, torch.float32, CPU, reference_varlen)
    for shares in STEPS:
        got, want = replay.step(backend, shares, window)
        torch.testing.assert_close(got, want)


@pytest.mark.deep
@pytest.mark.parametrize("name", CONFIGS)
def test_engine_on_varlen_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole engine with the token-major pool and the stand-in gives `generate`'s tokens."""
    monkeypatch.setattr(
        core,
        "build_backend",
        lambda facts, blocks, dtype, device: VarlenBackend(facts, blocks, dtype, device, reference_varlen),
    )
    machine = engine(name, budget=Budget(23, 17, 5))
    some = [prompt[:20] for prompt in prompts()[:6]]
    for index, prompt in enumerate(some):
        assert machine.admit(greedy(str(index), prompt, 6)) is None
    events = run_to_end(machine)
    for index, prompt in enumerate(some):
        assert tokens_of(events, str(index)) == reference(name, prompt)[:6]


def test_the_stand_in_has_the_kernels_shape() -> None:
    """The stand-in has the arguments of torch's kernel, in the same order."""
    real = find_varlen()
    assert real is not None, "this torch has no varlen_attn with what is needed"
    theirs, ours = inspect.signature(real).parameters, inspect.signature(reference_varlen).parameters
    positional = [name for name, parameter in ours.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert list(theirs)[: len(positional)] == positional
    assert set(ours) <= set(theirs)
    assert supports_needed_arguments(reference_varlen)


def test_an_older_kernel_is_not_taken() -> None:
    """A kernel without grouped queries or windows is not used."""

    def older(query: object, key: object, value: object, cu_seq_q: object, cu_seq_k: object) -> None:
        """The signature of torch 2.10."""

    assert not supports_needed_arguments(older)


def test_a_cpu_has_sdpa() -> None:
    assert isinstance(core.build_backend(FACTS, 4, torch.float32, CPU), SdpaBackend)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "want"),
    [
        pytest.param(torch.bfloat16, 128, (8, 0), True, id="Ampere"),
        pytest.param(torch.float16, 256, (9, 0), True, id="Hopper, the longest head"),
        pytest.param(torch.float16, 128, (7, 5), False, id="Turing"),
        pytest.param(torch.float16, 128, (7, 0), False, id="Volta"),
        pytest.param(torch.float32, 128, (9, 0), False, id="float32"),
        pytest.param(torch.bfloat16, 264, (9, 0), False, id="a longer head"),
        pytest.param(torch.bfloat16, 100, (9, 0), False, id="a head of no multiple of 8"),
    ],
)
def test_unsupported_models_get_sdpa(
    dtype: torch.dtype, head_dim: int, capability: tuple[int, int], want: bool
) -> None:
    """Models that the kernel would refuse get SDPA, which runs on any device."""
    assert supports_model(replace(FACTS, head_dim=head_dim, value_dim=head_dim), dtype, capability) is want
    assert not supports_model(replace(FACTS, head_dim=head_dim, value_dim=head_dim - 8), dtype, capability)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
def test_kernel_against_the_slow_way_on_a_gpu(window: int | None) -> None:
    """torch's kernel equals the reference attention."""
    device, kernel = torch.device("cuda"), find_varlen()
    assert kernel is not None
    replay = Replay(LENGTHS, device, torch.bfloat16)
    backend = VarlenBackend(FACTS, replay.blocks, torch.bfloat16, device, kernel)
    for shares in STEPS:
        got, want = replay.step(backend, shares, window)
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_on_a_gpu(name: str) -> None:
    """In float32 (SDPA) the GPU gives the tokens of a CPU. At least nine of ten must agree."""
    from runtime.models.binding import bind

    device, model = torch.device("cuda"), tiny(name)
    bound = bind(model.manifest, model.config_json, model.tensors, bind_method="fast", dtype=model.dtype, device=device)
    assert {parameter.device.type for parameter in bound.module.parameters()} == {"cuda"}
    machine = engine(name, bound=bound, device=device)
    for index, prompt in enumerate(prompts()):
        assert machine.admit(greedy(str(index), prompt)) is None
    events = run_to_end(machine)
    equal = [tokens_of(events, str(index)) == reference(name, prompt) for index, prompt in enumerate(prompts())]
    assert sum(equal) >= 9
