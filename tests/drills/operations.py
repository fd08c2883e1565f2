"""Operations of drill clients, each in a process of its own that can be killed: requests, a push, a command."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, Self

from coldstart_bench.harness.request_outcome import (
    ANSWERED,
    CUT,
    FAILED,
    GONE,
    RequestEnd,
    RequestOutcome,
    refused_with,
)
from kelvin.contracts.accounting.usage import KILLED

END_S: Final = 120.0
ROOT: Final = Path(__file__).parents[2]


class PreconditionFailed(Exception):
    """A precondition of a drill does not hold. The text says which."""


class Operation(Protocol):
    """An operation that is in progress as soon as it exists."""

    @property
    def pid(self) -> int:
        """The process id of its client."""

    def is_over(self) -> bool:
        """Return whether it has ended."""

    def outcome(self) -> RequestOutcome:
        """Wait for its end. Return its outcome for the client."""

    def endings(self) -> Sequence[RequestEnd]:
        """Return what the bill will have of it, once it is over."""

    def close(self) -> None:
        """End all its processes."""


class StreamedRequests:
    """Streamed completions, `times` of them at once."""

    def __init__(self, address: Mapping[str, Any], body: Mapping[str, Any], times: int, pace_s: float) -> None:
        """`address` has port, ca and key."""
        self._limit, self._times = int(body["max_tokens"]), times
        asked = {**address, "body": {**body, "stream": True}, "times": times, "pace_s": pace_s}
        command = [sys.executable, "-m", "tests.drills.drill_client", json.dumps(asked)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._events: list[dict[str, Any]] = []
        self._heard = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="caller")
        self._thread.start()

    def __repr__(self) -> str:
        return f"<StreamedRequests pid={self.pid} events={len(self._events)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def words(self) -> int:
        """The number of words of all requests so far."""
        with self._heard:
            return sum(line["count"] for line in self._events if line["type"] == "words")

    def stages(self) -> set[str]:
        """Return the stages that heartbeats have named."""
        with self._heard:
            return {line["stage"] for line in self._events if line["type"] == "beat"}

    def is_finished(self) -> bool:
        """Return whether the text of one request is complete."""
        with self._heard:
            return any(line["type"] == "finish" for line in self._events)

    def is_over(self) -> bool:
        """See `Operation`. True as soon as one of several has ended."""
        with self._heard:
            return self._closed or any(line["type"] == "end" for line in self._events)

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
        """Wait until `condition()`. Raises PreconditionFailed if the request ends before, or after `limit_s`."""
        limit = time.monotonic() + limit_s
        with self._heard:
            while not condition():
                if self._closed or not self._heard.wait(limit - time.monotonic()):
                    raise PreconditionFailed(f"a request: {what}; heard {self._events[-1:]}")

    def is_quiet(self, for_s: float) -> bool:
        """Return whether no event arrives for so long."""
        with self._heard:
            before = len(self._events)
            return not self._heard.wait_for(lambda: len(self._events) > before, for_s)

    def outcome(self) -> RequestOutcome:
        """See `Operation`. Of several requests, returns the first outcome that is not ANSWERED."""
        outcomes = [ending.outcome for ending in self.endings()]
        return next((outcome for outcome in outcomes if outcome != ANSWERED), ANSWERED)

    def endings(self) -> Sequence[RequestEnd]:
        self._thread.join(END_S)
        if self._thread.is_alive():
            raise PreconditionFailed(f"a request does not end; heard {self._events[-1:]}")
        return [self._ending(number) for number in range(self._times)]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:  # the last line of a killed client
                break
            with self._heard:
                self._events.append(event)
                self._heard.notify_all()
        self._process.stdout.close()
        self._process.wait()
        with self._heard:
            self._closed = True
            self._heard.notify_all()

    def _ending(self, number: int) -> RequestEnd:
        events = [line for line in self._events if line["n"] == number]
        words = sum(line["count"] for line in events if line["type"] == "words")
        whole = any(line["type"] == "finish" for line in events)
        how = next((line["how"] for line in events if line["type"] == "end"), "")
        if not how and self._process.returncode != KILLED:
            raise PreconditionFailed(f"a client ended with {self._process.returncode} and without a word")
        outcome = {"done": ANSWERED, "cut": CUT, "": GONE}.get(how) or refused_with(how)
        return RequestEnd(outcome, words, self._limit, whole)


class KelvinCommand:
    """A `kelvin` command. It adds nothing to a bill."""

    def __init__(self, words: Sequence[str]) -> None:
        command = [sys.executable, "-m", "kelvin.cli.main", *words]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
        self._outputs: tuple[str, str] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} pid={self.pid} {self._process.returncode}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def outputs(self) -> tuple[str, str]:
        """Wait for the end. Return both outputs."""
        if self._outputs is None:
            try:
                self._outputs = self._process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                raise PreconditionFailed("a command does not end") from None
        return self._outputs

    def outcome(self) -> RequestOutcome:
        """See `Operation`. A traceback raises PreconditionFailed."""
        out, err = self.outputs()
        match self._process.returncode:
            case 0:
                return ANSWERED
            case -9:
                return GONE
            case 1 if "Traceback" not in err and len(err.strip().splitlines()) <= 1:
                return FAILED
            case status:
                raise PreconditionFailed(f"a command ended with {status}: {out[-300:]}{err[-600:]}")

    def endings(self) -> Sequence[RequestEnd]:
        return ()

    def close(self) -> None:
        self._process.kill()
        self.outputs()


class PushCommand(KelvinCommand):
    """`kelvin push`, slow enough to be killed in between."""

    def __init__(self, directory: Path, model: str, data: Path, rate: str = "16M") -> None:
        super().__init__(
            ["push", str(directory), "--name", model, "--json", "--limit-rate", rate, "--parallel", "1",
             "--data", str(data)]
        )  # fmt: skip

    def outcome(self) -> RequestOutcome:
        """See `Operation`. The code of a refusal is in its JSON."""
        out, err = self.outputs()
        if self._process.returncode in (0, KILLED):
            return super().outcome()
        try:
            return refused_with(json.loads(out)["error"]["code"])
        except (ValueError, KeyError):
            raise PreconditionFailed(
                f"a push ended with {self._process.returncode}: {out[-300:]}{err[-600:]}"
            ) from None
