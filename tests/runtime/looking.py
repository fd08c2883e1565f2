"""Filters in this process: the same looking without a socket, and what may go wrong with them."""

import asyncio
from dataclasses import dataclass, field

from contracts.errors import Refused, Unavailable
from contracts.filters import Findings, Question
from filters.pii import look
from runtime.screening import FilterProcess


@dataclass
class Looking(FilterProcess):
    """The filters in this process: the same looking, without a socket. `away` is how many questions get no answer."""

    away: int = 0
    asked: list[Question] = field(default_factory=list)
    guests: list[str] = field(default_factory=list)  # for whom
    unseen: int = 0

    def passed_unseen(self, texts: int) -> None:
        self.unseen += texts

    async def ask(self, question: Question, timeout_s: float, guest: str = "") -> Findings:
        self.asked.append(question)
        self.guests.append(guest)
        if len(self.asked) <= self.away:
            raise Refused(Unavailable("the filters"))
        return self.ask_from_thread(question, timeout_s)

    def ask_from_thread(self, question: Question, timeout_s: float) -> Findings:
        return Findings(looked=tuple(look(text, question.rules, question.whole) for text in question.texts))


@dataclass
class Skipping(Looking):
    """As above, after `skip` questions that get their answer."""

    skip: int = 0

    async def ask(self, question: Question, timeout_s: float, guest: str = "") -> Findings:
        if self.skip:
            self.skip -= 1
            return self.ask_from_thread(question, timeout_s)
        return await super().ask(question, timeout_s, guest)


class Hanging(Looking):
    """Answers nothing until it is told to, or its time is over."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    async def ask(self, question: Question, timeout_s: float, guest: str = "") -> Findings:
        self.asked.append(question)
        async with asyncio.timeout(timeout_s):
            await self.told.wait()
        raise Refused(Unavailable("the filters"))
