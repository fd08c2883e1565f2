"""One holder per name, others side by side, and nothing kept of names that nobody wants."""

import asyncio

from snapshotter.turns import NamedLocks


async def test_locks() -> None:
    """Two of one name never overlap; two names do; a cancelled waiter leaves no trace."""
    locks = NamedLocks()
    inside: list[str] = []
    both = asyncio.Barrier(2)

    async def hold(name: str) -> None:
        async with locks.hold(name):
            assert name not in inside
            inside.append(name)
            async with asyncio.timeout(30):
                await both.wait()  # only with the other name's holder
            inside.remove(name)

    async with asyncio.TaskGroup() as tasks:
        for name in ("a", "b", "a", "b"):
            tasks.create_task(hold(name))
    async with locks.hold("a"):
        waiter = asyncio.create_task(hold("a"))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert len(locks) == 1
    assert len(locks) == 0
    assert repr(locks) == "<NamedLocks []>"
