"""Write a tensorizer file with its own library: `python -m snapshotter.intake.tensorizer_writer SAFETENSORS TENSORS`.

A separate program: torch and the library are imported only here, in a process that ends with the work. Its output is
not trusted: the parent process reads it again with `policy/tensors_index.py`.
"""

import sys
from pathlib import Path
from typing import Final

NOT_INSTALLED: Final = 3


def write(source: Path, target: Path) -> None:
    """Write all tensors of `source` to `target` as a flat state dict."""
    from safetensors.torch import load_file
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(target), limit_cpu_concurrency=1)
    try:
        serializer.write_state_dict(load_file(source))
    finally:
        serializer.close()


def main() -> None:
    """Run the program. Exit code 0: the file is written; 3: the library is not installed."""
    source, target = (Path(word) for word in sys.argv[1:3])
    try:
        write(source, target)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"{error.name} is not installed\n")
        sys.exit(NOT_INSTALLED)


if __name__ == "__main__":
    main()
