"""Push a directory as a version of a model: headers first, then only missing chunks.

The command line is in `push_command.py`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import httpx
from blake3 import blake3
from msgspec import structs

from kelvin.cli.artifacts.progress import Progress
from kelvin.cli.artifacts.push_client import BandwidthLimit, PushClient, RetryPolicy
from kelvin.cli.artifacts.push_signing import PushSigner
from kelvin.cli.artifacts.push_source import TensorsOptions, is_tensors, scan, scan_tensors
from kelvin.cli.base.rate_policy import sender_count
from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.push_api import AttestRequest, Committed, Committing, Missing, Plan, PlannedChunk
from kelvin.contracts.errors import Refused
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.traffic_errors import DeadlineExceeded

S = TypeVar("S")
T = TypeVar("T")

READERS: Final = 2
DEFAULT_SENDERS: Final = 4
MAX_ROUNDS: Final = 4  # if a plan expires or a staged chunk is lost, the next round sends only what is missing
COMMIT_TIMEOUT_S: Final = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class PushResult:
    """The result of a push."""

    committed: Committed
    sent_chunks: int
    sent_bytes: int
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The expected result of a push. `missing_*` would be sent."""

    version: str
    exists: bool
    total_bytes: int
    missing_chunks: int
    missing_bytes: int
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Number of parallel senders, and their total rate in bytes per second (None: unlimited)."""

    parallel: int = DEFAULT_SENDERS
    bytes_s: int | None = None
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)


def push_directory(
    directory: Path,
    model: str,
    client: httpx.Client,
    progress: Progress,
    line: TransferOptions | None = None,
    tensors: TensorsOptions | None = None,
    signing: PushSigner | None = None,
) -> PushResult:
    """Push `directory` as a version of `model`. Holds at most one chunk per sender in memory. Raises `Refused`.
    `directory` may be a tensorizer file; `tensors` are its options.
    """
    return _with_retries(
        _PushRun(directory, model, client, progress, line or TransferOptions(), tensors, signing), _PushRun.run
    )


def rehearse(
    directory: Path,
    model: str,
    client: httpx.Client,
    progress: Progress,
    line: TransferOptions | None = None,
    tensors: TensorsOptions | None = None,
) -> DryRunResult:
    """Do all of a push except sending, and keep nothing. Raises `Refused` as the push would."""
    return _with_retries(
        _PushRun(directory, model, client, progress, line or TransferOptions(), tensors), _PushRun.rehearse
    )


def _with_retries(push_run: "_PushRun", run_once: "Callable[[_PushRun], T]") -> T:
    try:
        for _ in range(MAX_ROUNDS - 1):
            try:
                return run_once(push_run)
            except Refused as refused:
                # Another round helps only if the push is no longer open, or chunks of it were lost.
                if refused.failure.code not in ("not_found", "conflict"):
                    raise
        return run_once(push_run)
    finally:
        push_run.stop()


class _PushRun:
    """One push over several rounds. Digests are kept between rounds."""

    def __init__(
        self,
        directory: Path,
        model: str,
        client: httpx.Client,
        progress: Progress,
        line: TransferOptions,
        tensors: TensorsOptions | None,
        signing: PushSigner | None = None,
    ) -> None:
        self._model = require_dns_label(model, "model")
        progress.begin("looking", None)
        wish = tensors or TensorsOptions()
        self._source = scan_tensors(directory, wish, progress) if is_tensors(directory) else scan(directory)
        self._line = line
        self._stopped = threading.Event()
        bandwidth_limit = None if line.bytes_s is None else BandwidthLimit(line.bytes_s, sleep=self._stopped.wait)
        self._calls = PushClient(client, line.retry_policy, self._stopped, bandwidth_limit)
        self._progress = progress
        self._signing = signing
        self._signed: tuple[str, AttestRequest] | None = None
        self._digests: dict[PlannedChunk, str] = {}
        self._sent: list[int] = []

    def stop(self) -> None:
        """Stop sending. Threads that wait for bandwidth or for a retry stop, too."""
        self._stopped.set()

    def run(self) -> PushResult:
        """Plan, hash, ask for missing chunks, send them, commit. Raises `Refused`."""
        plan = self._calls.plan(self._source.request(self._model))
        digests = self._hash(plan)
        missing = self._calls.missing(plan.plan_id, digests)
        self._send(missing, _chunks_of(missing, plan, digests))
        self._source.check_unchanged()
        if self._signing is not None:
            self._attest(self._signing, missing, plan, digests)
        committed = self._commit(missing.plan_id, digests)
        return PushResult(committed, len(self._sent), sum(self._sent), self._source.ignored_paths)

    def rehearse(self) -> DryRunResult:
        """Plan, hash, and ask for missing chunks. Raises `Refused`."""
        plan = self._calls.plan(structs.replace(self._source.request(self._model), dry_run=True))
        digests = self._hash(plan)
        missing = self._calls.missing(plan.plan_id, digests)
        lengths = [chunk.length for chunk in _chunks_of(missing, plan, digests).values()]
        self._source.check_unchanged()
        return DryRunResult(
            missing.version, missing.exists, plan.total_bytes, len(lengths), sum(lengths), self._source.ignored_paths
        )

    def _hash(self, plan: Plan) -> tuple[str, ...]:
        self._progress.begin("hashing", plan.total_bytes)

        def digest_of(chunk: PlannedChunk) -> str:
            known = self._digests.get(chunk)
            digest = known or _digest(self._source.read_chunk(chunk))
            self._progress.advance(chunk.length)
            return digest

        digests = tuple(self._in_threads(READERS, digest_of, plan.chunks))
        self._digests = dict(zip(plan.chunks, digests, strict=True))
        return digests

    def _send(self, missing: Missing, wanted: dict[str, PlannedChunk]) -> None:
        self._progress.begin("sending", sum(chunk.length for chunk in wanted.values()))
        longest = max((chunk.length for chunk in wanted.values()), default=0)

        def send(pair: tuple[str, PlannedChunk]) -> int:
            digest, chunk = pair
            data = self._source.read_chunk(chunk)
            if _digest(data) != digest:
                path = chunk.pieces[0].path
                raise Refused(ArtifactRejected(path, "it changed while it was being pushed; nothing was published"))
            self._calls.put_chunk(missing.plan_id, digest, data)
            self._progress.advance(chunk.length)
            return chunk.length

        threads = sender_count(self._line.parallel, self._line.bytes_s, longest)
        for length in self._in_threads(threads, send, wanted.items()):
            self._sent.append(length)

    def _attest(self, signing: PushSigner, missing: Missing, plan: Plan, digests: tuple[str, ...]) -> None:
        """Sign before the commit, so that the version never appears without its statement."""
        self._progress.begin("signing", None)
        raw = self._calls.manifest_of(missing.plan_id)
        if self._signed is None or self._signed[0] != missing.version:  # a later round sends the same statement
            wish = signing.sign(raw, missing.version, plan, digests, self._source, self._model)
            self._signed = missing.version, wish
        self._calls.attest(missing.plan_id, self._signed[1])

    def _commit(self, plan_id: str, digests: tuple[str, ...]) -> Committed:
        give_up_at = time.monotonic() + COMMIT_TIMEOUT_S
        step = None
        while True:
            answer = self._calls.commit(plan_id, digests)
            if isinstance(answer, Committed):
                return answer
            _check_time(give_up_at, answer)
            if answer.step != step:
                step = answer.step
                self._progress.begin(step, None)

    def _in_threads(self, threads: int, function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        """Yield results in order. On a failure or Ctrl-C, cancel pending items. An unexpected error also stops waiting
        senders.
        """
        pool = ThreadPoolExecutor(threads)
        try:
            yield from pool.map(function, items)
        except Refused:
            raise
        except BaseException:
            self._stopped.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _chunks_of(missing: Missing, plan: Plan, digests: tuple[str, ...]) -> dict[str, PlannedChunk]:
    """Return one occurrence of each missing chunk, by digest."""
    lacking = frozenset(missing.digests)
    return {digest: chunk for digest, chunk in zip(digests, plan.chunks, strict=True) if digest in lacking}


def _check_time(give_up_at: float, answer: Committing) -> None:
    if time.monotonic() > give_up_at:
        raise Refused(DeadlineExceeded(COMMIT_TIMEOUT_S, f"the commit was {answer.step}"))


def _digest(data: bytes) -> str:
    return blake3(data, max_threads=1).hexdigest()  # our reader threads already use the cores
