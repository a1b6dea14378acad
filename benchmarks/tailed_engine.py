"""`python -m benchmarks.tailed_engine --seed N --port P`: an engine whose answers have a heavy tail of lengths.

How many tokens an episode gets follows from the seed, the task's number and how many of its siblings came before, so
that every way of training meets the same episodes. benchmarks/async_speedup.py compares the ways.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Callable

from pydantic import JsonValue

from benchmarks.scripted_policy import serve
from common.config import TINY_MODELS
from common.episode import Message
from workers.handlers.base import Prepared
from workers.handlers.noop import Noop
from workers.render import Renderer
from workers.scripted_engine import ScriptedEngine

MODEL = TINY_MODELS / "tiny-shell"
MEDIAN_TOKENS = 20
SPREAD = 0.25
"""Standard deviation of the logarithm of a length."""
TAIL_SHARE = 0.02
TAIL_FACTOR = 10
MAX_TOKENS = 450
"""What the model's context has room for; once in 2,000 episodes of the tail is one shorter for it."""
MEAN_TOKENS = MEDIAN_TOKENS * math.exp(SPREAD**2 / 2) * (1 + TAIL_SHARE * (TAIL_FACTOR - 1))
LONG_TOKENS = MEDIAN_TOKENS * TAIL_FACTOR // 2
"""From here on an episode is one of the tail."""


class NumberedTask(Noop):
    """One turn, no tools; the prompt says which task it is. `benchmarks.tailed_engine:NumberedTask`."""

    name = "numbered"

    def init(self, payload: dict[str, JsonValue]) -> Prepared:
        """One short message."""
        return Prepared(messages=(Message(role="user", content=f"Task {payload['number']}."),))


def drawn_tokens(seed: int, number: int, sibling: int) -> int:
    """How many tokens the episode gets."""
    chance = random.Random(f"{seed}:{number}:{sibling}")
    factor = TAIL_FACTOR if chance.random() < TAIL_SHARE else 1
    return min(MAX_TOKENS, round(MEDIAN_TOKENS * factor * chance.lognormvariate(0.0, SPREAD)))


def policy(renderer: Renderer, *, seed: int, group_size: int) -> Callable[[list[int]], list[int]]:
    """Prompt ids to the ids of the turn, as many as were drawn, close token included."""
    said = [Message(role="user", content="?"), Message(role="assistant", content="done")]
    word, *_, close = renderer.segments(said, [])[-1].ids
    come: Counter[int] = Counter()

    def reply(prompt_ids: list[int]) -> list[int]:
        task = re.search(r"Task (\d+)\.", renderer.decode(prompt_ids))
        assert task is not None, "a prompt without a task's number"
        number = int(task[1])
        sibling = come[number] % group_size
        come[number] += 1
        return [word] * (drawn_tokens(seed, number, sibling) - 1) + [close]

    return reply


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tailed_engine", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-running", type=int, required=True, help="requests that it decodes at once")
    parser.add_argument("--token-s", type=float, required=True, help="time from token to token")
    parser.add_argument("--load-s", type=float, required=True, help="time to load weights")
    arguments = parser.parse_args()
    engine = ScriptedEngine(
        policy(Renderer.from_folder(MODEL), seed=arguments.seed, group_size=arguments.group_size),
        token_s=arguments.token_s,
        max_running=arguments.max_running,
        port=arguments.port,
    )
    engine.load_s = arguments.load_s
    asyncio.run(serve(engine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
