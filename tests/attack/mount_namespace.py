"""Run `kelvin` in its own mount namespace, with small tmpfs disks for the data directory and its staging folder.

`python -m tests.attack.mount_namespace up --data DIRECTORY ...`, with the sizes in the environment. Needs root.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

DATA_BYTES: Final = "ATTACK_DATA_BYTES"
STAGING_BYTES: Final = "ATTACK_STAGING_BYTES"
_NAMESPACED: Final = "ATTACK_NAMESPACED"


def main() -> None:
    """Enter the namespace, mount both disks, and execute `kelvin`."""
    words = sys.argv[1:]
    if not os.environ.get(_NAMESPACED):
        os.environ[_NAMESPACED] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, "-m", "tests.attack.mount_namespace", *words])
    data = Path(words[words.index("--data") + 1])
    for place, size in ((data, DATA_BYTES), (data / "staging", STAGING_BYTES)):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = f"size={os.environ[size]},mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "attack", str(place)], check=True)
    command = [sys.executable, "-m", "kelvin.cli.main", *words]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
