"""A scripted engine on a thread of its own, for what asks engines synchronously."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from workers.scripted_engine import ScriptedEngine

LIMIT_S = 60.0


@contextmanager
def served(engine: ScriptedEngine) -> Iterator[None]:
    """Let it answer within the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(LIMIT_S)

    run(engine.start())
    try:
        yield
    finally:
        run(engine.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()
