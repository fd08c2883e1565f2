"""Apply a version's content filters to prompts and responses. The filters run in another process.

Unfiltered text reaches the client only if a filter gave no answer and the policy allows that.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final
from weakref import WeakValueDictionary

from msgspec import structs

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.filter_api import (
    CHECK_PATH,
    DEADLINE_HEADER,
    DIRECTIONS,
    POLICY_FILE,
    TENANT_HEADER,
    FilteredText,
    FilterPolicy,
    FilterRequest,
    FilterResponse,
    FilterRule,
    apply_result,
    read_policy,
    rules_for_direction,
)
from kelvin.contracts.artifacts.manifest import Kind
from kelvin.contracts.errors import InvalidRequest, LimitExceeded, Refused
from kelvin.contracts.serving.stream_frames import Counts
from kelvin.contracts.traffic_errors import ContentFiltered, DeadlineExceeded, FilterFailed
from kelvin.ipc.service_client import ServiceClient
from runtime.dependencies import FILTERS
from runtime.drivers.interface import Event
from runtime.models.pinned_files import PinnedFiles
from runtime.surface.answer_builder import AnswerProgress, TextAnswerBuilder
from runtime.surface.openai_requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt

log = logging.getLogger(__name__)

# In a prompt. Takes a quarter of a second for prose, seconds for numbers only; the deadline limits it.
MAX_PROMPT_CHARACTERS: Final = 262_144
MAX_UNDECIDED_CHARACTERS: Final = 65_536  # characters that a filter may leave undecided
MAX_CONCURRENT_CHECKS: Final = 4  # per tenant and replica; the filters have one thread, and one queue for a tenant
_RETRY_PAUSE_S: Final = 0.02  # between attempts of one question; the filter process may be restarting
_SLACK_S: Final = 5.0
_CHECK_TIMEOUT_S: Final = FILTERS.timeout_s
_TEXTS: Final = ("content", "name")  # the fields of a message that a template can show


class FilterClient:
    """A client of the filter process, which may restart: an unanswered question is retried within its deadline. Each
    tenant has at most MAX_CONCURRENT_CHECKS questions of this replica in the process; more wait here. If the process
    refused them and they were retried, they would keep it from answering other tenants.
    """

    def __init__(self, client: ServiceClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._unreported_unfiltered = 0  # not yet reported to the filter process
        # By the caller's tenant. Weak, so a tenant without questions costs nothing: a public model has many callers.
        self._permits = WeakValueDictionary[str, asyncio.Semaphore]()
        self.tenant = ""  # the version's owner, for callers without a guest tenant

    def __repr__(self) -> str:
        return f"<FilterClient tenants={len(self._permits)}>"

    def check_from_thread(self, question: FilterRequest, timeout_s: float) -> FilterResponse:
        """Check from a thread other than the event loop's, as `check` does."""
        future = asyncio.run_coroutine_threadsafe(self.check(question, timeout_s), self._loop)
        return future.result(timeout_s + _SLACK_S)

    def count_unfiltered(self, texts: int) -> None:
        """Count texts that passed without an answer, as their policy allows. The next answered question reports the
        count.
        """
        self._unreported_unfiltered += texts

    async def check(self, question: FilterRequest, timeout_s: float, guest: str = "") -> FilterResponse:
        """Check texts on behalf of a guest, or of the version's own tenant (""). Raises `Refused`.

        A question whose answer is lost is sent again, and the filters then count its texts twice.
        """
        if not self._unreported_unfiltered:
            return await self._check_with_permit(question, timeout_s, guest)
        unreported, self._unreported_unfiltered = self._unreported_unfiltered, 0
        try:
            return await self._check_with_permit(structs.replace(question, unseen=unreported), timeout_s, guest)
        except BaseException:
            self._unreported_unfiltered += unreported
            raise

    async def _check_with_permit(self, question: FilterRequest, timeout_s: float, guest: str) -> FilterResponse:
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        permit = self._permits.setdefault(guest or self.tenant, asyncio.Semaphore(MAX_CONCURRENT_CHECKS))
        try:
            async with asyncio.timeout_at(deadline_s):
                await permit.acquire()
        except TimeoutError:
            raise Refused(DeadlineExceeded(timeout_s, "filtering a text")) from None
        try:
            return await self._check_until(deadline_s, question, guest)
        finally:
            permit.release()

    async def _check_until(self, deadline_s: float, question: FilterRequest, guest: str) -> FilterResponse:
        loop = asyncio.get_running_loop()
        while True:
            left_s = max(deadline_s - loop.time(), 0.001)
            # The filters stop working on a question after its deadline.
            headers = {DEADLINE_HEADER: str(int(left_s * 1000)), TENANT_HEADER: guest or self.tenant}
            try:
                return await self._client.call(
                    "POST", CHECK_PATH, FilterResponse, body=question, timeout_s=left_s, headers=headers
                )
            except Refused as refused:
                if not refused.failure.retryable or deadline_s - loop.time() <= _RETRY_PAUSE_S:
                    raise
            await asyncio.sleep(_RETRY_PAUSE_S)


@dataclass(frozen=True, slots=True)
class FilterPipeline:
    """The filters of one version and its policy."""

    policy: FilterPolicy
    filters: FilterClient

    async def filter_prompt(self, prompt: Prompt, field: str, guest: str = "") -> tuple[Prompt, bool]:
        """Return the prompt for the model, and whether some of it passed unfiltered. Raises `Refused`: ContentFiltered,
        FilterFailed, or InvalidRequest for token ids, which filters can't read.
        """
        rules = rules_for_direction(self.policy, "input")
        if not rules:
            return prompt, False
        match prompt:
            case TokenPrompt():
                raise Refused(InvalidRequest(field, "(token ids)", "must be text: this model's filters read it"))
            case TextPrompt(text):
                (passed,) = await self._filter_texts((text,), rules, field, guest)
                return TextPrompt(passed.text), passed.unfiltered
            case ChatPrompt(messages):
                fields = [(index, key) for index, message in enumerate(messages) for key in _TEXTS if message.get(key)]
                passed_texts = await self._filter_texts(
                    [messages[index][key] for index, key in fields], rules, field, guest
                )
                filtered = [dict(message) for message in messages]
                for (index, key), passed in zip(fields, passed_texts, strict=True):
                    filtered[index][key] = passed.text
                return ChatPrompt(tuple(filtered)), any(passed.unfiltered for passed in passed_texts)

    async def _filter_texts(
        self, texts: Sequence[str], rules: tuple[FilterRule, ...], field: str, guest: str
    ) -> Sequence[FilteredText]:
        if (characters := sum(map(len, texts))) > MAX_PROMPT_CHARACTERS:
            raise Refused(LimitExceeded(field, characters, MAX_PROMPT_CHARACTERS, "characters, as it is filtered"))
        question = FilterRequest(direction="input", rules=rules, texts=tuple(texts), whole=True)
        passed = await self.check_texts(question, guest)
        if stopped := [each.stopped for each in passed if each.stopped is not None]:
            raise Refused(ContentFiltered(field, stopped[0]))
        return passed

    def build_output_filter(self, guest: str = "") -> "OutputFilter | None":
        """Return the filter of one response; None if the policy has no rules for responses."""
        rules = rules_for_direction(self.policy, "output")
        return OutputFilter(self, rules, guest) if rules else None

    async def check_texts(self, question: FilterRequest, guest: str = "") -> list[FilteredText]:
        """Return what may pass of each text. Raises `Refused(FilterFailed)` if the policy refuses unchecked text."""
        try:
            response = await self.filters.check(question, self.policy.deadline_ms / 1000, guest)
            if len(response.looked) != len(question.texts):
                raise ValueError(f"{len(response.looked)} answers to {len(question.texts)} texts")
            passed = [apply_result(text, result) for text, result in zip(question.texts, response.looked, strict=True)]
            if any(len(each.pending_text) > (0 if question.whole else MAX_UNDECIDED_CHARACTERS) for each in passed):
                raise ValueError("too much of a text is left undecided")
        except (Refused, ValueError) as error:
            log.warning("a filter gave no answer", extra={"why": str(error), "then": self.policy.on_failure})
            if self.policy.on_failure == "refuse":
                raise Refused(FilterFailed()) from error
            self.filters.count_unfiltered(len(question.texts))
            return [FilteredText(text, unfiltered=True) for text in question.texts]
        return passed


class OutputFilter:
    """The filter of one response. It holds back text that the filters have not decided yet."""

    def __init__(self, filter_pipeline: FilterPipeline, rules: tuple[FilterRule, ...], guest: str) -> None:
        self._filter_pipeline = filter_pipeline
        self._rules = rules
        self._guest = guest
        self._held = ""

    async def push(self, text: str, *, last: bool) -> FilteredText:
        """Return the text that the client may have now. Raises as `FilterPipeline.check_texts` does."""
        if not text and not (last and self._held):
            return FilteredText("")
        question = FilterRequest(direction="output", rules=self._rules, texts=(self._held + text,), whole=last)
        (passed,) = await self._filter_pipeline.check_texts(question, self._guest)
        self._held = passed.pending_text
        return passed


class FilteredAnswerBuilder:
    """The builder of a text response that passes through an output filter. Filtered tokens are counted, too."""

    def __init__(self, answer: TextAnswerBuilder, output_filter: OutputFilter) -> None:
        self._answer = answer
        self._output_filter = output_filter

    @property
    def counts(self) -> Counts:
        """Return the counts of the last event."""
        return self._answer.counts

    async def add_events(self, events: Sequence[Event]) -> AnswerProgress:
        """Add events as `TextAnswerBuilder` does. A filter that stops the text ends it as `content_filter`. Raises
        `Refused`.
        """
        decoded = self._answer.decode_events(events)
        if decoded.failure is not None:
            return self._answer.render_progress(decoded)  # text that is still held back is dropped
        passed = await self._output_filter.push(decoded.text, last=decoded.reason is not None)
        reason = decoded.reason if passed.stopped is None else "content_filter"
        return replace(self._answer.render_progress(decoded, passed.text, reason), unfiltered=passed.unfiltered)


def build_filter_pipeline(files: PinnedFiles, filters: FilterClient | None) -> FilterPipeline | None:
    """Return a version's filters, or None if it pins none. Raises `Refused(ArtifactRejected)`, also if the installation
    runs no filters: such a version is not served without them.
    """
    if POLICY_FILE not in files:
        return None
    policy = read_policy(files[POLICY_FILE])
    if filters is None:
        raise Refused(ArtifactRejected(POLICY_FILE, "this installation runs no filters (KELVIN_FILTERS=off)"))
    return FilterPipeline(policy, filters)


def check_filters(files: PinnedFiles, kind: Kind, filters: FilterClient | None) -> None:
    """Check, before a version exists, that the filters it pins run and know its rules. Raises `Refused`."""
    if (filter_pipeline := build_filter_pipeline(files, filters)) is None:
        return
    if kind != "generate":
        raise Refused(ArtifactRejected(POLICY_FILE, "filters are for models that generate text"))
    for direction in DIRECTIONS:
        rules = rules_for_direction(filter_pipeline.policy, direction)
        question = FilterRequest(direction=direction, rules=rules, texts=("",), whole=True)
        try:
            filter_pipeline.filters.check_from_thread(question, _CHECK_TIMEOUT_S)
        except Refused as refused:
            if refused.failure.retryable:
                raise
            raise Refused(ArtifactRejected(POLICY_FILE, refused.failure.message)) from refused
