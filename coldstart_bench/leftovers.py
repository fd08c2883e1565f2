"""What must not be left: of an installation that runs and rests, and of one that has ended."""

import contextlib
from pathlib import Path
from typing import Final

_UNFINISHED: Final = {
    "a push": "staging/*/*/declared.json",
    "a draft": "store/*/drafts/[0-9a-f]*",
    "an object that was being written": "store/.staging/*",
    "a chunk that was being written": "cache/.staging/*",
}


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
    found = [f"process {pid} is left: {name}" for pid, name in _processes_of(data)]
    found += [f"a meter page is left: {page.name}" for page in (data / "run" / "meters").glob("[0-9]*")]
    found += [f"records are left: {path.name}" for path in (data / "spool").glob("[!.]*/*") if path.stat().st_size]
    return found


def _processes_of(data: Path) -> list[tuple[int, str]]:
    """Those that were started with it and live, zombies among them not: id and name, of proc(5)."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"KELVIN_DATA={data}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append((int(place.name), (place / "comm").read_text().strip()))
    return found
