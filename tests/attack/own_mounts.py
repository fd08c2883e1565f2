"""`kelvin` in a mount namespace of its own, in which the data directory and its staging are small disks in memory.

`python -m tests.attack.own_mounts DATA_BYTES STAGING_BYTES up --data DIRECTORY ...`. Needs root.
"""

import os
import subprocess
import sys
from pathlib import Path

_NAMESPACED = "ATTACK_NAMESPACED"


def main() -> None:
    """Enter the namespace, mount, and go on as `kelvin`."""
    if not os.environ.get(_NAMESPACED):
        os.environ[_NAMESPACED] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, "-m", "tests.attack.own_mounts", *sys.argv[1:]])
    data_bytes, staging_bytes, *words = sys.argv[1:]
    data = Path(words[words.index("--data") + 1])
    for place, size in ((data, data_bytes), (data / "staging", staging_bytes)):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = f"size={size},mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "attack", str(place)], check=True)
    command = [sys.executable, "-m", "kelvin.main", *words]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
