"""An activator with a tenant leak: one of its answer stores ignores tenants. The file KELVIN_LEAKS names it: `once`,
`cache`, `ladder`, or nothing, and may change while it runs. Run as a program.
"""

import os
from pathlib import Path
from typing import Any


def main() -> None:
    """Install the leak and run the activator."""
    from activator import __main__
    from activator.answers import idempotency, response_cache

    leaks = Path(os.environ["KELVIN_LEAKS"])
    derive, name = vars(idempotency)["derive_answer_key"], response_cache.ResponseStore.derive_cache_key
    original_init, last_answer_stores = response_cache.ResponseCache.__init__, list[response_cache.ResponseStore]()
    current_store = "cache"

    def effective_tenant(store: str, tenant: str) -> str:
        return "everybody" if leaks.read_text() == store else tenant

    def init(self: response_cache.ResponseCache, *given: Any) -> None:
        original_init(self, *given)
        last_answer_stores.append(self.old_responses)

    def wrapped_name(self: response_cache.ResponseStore, *given: Any) -> Any:
        nonlocal current_store
        current_store = "ladder" if self in last_answer_stores else "cache"
        return name(self, *given)

    def derive_for_key(secret: bytes, tenant: str, *more: Any) -> Any:
        return derive(secret, effective_tenant("once", tenant), *more)

    def derive_for_answer(secret: bytes, tenant: str, *more: Any) -> Any:
        return derive(secret, effective_tenant(current_store, tenant), *more)

    vars(idempotency)["derive_answer_key"], vars(response_cache)["derive_answer_key"] = (
        derive_for_key,
        derive_for_answer,
    )
    vars(response_cache)["ResponseStore"].derive_cache_key, vars(response_cache)["ResponseCache"].__init__ = (
        wrapped_name,
        init,
    )
    __main__.main()


if __name__ == "__main__":
    main()
