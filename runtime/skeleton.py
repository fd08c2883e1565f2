"""A bound model whose weights are taken away and given again: its modules stay, its parameters change memory.

What each parameter is made of was checked when the model was bound; that is remembered here, and made again of the same
tensors of the same version, wherever they lie by then. How a model is bound is `binding.py`'s.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import Refused
from runtime.binding import BindingFault, check_complete, fuse, stored
from runtime.families import Family


class Skeleton:
    """Of one module. Empty it has every parameter on the meta device: a forward fails rather than reading anything."""

    def __init__(self, family: Family, module: nn.Module) -> None:
        self.module = module
        self._family = family
        self._sources: dict[str, str | None] = {}  # the tensor of each parameter; None: fused of several

    def __repr__(self) -> str:
        return f"<Skeleton {type(self.module).__name__} {'empty' if self._sources else 'full'}>"

    def empty(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let go of `tensors`, over which the module was bound or filled."""
        names = {tensor.data_ptr(): name for name, tensor in tensors.items()}

        def nothing(name: str, parameter: nn.Parameter) -> torch.Tensor:
            fused = name not in tensors and self._family.fusion_of(name) is not None
            self._sources[name] = None if fused else names[parameter.data_ptr()]
            shape, stride = parameter.shape, parameter.stride()
            return torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta")

        _renew(self.module, nothing)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Point every parameter at its place in `tensors`, which are the same version's as those that were let go.

        Raises `Refused(ArtifactRejected)` where afterwards a parameter lies anywhere else.
        """

        def something(name: str, parameter: nn.Parameter) -> torch.Tensor:
            source, fusion = self._sources[name], self._family.fusion_of(name)
            if source is not None:
                return tensors[source].as_strided(parameter.shape, parameter.stride())
            assert fusion is not None
            return fuse(stored(fusion, name, parameter, tensors), tuple(parameter.shape))

        try:
            _renew(self.module, something)
            check_complete(self._family, self.module, tensors)
        except BindingFault as fault:
            raise Refused(ArtifactRejected("config.json", str(fault))) from fault
        self._sources.clear()


def _renew(module: nn.Module, make: Callable[[str, nn.Parameter], torch.Tensor]) -> None:
    """Put a new parameter in each one's place. Ties stay ties."""
    old = dict(module.named_parameters())  # alive until all are replaced, so that no id comes twice
    fresh = {id(each): nn.Parameter(make(name, each), requires_grad=False) for name, each in old.items()}
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[leaf] = fresh[id(parameter)]
