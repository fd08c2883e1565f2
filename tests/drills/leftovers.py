"""What must not be left: of an installation that runs and rests, and of one that has ended."""

import contextlib
from pathlib import Path
from typing import Final

import psutil

_SHARED: Final = Path("/dev/shm")
_UNFINISHED: Final = {
    "a push": "staging/*/*/declared.json",
    "a draft": "store/*/drafts/[0-9a-f]*",
    "an object that was being written": "store/.staging/*",
    "a chunk that was being written": "cache/.staging/*",
}


def shared_memory() -> frozenset[str]:
    """Names in it that nobody has open or mapped; Kelvin's own memory has none, and goes with its processes."""
    if not _SHARED.is_dir():
        return frozenset()
    names = frozenset(path.name for path in _SHARED.iterdir())  # before it is known who has them: others come and go
    return names - _in_use() if names else names


def _in_use() -> frozenset[str]:
    """By a process that lives, a neighbour of ours as well."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found.update(Path(mapped.path).name for mapped in process.memory_maps() if str(_SHARED) in mapped.path)
            found.update(Path(opened.path).name for opened in process.open_files() if str(_SHARED) in opened.path)
    return frozenset(found)


def unfinished(data: Path) -> list[str]:
    """What nobody will take up again, while nothing is being pushed or admitted."""
    return [f"{what} is left: {path.name}" for what, place in _UNFINISHED.items() for path in data.glob(place)]


def stray_sockets(data: Path) -> list[str]:
    """Of runtimes that are no more."""
    living = {page.name.partition(".")[2] for page in (data / "run" / "meters").glob("[0-9]*")}
    names = {path.name.removeprefix("rt-").removesuffix(".sock") for path in (data / "run").glob("rt-*.sock")}
    return [f"the socket of a dead runtime is left: {name}" for name in sorted(names - living)]


def ended(data: Path) -> list[str]:
    """After `kelvin up` has ended: processes with its data directory, meter pages, records that were not shipped."""
    found = [
        f"process {process.pid} is left: {process.name()}" for process in psutil.process_iter() if _is_of(process, data)
    ]
    found += [f"a meter page is left: {page.name}" for page in (data / "run" / "meters").glob("[0-9]*")]
    found += [f"records are left: {path.name}" for path in (data / "spool").glob("[!.]*/*") if path.stat().st_size]
    return found


def _is_of(process: psutil.Process, data: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("KELVIN_DATA") == str(data)
    return False
