"""Parse a Dockerfile into stages and check it. Docker is not needed."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

UNWANTED: Final = ("apt-get", "gcc", "curl", "wget", "git ")
INSTALLS: Final = re.compile(r"\bpip (\S+ )*install ")
USER: Final = "65532:65532"


@dataclass(slots=True)
class Stage:
    """One `FROM` and its instructions."""

    name: str
    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def given(self, instruction: str) -> list[str]:
        """Return the arguments of all instructions of this kind, in order."""
        return [rest for what, rest in self.steps if what == instruction]


def stages_of(text: str) -> dict[str, Stage]:
    """Return the stages by name. Raises ValueError for an invalid line."""
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.M))
    for line in filter(None, map(str.strip, joined.splitlines())):
        what, _, rest = line.partition(" ")
        if what == "FROM":
            if (found := re.fullmatch(r"(\S+) AS (\S+)", rest)) is None:
                raise ValueError(f"a stage without a name: {line}")
            current = stages[found[2]] = Stage(found[2], found[1])
        elif what not in ("ARG", "RUN", "COPY", "ENV", "WORKDIR", "USER", "ENTRYPOINT", "CMD"):
            raise ValueError(f"no instruction: {line}")
        elif current is not None:
            current.steps.append((what, rest))
        elif what != "ARG":
            raise ValueError(f"before the first stage: {line}")
    return stages


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """Return the stages of an image, from its base to itself."""
    found = [stages[name]]
    while found[0].parent in stages:
        found.insert(0, stages[found[0].parent])
    return found


def extras_of(stages: dict[str, Stage]) -> set[str]:
    """Return the project's extras that any stage installs."""
    installs = [rest for stage in stages.values() for rest in stage.given("RUN")]
    return {
        name for rest in installs for found in re.findall(r"'\.\[([a-z0-9,]+)\]'", rest) for name in found.split(",")
    }


def problems(text: str, targets: tuple[str, ...]) -> Iterator[str]:
    """Yield each broken rule."""
    stages = stages_of(text)
    if ":latest" in text or re.search(r"^ARG BASE=\S+:\S+", text, flags=re.M) is None:
        yield "the base has no version"
    for stage in stages.values():
        if stage.parent not in stages and stage.parent != "${BASE}":
            yield f"{stage.name}: another base"
        for rest in stage.given("COPY"):
            source = re.match(r"--from=(\S+)", rest)
            if source and source[1] not in stages:
                yield f"{stage.name}: copies from nowhere"
        for rest in filter(INSTALLS.search, stage.given("RUN")):
            words = shlex.split(rest)
            if "--constraint" not in words or words[words.index("--constraint") + 1] != "constraints.txt":
                yield f"{stage.name}: installs whatever is newest"
            if "compileall" not in words or "unchecked-hash" not in words:
                yield f"{stage.name}: compiles at each start"
    for name in targets:
        parts = lineage(stages, name)
        users = [rest for part in parts for rest in part.given("USER")]
        if users[-1:] != [USER]:
            yield f"{name}: runs as {users[-1:]}"
        for rest in (rest for part in parts for rest in part.given("RUN")):
            yield from (f"{name}: has {each.strip()}" for each in UNWANTED if each in rest)
            if INSTALLS.search(rest):
                yield f"{name}: has what only a build needs"
        if any("--from=" not in rest for part in parts for rest in part.given("COPY")):
            yield f"{name}: has sources"
        entry = [rest for part in parts for rest in part.given("ENTRYPOINT")]
        if entry[-1:] != ['["kelvin"]']:
            yield f"{name}: begins with {entry[-1:]}"
