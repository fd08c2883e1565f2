"""Whether two modules are the same to the last value: the quick bind is taken where it made the library's module."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def compare(fast: nn.Module, library: nn.Module) -> tuple[str, ...]:
    """Every difference that could change an answer, in words; () where `fast` is exactly the library's module."""
    differences: list[str] = []

    def check(what: str, mine: Mapping[str, object], theirs: Mapping[str, object]) -> None:
        for name in sorted({*mine, *theirs}):
            one, other = mine.get(name, "nothing"), theirs.get(name, "nothing")
            if one != other:
                differences.append(f"{what} '{name}': {one} instead of {other}")

    check("module", _module_facts(fast), _module_facts(library))
    check("config", _config_facts(fast), _config_facts(library))
    for kind, mine, theirs in (
        ("parameter", _named(fast.named_parameters), _named(library.named_parameters)),
        ("buffer", _named(fast.named_buffers), _named(library.named_buffers)),
    ):
        facts, their_facts = ({name: _tensor_facts(t) for name, t in tensors.items()} for tensors in (mine, theirs))
        check(kind, facts, their_facts)
        alike = [name for name in facts if facts[name] == their_facts.get(name)]
        differences.extend(f"{kind} '{name}': other values" for name in alike if not is_same(mine[name], theirs[name]))
    check("ties of", _ties(fast), _ties(library))
    return tuple(differences)


def is_same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Value by value."""
    # The same memory holds the same values: then nothing has to be read.
    return mine.data_ptr() == theirs.data_ptr() or torch.equal(mine, theirs)


def _config_facts(module: nn.Module) -> dict[str, object]:
    config: Any = module.config
    return {key: value for key, value in config.to_dict().items() if not key.startswith("_")}


def _named(iterate: Callable[..., Any]) -> dict[str, torch.Tensor]:
    return dict(iterate(remove_duplicate=False))


def _module_facts(module: nn.Module) -> dict[str, object]:
    """Tree, classes, mode, and the plain numbers and texts that forwards read (`layer_idx`, `scaling`, ...)."""
    plain = (bool, int, float, str, type(None))
    facts: dict[str, object] = {}
    for name, child in module.named_modules():
        facts[name] = type(child).__qualname__
        for key, value in vars(child).items():
            if isinstance(value, plain) and not key.startswith("_") and key != "name_or_path":
                facts[f"{name}.{key}"] = value
    return facts


def _tensor_facts(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _ties(module: nn.Module) -> dict[str, object]:
    """By name of a tied parameter, all names of it."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: names for names in groups.values() if len(names) > 1 for name in names}
