"""`python -m snapshotter.intake.tensorizer_writer SAFETENSORS TENSORS`: write a tensorizer file through its own
library.

A program of its own: torch and the library come in here, in a process that ends with the work. What it wrote is not
trusted: who started it reads it again, by `policy.tensors_index`.
"""

import sys
from pathlib import Path
from typing import Final

NOT_INSTALLED: Final = 3


def write(source: Path, target: Path) -> None:
    """All tensors of one file as a flat state dict of the other."""
    from safetensors.torch import load_file
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(target), limit_cpu_concurrency=1)
    try:
        serializer.write_state_dict(load_file(source))
    finally:
        serializer.close()


def main() -> None:
    """Exit code 0: it is written; 3: the library is not installed."""
    source, target = (Path(word) for word in sys.argv[1:3])
    try:
        write(source, target)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"{error.name} is not installed\n")
        sys.exit(NOT_INSTALLED)


if __name__ == "__main__":
    main()
