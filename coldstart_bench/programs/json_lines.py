"""How a program of the bench answers: a line of JSON for each line of JSON, in a fork where it needs a fresh process.

`program_runner.py` is the other end. Imports nothing of Kelvin.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

TRUNCATED = 2_000  # characters of an error


def answer_lines(answer: Callable[..., object]) -> None:
    """Say `ready`, then answer each line until stdin ends. The question's fields are arguments of `answer`; what it
    raises is the answer's `error`.
    """
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            said = answer(**json.loads(line))
        except Exception as error:
            said = _as_answer(error)
        print(json.dumps(said), flush=True)


def run_in_fork(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `measure` returns in a child of this process, or `error`: what it raised, or how the child ended."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        os.dup2(2, 1)  # what a library prints is no answer
        try:
            said = measure()
        except BaseException as error:
            said = _as_answer(error)
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        return {"error": f"its process ended with {os.waitstatus_to_exitcode(status)}"}
    found: dict[str, Any] = json.loads(answer)
    return found


def _as_answer(error: BaseException) -> dict[str, Any]:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return {"error": f"{type(error).__name__}: {error}"[:TRUNCATED]}
