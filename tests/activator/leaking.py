"""An activator one of whose stores of answers knows no tenants: the one that the file KELVIN_LEAKS names, as that says
by then: `once`, `cache`, `ladder`, or nothing. Run as a program.
"""

import os
from pathlib import Path
from typing import Any


def main() -> None:
    """Leak, and be the activator."""
    from activator import __main__
    from activator.answers import idempotency, response_cache

    leaks = Path(os.environ["KELVIN_LEAKS"])
    asked, name = vars(idempotency)["derive_answer_key"], response_cache.SealedAnswerStore.name
    begin, ladders = response_cache.ResponseCache.__init__, list[response_cache.SealedAnswerStore]()
    asking = "cache"

    def whose(store: str, tenant: str) -> str:
        return "everybody" if leaks.read_text() == store else tenant

    def made(self: response_cache.ResponseCache, *given: Any) -> None:
        begin(self, *given)
        ladders.append(self.last)

    def named(self: response_cache.SealedAnswerStore, *given: Any) -> Any:
        nonlocal asking
        asking = "ladder" if self in ladders else "cache"
        return name(self, *given)

    def of_key(secret: bytes, tenant: str, *more: Any) -> Any:
        return asked(secret, whose("once", tenant), *more)

    def of_answer(secret: bytes, tenant: str, *more: Any) -> Any:
        return asked(secret, whose(asking, tenant), *more)

    vars(idempotency)["derive_answer_key"], vars(response_cache)["derive_answer_key"] = of_key, of_answer
    vars(response_cache)["SealedAnswerStore"].name, vars(response_cache)["ResponseCache"].__init__ = named, made
    __main__.main()


if __name__ == "__main__":
    main()
