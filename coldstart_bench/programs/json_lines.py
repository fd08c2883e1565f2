"""Answer lines of JSON with lines of JSON, if needed in a fork, which gives each measurement a fresh process.

`program_runner.py` is the other end. Imports nothing of Kelvin.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

TRUNCATED = 2_000  # longest error text, in characters


def answer_lines(answer: Callable[..., object]) -> None:
    """Print `ready`, then answer each line until stdin ends. The fields of a line become arguments of `answer`. An
    exception becomes the `error` of the answer.
    """
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            result = answer(**json.loads(line))
        except Exception as error:
            result = _error_answer(error)
        print(json.dumps(result), flush=True)


def run_in_fork(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `measure` in a forked child and return its result, or `error`: the exception, or how the child ended."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        os.dup2(2, 1)  # keep output of libraries out of the answers
        try:
            result = measure()
        except BaseException as error:
            result = _error_answer(error)
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        return {"error": f"its process ended with {os.waitstatus_to_exitcode(status)}"}
    found: dict[str, Any] = json.loads(answer)
    return found


def _error_answer(error: BaseException) -> dict[str, Any]:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return {"error": f"{type(error).__name__}: {error}"[:TRUNCATED]}
