"""Waiting for a state, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(reached: Callable[[], bool], *, within_s: float = 15.0) -> None:
    """Return when the state is reached; TimeoutError if it is not in time."""
    async with asyncio.timeout(within_s):
        while not reached():  # noqa: ASYNC110 - the state has no event to wait for
            await asyncio.sleep(0.005)
