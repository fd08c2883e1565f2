"""Show the main features on this machine, from an empty directory to a bill. Run it with `make demo`.

Starts Kelvin on a free port in a temporary directory and pushes two models. Streams from each over HTTPS with the
official client, waits until nothing runs, starts a model again from the host tier, and prints the bill. Everything is
removed at the end, also on Ctrl-C. KEEP=1 keeps it running until Ctrl-C.
"""

import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import openai

from coldstart_bench.harness.installation import Installation, running_installation
from coldstart_bench.harness.program_runner import Program, make_model
from kelvin.process.python_command import python_command

TINYLM = Path(__file__).parent / "tinylm" / "model"
SIZE_BYTES = 500_000_000
KELVIN = python_command("kelvin.cli.main")


def say(text: str) -> None:
    """Print the heading of a step."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Print what the block waits for, and how long it took."""
    print(f"   … {what}", end="", flush=True)
    began = time.monotonic()
    yield
    print(f" ({time.monotonic() - began:.1f} s)", flush=True)


def command(installation: Installation, *words: str) -> str:
    """Run a Kelvin command as a user would. Print the command and its output."""
    print(f"   $ kelvin {' '.join(words)}", flush=True)
    done = subprocess.run(
        [*KELVIN, *words, "--data", str(installation.data)], stdout=subprocess.PIPE, text=True, check=True
    )
    print("".join(f"   {line}\n" for line in done.stdout.splitlines()), end="", flush=True)
    return done.stdout


def stream(client: openai.OpenAI, model: str, prompt: str) -> tuple[float, str]:
    """Stream a completion to the terminal. Return the seconds to its first token, and the request id."""
    began, first = time.perf_counter(), 0.0
    raw = client.completions.with_raw_response.create(
        model=model, prompt=prompt, max_tokens=48, temperature=0, stream=True
    )
    print(f"   {prompt!r} → ", end="", flush=True)
    for event in raw.parse():
        first = first or time.perf_counter() - began
        print("".join(choice.text for choice in event.choices), end="", flush=True)
    print(f"\n   first token after {first * 1000:.0f} ms", flush=True)
    return first, raw.headers["x-request-id"]


def tour(installation: Installation, scratch: Path) -> None:
    """Run all steps of the demo once."""
    client = openai.OpenAI(
        base_url=f"https://localhost:{installation.port}/v1",
        api_key=(installation.data / "default.key").read_text().strip(),
        http_client=openai.DefaultHttpxClient(
            verify=ssl.create_default_context(cafile=str(installation.data / "ca.pem"))
        ),
        max_retries=0,
    )
    say("Push two models")
    command(installation, "push", str(TINYLM), "--name", "tinylm")
    with waiting("making a random model of 0.5 GB"):
        make_model(scratch / "half", SIZE_BYTES, seed=1)
    command(installation, "push", str(scratch / "half"), "--name", "half-gigabyte")
    for model in ("tinylm", "half-gigabyte"):
        command(installation, "scale", model, "--max", "1", "--window", "6", "--grace", "0")

    say("Stream from each: the first request starts it")
    _, tiny_id = stream(client, "tinylm", "In the beginning God created")
    first_s, half_id = stream(client, "half-gigabyte", "w1 w2 w3 w4")
    with waiting("measuring the frozen floor of this machine for the larger one"), floor_of(scratch / "half") as floor:
        floor_ms = f"{1000 * min(floor.time_request(list(range(3, 7))) for _ in range(3)):.1f}"
    command(installation, "timeline", tiny_id)
    command(installation, "timeline", half_id, "--floor-ms", floor_ms)

    say("Send no requests: wait until nothing runs")
    with waiting("both models to reach zero (window 6 s, grace 0 s)"):
        for model in ("tinylm", "half-gigabyte"):
            installation.wait(at_zero(installation, model), f"{model} is at zero")

    say("Start again, from the host tier")
    second_s, again_id = stream(client, "half-gigabyte", "w1 w2 w3 w4")
    command(installation, "timeline", again_id, "--floor-ms", floor_ms)

    say("The bill")
    for model in ("tinylm", "half-gigabyte"):
        installation.scale_to_zero(model)
    with waiting("the last replica's lifetime to be in the ledger"):
        installation.wait(lambda: not bill_of(installation)["open_runtimes"], "every lifetime is in the ledger")
    command(installation, "billing", "report", "--tenant", "default", "--month", month())
    client.close()
    bill = bill_of(installation)
    say(
        f"first start {first_s * 1000:.0f} ms · second start {second_s * 1000:.0f} ms · "
        f"bill {bill['total_micros'] / 1e6:.6f} {bill['currency']}"
    )
    print(
        f"""   try next (`make demo KEEP=1` leaves it running):
   curl --cacert {installation.data}/ca.pem https://localhost:{installation.port}/v1/completions \\
        -H "authorization: Bearer $(cat {installation.data}/default.key)" -H "content-type: application/json" \\
        -d '{{"model": "tinylm", "prompt": "In the beginning", "max_tokens": 40, "temperature": 0}}'""",
        flush=True,
    )


def floor_of(directory: Path) -> Program:
    """Return the floor program: a frozen minimal server with this model's weights in memory."""
    return Program("floors.floor", str(directory), "host")


def at_zero(installation: Installation, model: str) -> Callable[[], bool]:
    """Return a check whether no replica of the model runs."""
    return lambda: bool(installation.model(model)["state"] == "zero")


def month() -> str:
    """Return this month in UTC, as YYYY-MM."""
    return time.strftime("%Y-%m", time.gmtime())


def bill_of(installation: Installation) -> Any:
    """Return this month's report of the default tenant."""
    return installation.admin.request("GET", f"/admin/v1/billing/report?tenant=default&month={month()}")


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the demo. Return the exit code: 0 if every step succeeded, 130 if interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job begins with SIGINT ignored
        signal.signal(number, _interrupted)
    scratch = Path(tempfile.mkdtemp(prefix="kelvin-demo-"))
    try:
        say("Start Kelvin")
        with waiting("processes to be ready"):
            ready = running_installation(scratch / "data")
            installation = ready.__enter__()
        try:
            tour(installation, scratch)
            if os.environ.get("KEEP") == "1":
                print("\n   running until Ctrl-C", flush=True)
                signal.pause()
        finally:
            with waiting("everything to end"):
                ready.__exit__(None, None, None)
    except KeyboardInterrupt:
        print("\n   interrupted; cleaned up", flush=True)
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
