"""The capabilities of `docs/capabilities.toml`: what Kelvin can do, the tests that show each, and on what.

`python -m tests.consistency.capabilities` writes `docs/capabilities.md` from it.
"""

import re
import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TABLE: Final = ROOT / "docs" / "capabilities.toml"
PAGE: Final = ROOT / "docs" / "capabilities.md"
AREAS: Final = {
    "A": "Snapshots and the registry",
    "B": "Cold start",
    "C": "Serving",
    "D": "The front door",
    "E": "Scaling and placement",
    "F": "Rollouts",
    "G": "Observability",
    "H": "Metering and billing",
    "I": "Real-time features",
    "J": "Security and recovery",
    "K": "Targets",
}
_KEYS: Final = {"ids", "says", "shown_by", "shown_on"}
_HEAD: Final = """# Capabilities

The capabilities of Kelvin today, and the tests that show them. A *real* test uses the real thing: processes, files,
Redis, PostgreSQL, a Kubernetes API server. A *fake* one uses a stand-in: an in-memory Kubernetes API, moto's S3, an
emulated device, virtual time. The first column has the ids of requirements; their list is not in this repository.

`python -m tests.consistency.capabilities` writes this page from `capabilities.toml`.
"""


@dataclass(frozen=True, slots=True)
class Capability:
    """One row of the table. `ids` are requirements, `shown_by` pytest ids without parameters, `shown_on` "real" or
    "fake"."""

    ids: tuple[str, ...]
    says: str
    shown_by: tuple[str, ...]
    shown_on: str


def capabilities(text: str) -> list[Capability]:
    """Read the table. Raises ValueError for a row with wrong keys or values."""
    found = []
    for row in tomllib.loads(text)["capability"]:
        if set(row) != _KEYS or row["shown_on"] not in ("real", "fake") or not row["ids"] or not row["shown_by"]:
            raise ValueError(f"a row has ids, says, shown_by, and shown_on, which is real or fake: {row}")
        found.append(Capability(tuple(row["ids"]), row["says"], tuple(row["shown_by"]), row["shown_on"]))
    return found


def page(rows: Iterable[Capability]) -> str:
    """Render the page, with one table per area."""
    parts, area = [_HEAD], ""
    for row in rows:
        if row.ids[0][0] != area:
            area = row.ids[0][0]
            parts.append(f"\n## {AREAS[area]}\n\n| | what | shown by | on |\n|---|---|---|---|\n")
        says = row.says.replace("|", "\\|")
        parts.append(
            f"| {' '.join(row.ids)} | {says} | {', '.join(map(_test_cell, row.shown_by))} | {row.shown_on} |\n"
        )
    return "".join(parts)


def _test_cell(test: str) -> str:
    file, _, name = test.partition("::")
    return f"`{file}`: `{name.rpartition('::')[2]}`"


def unknown_tests(rows: Iterable[Capability]) -> list[str]:
    """Return tests that rows name and that don't exist."""
    return [test for row in rows for test in row.shown_by if not _exists(test)]


def _exists(test: str) -> bool:
    name, _, rest = test.partition("::")
    file, function = ROOT / name, re.escape(rest.rpartition("::")[2])
    return file.is_file() and bool(re.search(rf"^ *(?:async )?def {function}\(", file.read_text(), re.MULTILINE))


def not_shown(rows: Iterable[Capability], red: Collection[str]) -> list[str]:
    """Return the capabilities with a failed test. `red` are pytest ids as a run reports them."""
    tests = {test.partition("[")[0] for test in red}
    return [f"{' '.join(row.ids)}: {row.says}" for row in rows if tests.intersection(row.shown_by)]


def sentences(section: str) -> Iterator[str]:
    """Yield the sentences of a section's bullets, each as one line, without a bullet's title and without its links."""
    for bullet in re.split(r"^- ", section, flags=re.MULTILINE)[1:]:
        text = " ".join(bullet.partition("\n\n")[0].split())
        text = re.sub(r"^\*\*[^*]+\*\*: ", "", text)
        text = re.sub(r" \(\[[^)]*\]\([^)]*\)(?:, \[[^)]*\]\([^)]*\))*\)", "", text)
        yield from (found.strip() for found in re.findall(r"[^.]+(?:\.(?=\S)[^.]+)*\.", text))


def main() -> None:
    PAGE.write_text(page(capabilities(TABLE.read_text())))


if __name__ == "__main__":
    main()
