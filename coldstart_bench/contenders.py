"""Who is measured by `kelvin bench load`: the program of each, what it reads, and whether it checks what it read."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Contender:
    """A loader. `package` is what it needs beside torch; `file` what its `path` is."""

    name: str
    program: str
    package: str | None
    verifies: bool
    file: Literal["version", "safetensors", "tensors", "directory"]
    arguments: tuple[str, ...] = ()

    @property
    def installed(self) -> bool:
        """Whether its package can be imported; nothing is imported for it."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


KELVIN: Final = Contender("kelvin", "ours", None, True, "version")
TENSORIZER_VERIFY: Final = Contender("tensorizer-verify", "tensorizer_file", "tensorizer", True, "tensors", ("verify",))
PEERS: Final = (
    Contender("tensorizer", "tensorizer_file", "tensorizer", False, "tensors"),
    TENSORIZER_VERIFY,
    Contender("safetensors", "safetensors_file", "safetensors", False, "safetensors"),
    Contender("mmap", "mapped_file", None, False, "safetensors"),
    Contender("runai", "runai_streamer", "runai_model_streamer", False, "safetensors"),
    Contender("fastsafetensors", "fastsafetensors_file", "fastsafetensors", False, "safetensors"),
    Contender("from_pretrained", "pretrained", "transformers", False, "directory"),
)
ALL: Final = (KELVIN, *PEERS)


def chosen(names: Sequence[str]) -> tuple[Contender, ...]:
    """Those of these names, all where there are none. Raises ValueError naming one that there is not."""
    known = {contender.name: contender for contender in ALL}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]}: must be of {', '.join(known)}")
    return tuple(contender for contender in ALL if not names or contender.name in names)
