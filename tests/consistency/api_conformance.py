"""Run schemathesis against an installation: it reads an OpenAPI document, calls every operation and checks the answers.

It runs in its own process, as an outside client that knows only the document.
"""

import copy
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

CHECKS: Final = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "response_headers_conformance", "unsupported_method",
)  # fmt: skip
LIMIT_S: Final = 900.0  # for one run, on a busy machine
Operation = tuple[str, str]  # method, path with its parameters in braces


@dataclass(frozen=True)
class Verdict:
    """The result of a schemathesis run, and the statuses that each operation returned."""

    sound: bool
    said: str
    statuses: Mapping[Operation, frozenset[int]]


def operations(document: Any) -> set[Operation]:
    """Return the operations that an OpenAPI document describes."""
    return {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}


def with_examples(document: Any, parameters: Mapping[str, str], bodies: Mapping[Operation, Any]) -> Any:
    """Return the document with examples of things that exist, because a generator can hardly guess a version.

    `parameters` are keyed by name, or by method, path and name (`GET /a/{b} b`) if the name has another meaning there.
    """
    found = copy.deepcopy(document)
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                name = parameter["name"]
                if (value := parameters.get(f"{method.upper()} {path} {name}", parameters.get(name))) is not None:
                    parameter["examples"] = {"there": {"value": value}}
            if (body := bodies.get((method.upper(), path))) is not None:
                (content,) = operation["requestBody"]["content"].values()
                content["examples"] = {"there": {"value": body}}
    return found


def drive(
    url: str,
    ca: Path,
    document: Any,
    scratch: Path,
    key: str | None,
    *,
    examples: int,
    phases: str = "examples,coverage,fuzzing",
    only: str | None = None,
) -> Verdict:
    """Call every operation of the document, or those of the path `only`. The calls are the same each time."""
    described, heard = scratch / "described.json", scratch / "heard.har"
    described.write_text(json.dumps(document))
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", str(described), "--url", url,
        "--tls-verify", str(ca), "--checks", ",".join(CHECKS), "--phases", phases,
        "--max-examples", str(examples), "--seed", "1", "--generation-deterministic", "--continue-on-failure",
        "--suppress-health-check", "all", "--generation-with-security-parameters", "false",
        "--no-color", "--request-timeout", "60", "--report-har-path", str(heard),
    ]  # fmt: skip
    command += [] if key is None else ["--header", f"Authorization: Bearer {key}"]
    command += [] if only is None else ["--include-path", only]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch, timeout=LIMIT_S)
    said = f"{done.stdout}\n{done.stderr}"
    return Verdict(done.returncode == 0, said, _statuses(heard, document) if heard.exists() else {})


def _statuses(heard: Path, document: Any) -> Mapping[Operation, frozenset[int]]:
    patterns = {path: re.compile(re.sub(r"\\\{[^}]*\\\}", "[^/]*", re.escape(path))) for path in document["paths"]}
    found: defaultdict[Operation, set[int]] = defaultdict(set)
    for entry in json.loads(heard.read_text())["log"]["entries"]:
        asked = urlsplit(entry["request"]["url"]).path
        # Use the pattern with the fewest parameters: a path like /keys/{key_id}/revoke fits several.
        path = next(
            (path for path in sorted(patterns, key=lambda each: each.count("{")) if patterns[path].fullmatch(asked)), ""
        )
        found[entry["request"]["method"], path].add(entry["response"]["status"])
    return {operation: frozenset(statuses) for operation, statuses in found.items()}
