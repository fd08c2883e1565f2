"""`kelvin push DIR --name M`: make a directory a version of a model. Sends headers first, then only missing chunks."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar

import click
import msgspec
from blake3 import blake3
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import DeadlineExceeded, Refused
from contracts.names import dns_label
from contracts.problem import code_of, to_wire
from contracts.push import Committed, Committing, Missing, Plan, PlannedChunk
from kelvin.push_calls import Door, Patience, PushCalls, open_door
from kelvin.push_directory import Source, scan
from kelvin.push_tensors import is_tensors, scan_tensors

S = TypeVar("S")
T = TypeVar("T")

READERS: Final = 2
SENDERS: Final = 4
ROUNDS: Final = 4  # a plan may expire, a staged chunk may be lost: then it begins again, with what is there
COMMIT_S: Final = 4 * 3600.0


class Progress(Protocol):
    """Told what happens. Called from several threads."""

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """A stage begins; None where its length is unknown."""

    def advance(self, nbytes: int) -> None:
        """So much more of it is done."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What came of a push."""

    committed: Committed
    sent_bytes: int
    ignored: tuple[str, ...]


def push(directory: Path, model: str, door: Door, progress: Progress) -> Committed:
    """Push `directory` as a version of `model`. Raises `Refused`."""
    return push_directory(directory, model, door, progress).committed


def push_directory(
    directory: Path,
    model: str,
    door: Door,
    progress: Progress,
    patience: Patience | None = None,
    beside: Path | None = None,
) -> Pushed:
    """As `push`, and says what was sent and what was left out. Holds at most a few chunks in memory.

    `directory` may be a tensorizer file; `beside` is then where its small files are, unless they lie beside it.
    """
    dns_label(model, "model")
    progress.begin("looking", None)
    source = scan_tensors(directory, beside, progress) if is_tensors(directory) else scan(directory)
    calls = PushCalls(door, patience or Patience())
    attempt = _Attempt(source, calls, progress)
    for _ in range(ROUNDS - 1):
        try:
            return attempt.run(model)
        except Refused as refused:
            # Only what another round can mend: the push is no longer open, or chunks of it were lost.
            if code_of(refused.failure) not in ("not_found", "conflict"):
                raise
    return attempt.run(model)


class _Attempt:
    """One push, over as many rounds as it takes; digests are kept between them."""

    def __init__(self, source: Source, calls: PushCalls, progress: Progress) -> None:
        self._source = source
        self._calls = calls
        self._progress = progress
        self._digests: dict[PlannedChunk, str] = {}
        self._sent_bytes = 0

    def run(self, model: str) -> Pushed:
        """Plan, hash, ask, send, commit. Raises `Refused`."""
        plan = self._calls.plan(self._source.request(model))
        digests = self._hash(plan)
        missing = self._calls.missing(plan.plan_id, digests)
        self._send(plan, digests, missing)
        self._source.check_unchanged()
        committed = self._commit(missing.plan_id, digests)
        return Pushed(committed, self._sent_bytes, self._source.others)

    def _hash(self, plan: Plan) -> tuple[str, ...]:
        self._progress.begin("hashing", plan.total_bytes)

        def digest_of(chunk: PlannedChunk) -> str:
            known = self._digests.get(chunk)
            digest = known or _digest(self._source.read_chunk(chunk))
            self._progress.advance(chunk.length)
            return digest

        digests = tuple(_in_threads(READERS, digest_of, plan.chunks))
        self._digests = dict(zip(plan.chunks, digests, strict=True))
        return digests

    def _send(self, plan: Plan, digests: tuple[str, ...], missing: Missing) -> None:
        lacking = frozenset(missing.digests)
        wanted = {digest: chunk for digest, chunk in zip(digests, plan.chunks, strict=True) if digest in lacking}
        self._progress.begin("sending", sum(chunk.length for chunk in wanted.values()))

        def send(pair: tuple[str, PlannedChunk]) -> int:
            digest, chunk = pair
            data = self._source.read_chunk(chunk)
            if _digest(data) != digest:
                path = chunk.pieces[0].path
                raise Refused(ArtifactRejected(path, "it changed while it was being pushed; nothing was published"))
            self._calls.put_chunk(missing.plan_id, digest, data)
            self._progress.advance(chunk.length)
            return chunk.length

        for length in _in_threads(SENDERS, send, wanted.items()):
            self._sent_bytes += length

    def _commit(self, plan_id: str, digests: tuple[str, ...]) -> Committed:
        give_up_at = time.monotonic() + COMMIT_S
        step = None
        while True:
            answer = self._calls.commit(plan_id, digests)
            if isinstance(answer, Committed):
                return answer
            _check_time(give_up_at, answer)
            if answer.step != step:
                step = answer.step
                self._progress.begin(step, None)


def _check_time(give_up_at: float, answer: Committing) -> None:
    if time.monotonic() > give_up_at:
        raise Refused(DeadlineExceeded(COMMIT_S, f"the commit was {answer.step}"))


def _digest(data: bytes) -> str:
    return blake3(data, max_threads=1).hexdigest()  # our threads share the cores already


def _in_threads(threads: int, function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Results in order; the first failure ends it, and what had not begun is not begun."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(cancel_futures=True)


class Silence:
    """`Progress` that shows nothing."""

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """See `Progress`."""

    def advance(self, nbytes: int) -> None:
        """See `Progress`."""


class Bar:
    """`Progress` as a bar on a terminal's standard error; each stage replaces the one before it."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """See `Progress`."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(stage, total=total_bytes)

    def advance(self, nbytes: int) -> None:
        """See `Progress`."""
        if self._task is not None:
            self._bar.advance(self._task, nbytes)


@contextmanager
def shown_progress(wanted: bool) -> Iterator[Progress]:
    """A bar where it is wanted and standard error is a terminal."""
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield Silence()
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with RichProgress(*columns, console=console, transient=True) as bar:
        yield Bar(bar)


@click.command("push")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--name", "model", required=True, help="The model; its first push creates it.")
@click.option(
    "--with", "beside", type=click.Path(path_type=Path), help="Where config and tokenizer of a .tensors file are."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, also for a refusal.")
def push_command(directory: Path, model: str, beside: Path | None, as_json: bool) -> None:
    """Make DIRECTORY (Hugging Face layout, safetensors; or a .tensors file) a version of a model.

    The last line printed is the version.
    """
    if beside is not None and not is_tensors(directory):
        raise click.UsageError(f"--with {beside}: only for a .tensors file, which {directory} is not")
    try:
        with open_door() as door, shown_progress(not as_json) as progress:
            pushed = push_directory(directory, model, door, progress, beside=beside)
    except Refused as refused:
        if not as_json:
            raise
        click.echo(json.dumps({"error": msgspec.to_builtins(to_wire(refused.failure))}))
        sys.exit(1)
    committed = pushed.committed
    if as_json:
        facts = {"sent_bytes": pushed.sent_bytes, "ignored": pushed.ignored}
        click.echo(json.dumps(msgspec.to_builtins(committed) | facts))
        return
    for path in pushed.ignored:
        click.echo(f"left out: {path}", err=True)
    news = "a new version" if committed.created else "no change: this version was there already"
    size = (
        f"{committed.new_chunks} new chunks, {pushed.sent_bytes / 1e6:.1f} of {committed.total_bytes / 1e6:.1f} MB sent"
    )
    click.echo(f"{committed.model}: {news}; {size}")
    click.echo(committed.version)
