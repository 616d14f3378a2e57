"""Starts the engines of a replica set."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cloister.engine.client import EngineClient
from cloister.types.errors import MemoryBudgetError


async def start_replicas(replicas: Sequence[EngineClient], num_sharing: int) -> BaseException | None:
    """Starts engines concurrently. If one cannot start, cancels the others and returns its error.

    Args:
        num_sharing: number of replicas that share the memory, including those that do not run at first.
    """
    starting = [asyncio.create_task(replica.start()) for replica in replicas]
    try:
        done, _ = await asyncio.wait(starting, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in starting:
            task.cancel()
    await asyncio.gather(*starting, return_exceptions=True)
    error = next((task.exception() for task in done if task.exception() is not None), None)
    if isinstance(error, MemoryBudgetError) and num_sharing > 1:
        return _advise(error, num_sharing)
    return error


def _advise(error: MemoryBudgetError, num_sharing: int) -> MemoryBudgetError:
    """Returns the memory error of one of `num_sharing` replicas, with the number of replicas that would fit, if it is known."""
    if error.fit is None:
        return MemoryBudgetError(f"{error.message}; or start fewer replicas: {num_sharing} share the memory", param=error.param)
    if not (num_fitting := int(error.fit * num_sharing)):
        return error
    # Without the engine's advice to raise its share, which follows from their number.
    problem = error.message.partition("; ")[0]
    advice = f"start {num_fitting} replicas at most, since {num_sharing} share the memory"
    return MemoryBudgetError(f"{advice}: of each, {problem}", param=error.param)
