"""Binding copies and writes nothing, equals the library's module, and refuses tensors that do not fit."""

import ctypes
import faulthandler
import json
import mmap
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.errors import Refused
from runtime.models import binding
from runtime.models.attention_hook import ATTENTION
from runtime.models.binding import (
    BindMethod,
    BoundModel,
    bind,
    build_skeleton,
    find_differences,
    parse_config,
    view_or_concat,
)
from runtime.models.families import SERVED
from tests.runtime.driving import run_to_end
from tests.runtime.tiny_decoders import CONFIGS, CPU, TinyModel, engine, greedy, prompts, reference, tiny, tokens_of

HOWS: tuple[BindMethod, ...] = ("fast", "library")


class ReadOnlyFile:
    """Tensors in a read-only mapping, like those of the cache."""

    def __init__(self, path: Path, model: TinyModel) -> None:
        offsets: dict[str, int] = {}
        with path.open("wb") as file:
            for name, tensor in model.tensors.items():
                file.write(b"\0" * (-file.tell() % 4096))
                offsets[name] = file.tell()
                file.write(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
        self.size = path.stat().st_size
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        with path.open("rb") as file:
            self.address: int = libc.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)
        assert self.address != ctypes.c_void_p(-1).value
        whole = (ctypes.c_char * self.size).from_address(self.address)
        self.tensors = {
            name: torch.frombuffer(whole, dtype=tensor.dtype, count=tensor.numel(), offset=offsets[name]).view(
                tensor.shape
            )
            for name, tensor in model.tensors.items()
        }

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.address <= tensor.data_ptr() < self.address + self.size


def bound_over(model: TinyModel, tensors: Mapping[str, torch.Tensor], bind_method: BindMethod) -> BoundModel:
    return bind(model.manifest, model.config_json, tensors, bind_method=bind_method, dtype=model.dtype, device=CPU)


@pytest.mark.parametrize("bind_method", HOWS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_copy(name: str, dtype: torch.dtype, bind_method: BindMethod, tmp_path: Path) -> None:
    """Parameters are views of the mapping without gradients, and buffers have values.
    Experts' matrices are views if they fill whole pages and the bind is fast, otherwise copies."""
    model = tiny(name, dtype)
    file = ReadOnlyFile(tmp_path / "weights", model)
    bound = bound_over(model, file.tensors, bind_method)
    for key, parameter in bound.module.named_parameters():
        copied = SERVED[model.architecture].find_fusion(key) and (bind_method == "library" or dtype != torch.float32)
        assert file.holds(parameter) is not bool(copied), key
        assert not parameter.requires_grad
        assert parameter.dtype == dtype
    assert not any(child.training for child in bound.module.modules())
    assert not any(buffer.is_meta for buffer in bound.module.buffers())
    assert bound.config._attn_implementation == ATTENTION


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a fork and return its exit status; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        faulthandler.disable()  # the control ends by a signal on purpose
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_bound_model_never_writes_to_weights(tmp_path: Path) -> None:
    """Both bind methods serve from a read-only mapping, where a write would kill the process (control)."""
    model = tiny("llama tied")
    file = ReadOnlyFile(tmp_path / "weights", model)
    prompt, want = prompts()[3], reference("llama tied", prompts()[3])

    def serve() -> None:
        for bind_method in HOWS:
            machine = engine("llama tied", bound=bound_over(model, file.tensors, bind_method))
            assert machine.admit(greedy("a", prompt)) is None
            assert tokens_of(run_to_end(machine), "a") == want

    assert in_child(serve) == 0
    assert in_child(lambda: next(iter(file.tensors.values())).add_(1)) == -signal.SIGSEGV


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fast_is_the_library_exactly(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, dtype)
    assert find_differences(model.bound("fast").module, model.bound("library").module) == ()


def spoil_buffer(module: nn.Module) -> None:
    module.get_buffer("model.rotary_emb.inv_freq").add_(1e-3)


def spoil_dtype(module: nn.Module) -> None:
    rotary = module.get_submodule("model.rotary_emb")
    rotary._buffers["inv_freq"] = module.get_buffer("model.rotary_emb.inv_freq").double()


def spoil_value(module: nn.Module) -> None:
    norm = module.get_submodule("model.norm")
    norm._parameters["weight"] = nn.Parameter(module.get_parameter("model.norm.weight") + 1, requires_grad=False)


def spoil_tie(module: nn.Module) -> None:
    head = module.get_submodule("lm_head")
    head._parameters["weight"] = nn.Parameter(module.get_parameter("lm_head.weight").detach(), requires_grad=False)


def spoil_layer(module: nn.Module) -> None:
    setattr(module.get_submodule("model.layers.1.self_attn"), "layer_idx", 0)  # noqa: B010


def spoil_mode(module: nn.Module) -> None:
    module.get_submodule("model.layers.1.mlp").training = True


def spoil_config(module: nn.Module) -> None:
    config: Any = module.config
    config.rms_norm_eps = 1e-3


@pytest.mark.parametrize(
    ("spoil", "want"),
    [
        pytest.param(spoil_buffer, "buffer 'model.rotary_emb.inv_freq': other values", id="a buffer's values"),
        pytest.param(spoil_dtype, "buffer 'model.rotary_emb.inv_freq': ", id="a buffer's dtype"),
        pytest.param(spoil_value, "parameter 'model.norm.weight': other values", id="a parameter's values"),
        pytest.param(spoil_tie, "ties of 'lm_head.weight': nothing instead of ", id="a tie"),
        pytest.param(spoil_layer, "module 'model.layers.1.self_attn.layer_idx': 0 instead of 1", id="a layer's number"),
        pytest.param(spoil_mode, "module 'model.layers.1.mlp.training': True instead of False", id="training mode"),
        pytest.param(spoil_config, "config 'rms_norm_eps': 0.001 instead of 1e-06", id="the config"),
        pytest.param(
            lambda module: delattr(module.get_submodule("model"), "norm"),
            "module 'model.norm': nothing instead of LlamaRMSNorm",
            id="a module",
        ),
    ],
)
def test_find_differences_names_each_difference(spoil: Callable[[nn.Module], None], want: str) -> None:
    """Negative control: each kind of difference is named."""
    model = tiny("llama tied")
    fast, library = model.bound("fast").module, model.bound("library").module
    spoil(fast)
    assert any(difference.startswith(want) for difference in find_differences(fast, library)), find_differences(
        fast, library
    )


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def replaced(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


@pytest.mark.parametrize("bind_method", HOWS)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(without("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight", id="missing"),
        pytest.param(without("lm_head.weight"), "lm_head.weight", id="a head missing that is not tied"),
        pytest.param(replaced("model.extra", torch.zeros(3)), "model.extra", id="one too many"),
        pytest.param(replaced("model.norm.weight", torch.zeros(5)), "model.norm.weight", id="another shape"),
        pytest.param(
            replaced("model.norm.weight", torch.zeros(32, dtype=torch.bfloat16)),
            "model.norm.weight",
            id="another dtype",
        ),
    ],
)
def test_tensor_that_does_not_fit_is_refused(
    bind_method: BindMethod, change: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    """A tensor that is missing, unexpected, or of another shape or dtype is named."""
    model = tiny("llama")
    tensors = dict(model.tensors)
    change(tensors)
    with pytest.raises(Refused) as caught:
        bound_over(model, tensors, bind_method)
    assert isinstance(caught.value.failure, ArtifactRejected)
    assert named in caught.value.failure.message


EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize("bind_method", HOWS)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(without(EXPERT), id="missing"),
        pytest.param(replaced(EXPERT, torch.zeros(5, 32)), id="another shape"),
        pytest.param(replaced(EXPERT, torch.zeros(32, 32, dtype=torch.bfloat16)), id="another dtype"),
        pytest.param(replaced("model.layers.2.mlp.experts.6.up_proj.weight", torch.zeros(32, 32)), id="one too many"),
    ],
)
def test_an_expert_that_does_not_fit_is_refused(
    bind_method: BindMethod, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    """One matrix of one expert is enough to refuse the bind."""
    model = tiny("qwen3 moe")
    tensors = dict(model.tensors)
    change(tensors)
    with pytest.raises(Refused) as caught:
        bound_over(model, tensors, bind_method)
    assert isinstance(caught.value.failure, ArtifactRejected)
    named = "transformers does not load it" if bind_method == "library" else "model.layers.2.mlp.experts"
    assert re.search(f"{named}|model.layers.2.mlp.experts", caught.value.failure.message)


def test_experts_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a fusion that swaps two experts or changes a value is noticed."""
    model, right = tiny("qwen3 moe"), binding.view_or_concat

    def swapped(pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        return right([*pieces[2:4], *pieces[:2], *pieces[4:]], shape)

    def changed(pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        whole = right(pieces, shape).clone()
        whole[-1, -1, -1] += 1
        return whole

    for wrong in (swapped, changed):
        monkeypatch.setattr(binding, "view_or_concat", wrong)
        with pytest.raises(Refused, match="is not the verified tensors"):
            model.bound("fast")


def test_fused_is_a_view_only_where_nothing_lies_between() -> None:
    """Adjacent pieces become a view that keeps them alive. Pieces with a gap, or out of order, are copied."""
    whole = torch.arange(24.0)
    first, second, third = whole[:8].view(2, 4), whole[8:16].view(2, 4), whole[16:].view(2, 4)
    view = view_or_concat([first, second, third], (3, 2, 4))
    assert view.data_ptr() == whole.data_ptr()
    for pieces in ([first, third], [second, first], [first, second.t().contiguous().t()]):
        copy = view_or_concat(pieces, (2, 2, 4))
        assert copy.data_ptr() != pieces[0].data_ptr()
        assert torch.equal(copy, torch.stack(pieces))
    values = view.tolist()
    del whole, first, second, third, pieces
    assert view.tolist() == values


def test_stored_as_one_is_taken_as_it_is() -> None:
    """A checkpoint that stores experts as one parameter needs no fusion."""
    model = tiny("qwen3 moe")
    state = {key: value for key, value in model.tensors.items() if ".experts." not in key}
    bound = model.bound("fast").module
    state |= {key: value.detach() for key, value in bound.named_parameters() if ".experts." in key}
    fast, library = (bound_over(model, state, bind_method).module for bind_method in HOWS)
    assert fast.get_parameter("model.layers.0.mlp.experts.down_proj").data_ptr() in {
        value.data_ptr() for value in state.values()
    }
    assert find_differences(fast, library) == ()


def test_a_config_names_no_kernels() -> None:
    """The library chooses the experts' kernel. A name in the config could make it download one."""
    for key in ("experts_implementation", "_experts_implementation"):
        raw = json.dumps({**json.loads(tiny("qwen3 moe").config_json), key: "deepgemm"}).encode()
        bound = bind(
            tiny("qwen3 moe").manifest,
            raw,
            tiny("qwen3 moe").tensors,
            bind_method="fast",
            dtype=torch.float32,
            device=CPU,
        )
        assert bound.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_either_end_of_a_tie_may_be_stored(kept: str) -> None:
    model = tiny("llama tied")
    tensors = dict(model.tensors)
    tensors[kept] = tensors.pop("model.embed_tokens.weight")
    fast, library = (bound_over(model, tensors, bind_method).module for bind_method in HOWS)
    assert fast.get_parameter("lm_head.weight") is fast.get_parameter("model.embed_tokens.weight")
    assert find_differences(fast, library) == ()


def test_another_interface_is_refused() -> None:
    """A version for another engine interface, or of an unknown architecture, does not start."""
    model = tiny("llama")
    for engine_of in (
        msgspec.structs.replace(model.manifest.engine, interface=2),
        msgspec.structs.replace(model.manifest.engine, architecture="GPTJForCausalLM"),
    ):
        manifest = msgspec.structs.replace(model.manifest, engine=engine_of)
        with pytest.raises(Refused):
            bind(manifest, model.config_json, model.tensors, bind_method="fast", dtype=model.dtype, device=CPU)


def test_models_share_no_config() -> None:
    """Two models have separate configs, even of the same version."""
    model = tiny("llama")
    first, second = model.bound(), model.bound()
    first.config._attn_implementation = "eager"
    assert second.config._attn_implementation == ATTENTION
    assert first.module.config is first.config


@pytest.fixture(name="default_dtype")
def _default_dtype() -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    yield before
    torch.set_default_dtype(before)


def test_a_failed_skeleton_leaves_no_trace(default_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default dtype and torch's initialisers are restored after an error."""
    family = SERVED["LlamaForCausalLM"]
    initialiser = torch.nn.init.kaiming_uniform_
    config = parse_config(family, json.dumps({**CONFIGS["llama"], "hidden_act": "nonsense"}).encode(), torch.bfloat16)
    with pytest.raises(KeyError):
        build_skeleton(family, config)
    assert torch.get_default_dtype() == default_dtype
    assert torch.nn.init.kaiming_uniform_ is initialiser


def test_a_skeleton_makes_no_weights() -> None:
    """Parameters that loading will fill are on meta. Only norms have values."""
    family = SERVED["Qwen2ForCausalLM"]
    module = build_skeleton(family, parse_config(family, tiny("qwen2").config_json, torch.float32))
    real = sum(parameter.numel() for parameter in module.parameters() if not parameter.is_meta)
    assert real <= 7 * 32
    assert not any(buffer.is_meta for buffer in module.buffers())


def test_the_check_for_completeness_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a fast bind that forgets a parameter, copies one, or loses a buffer is refused."""

    def forgetful(family: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
        return build_skeleton(family, config)

    def copying(family: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
        module = bound_fast(family, config, tensors)
        module.get_submodule("model.norm")._parameters["weight"] = nn.Parameter(tensors["model.norm.weight"].clone())
        return module

    def losing(family: Any, config: Any, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
        module = bound_fast(family, config, tensors)
        module.get_submodule("model.rotary_emb")._buffers["inv_freq"] = torch.empty(4, device="meta")
        return module

    bound_fast = binding._bind_fast
    for wrong, rule in (
        (forgetful, "is not the verified tensor"),
        (copying, "is not the verified tensor"),
        (losing, "has no value"),
    ):
        monkeypatch.setattr(binding, "_bind_fast", wrong)
        with pytest.raises(Refused, match=rule):
            tiny("llama").bound("fast")
