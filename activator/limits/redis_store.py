"""The Redis that several activators share: run scripts by their digests, and know which activators are alive.

A command is never cancelled, because the next command would read its answer. It runs in a task of its own with a
deadline, after which its connection is dropped. No command is repeated, since it may have been executed. Time is
Redis's own.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from math import inf
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from activator import dependencies
from activator.limits.store_errors import StoreFull, StoreUnavailable
from kelvin.contracts.setting_parser import BadSetting

log = logging.getLogger(__name__)

RESPONSE_TIMEOUT_S: Final = dependencies.REDIS.timeout_s
HEARTBEAT_S: Final = 1.0
SILENT_S: Final = 5.0  # a member that is silent for so long no longer counts
CONNECTIONS: Final = 16
BULK_PART: Final = 0.75  # part of Redis's `maxmemory` for kept answers; the rest is for limits
MEMBERS: Final = "kelvin:members"
REFUSED_WRITE: Final = re.compile(r"\b(OOM|MISCONF|READONLY)\b")

# Control scripts must work in a full Redis. Redis refuses a script only if its first write may need memory, so their
# first write needs none (DEL, HDEL, PEXPIRE). For scripts that store much, see `run_storing_script`.

# Input: our name, SILENT_S. Output: the members' names. A beat in the future is from before Redis's clock stepped back,
# and is moved to now.
HEARTBEAT: Final = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('ZADD', KEYS[1], now, ARGV[1])
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')) do
  redis.call('ZADD', KEYS[1], now, name)
end
redis.call('EXPIRE', KEYS[1], ARGV[2] * 2)
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""


class RedisStore:
    """A connection to one Redis. `name` is this activator's name as a member. `response_timeout_s` bounds a command."""

    def __init__(self, redis: Redis, name: str, response_timeout_s: float = RESPONSE_TIMEOUT_S) -> None:
        self._redis = redis
        self.name = name
        self._response_timeout_s = response_timeout_s
        self._running: set[asyncio.Task[Any]] = set()
        self.is_up = False
        self._is_outage_logged = False
        self.write_refusal: str | None = None  # why Redis refuses writes although it answers
        self.member_count = 1
        self.member_names: tuple[str, ...] = (name,)
        self.commands = 0
        self._is_memory_unknown = False
        self._bulk_room = 0.0  # bytes of answers that this activator may write until the next beat

    def __repr__(self) -> str:
        return f"<RedisStore {'up' if self.is_up else 'AWAY'} members={self.member_count} commands={self.commands}>"

    async def send_heartbeat(self) -> None:
        """Record that this activator is alive, and find out whether Redis answers."""
        try:
            names: list[bytes] = await self.run_script(HEARTBEAT, (MEMBERS,), self.name, int(SILENT_S))
            free_bytes: float = await self._wait_result(self._bulk_bytes())
        except StoreUnavailable:
            return
        self._bulk_room = free_bytes / max(1, len(names))
        self.member_names = tuple(sorted(name.decode() for name in names))
        self.member_count = max(1, len(names))
        if not self.is_up:
            log.info("redis answers", extra={"members": self.member_count})
        self.is_up, self._is_outage_logged, self.write_refusal = True, False, None

    async def run(self) -> None:
        """Send a heartbeat every HEARTBEAT_S until cancelled."""
        while True:
            await self.send_heartbeat()
            await asyncio.sleep(HEARTBEAT_S)

    async def close(self) -> None:
        """Wait for running commands, which end by themselves, then close the connections."""
        while self._running:
            await asyncio.wait(self._running)
        await self._redis.aclose(close_connection_pool=True)

    async def run_script(self, script: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> Any:
        """Return the script's result. Cancelling ends the wait, not the command. Raises StoreUnavailable."""
        return await self._wait_result(self._command(script, keys, *arguments))

    async def run_storing_script(
        self, script: str, keys: tuple[str, ...], nbytes: int, *arguments: str | bytes | int
    ) -> Any:
        """Run a script that stores `nbytes`. Raises as `run_script`. Raises StoreFull if that would leave too little
        memory for limits, leases and budgets in the same Redis.
        """
        if nbytes > self._bulk_room:
            raise StoreFull
        self._bulk_room -= nbytes
        return await self.run_script(script, keys, *arguments)

    async def _wait_result(self, command: Awaitable[Any]) -> Any:
        self.commands += 1
        task = asyncio.ensure_future(command)
        self._running.add(task)
        task.add_done_callback(self._on_task_done)
        done, _ = await asyncio.wait((task,), timeout=self._response_timeout_s)
        error = task.exception() if done else TimeoutError(f"no answer in {self._response_timeout_s:g} s")
        if error is None:
            return task.result()
        refusal = _write_refusal(error)
        if not self._is_outage_logged or refusal != self.write_refusal:
            what = f"refuses writes ({refusal})" if refusal else "does not answer"
            log.warning(f"redis {what}; limits are this activator's share", extra={"error": repr(error)})
        self.is_up, self._is_outage_logged, self.write_refusal = False, True, refusal
        raise StoreUnavailable from error

    async def _command(self, script: str, keys: tuple[str, ...], *arguments: str | bytes | int) -> Any:
        """Run a script, each step with a deadline (`open_store`). A new Redis does not know it: send it again."""
        try:
            return await self._redis.evalsha(_digest(script), len(keys), *keys, *arguments)
        except NoScriptError:
            return await self._redis.eval(script, len(keys), *keys, *arguments)

    async def _bulk_bytes(self) -> float:
        """Return how many bytes of answers still fit; 0 if Redis does not tell, e.g. for an account without INFO."""
        try:
            memory: dict[str, int] = await self._redis.info("memory")
            return max(0.0, BULK_PART * (memory["maxmemory"] or inf) - memory["used_memory"])
        except (ResponseError, KeyError) as error:
            if not self._is_memory_unknown:
                log.warning("redis does not tell its memory; answers are kept here", extra={"error": repr(error)})
            self._is_memory_unknown = True
            return 0.0

    def _on_task_done(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: the caller has already been notified


@asynccontextmanager
async def open_store(url: str, name: str, response_timeout_s: float = RESPONSE_TIMEOUT_S) -> AsyncIterator[RedisStore]:
    """Open the Redis at `url`, which may be away. `response_timeout_s` bounds each step of a command. Raises BadSetting
    for an invalid URL. The message shows only the scheme, since a URL may contain a password.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=response_timeout_s,  # for a free connection
            socket_connect_timeout=response_timeout_s,
            socket_timeout=response_timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        pool.connection_class(**pool.connection_kwargs)  # refuse an unknown option here instead of at each attempt
    except (TypeError, ValueError):
        shown = url.partition("://")[0] + "://..."
        raise BadSetting("KELVIN_REDIS", shown, "has an option or a place that can't be read") from None
    store = RedisStore(Redis(connection_pool=pool), name, response_timeout_s)
    try:
        await store.send_heartbeat()
        yield store
    finally:
        await store.close()


def _write_refusal(error: BaseException) -> str | None:
    """Return `OOM`, `MISCONF` or `READONLY` for a refused write, else None. Redis 6 has script errors as text."""
    if isinstance(error, OutOfMemoryError):  # redis-py removes the codes that it knows
        return "OOM"
    if isinstance(error, ReadOnlyError):
        return "READONLY"
    found = REFUSED_WRITE.search(str(error)) if isinstance(error, ResponseError) else None
    return found[0] if found else None


def _digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
