"""`python -m benchmarks.scripted_policy shell --port N`: an engine of next to no CPU that plays a handler's task.

Its model is a script, everything else is the scripted engine's: pauses, aborts, versions, hot-load. Takes its tokenizer
from a model folder. Some answers are wrong, so that rewards differ within a group.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from common.config import TINY_MODELS
from common.episode import Message, ToolCall
from workers.render import Renderer
from workers.scripted_engine import ScriptedEngine

WRONG_SHARE = 0.4


def play_shell(prompt: str) -> Message:
    """What the agent says next: `ls`, then `cat` of the wanted file, then its code."""
    if code := re.search(r"code (\d+)\n", prompt):
        return _answer(int(code[1]))
    tree = re.search(r"code of (\w+)\.", prompt)
    if tree and (file := re.search(rf"\b{tree[1]}\d+", prompt)):
        return _command(f"cat {file[0]}")
    return _command("ls")


def play_noop(_: str) -> Message:
    """The episode ends with the first turn."""
    return Message(role="assistant", content="done")


PLAYS: dict[str, Callable[[str], Message]] = {"shell": play_shell, "noop": play_noop}


def policy(renderer: Renderer, play: Callable[[str], Message]) -> Callable[[list[int]], list[int]]:
    """Prompt ids to the ids of the whole next turn, close token included. The same turn is rendered once."""
    known: dict[Message, list[int]] = {}

    def reply(prompt_ids: list[int]) -> list[int]:
        said = play(renderer.decode(prompt_ids))
        key = Message(role="assistant", content=said.content + repr(said.tool_calls))
        if key not in known:
            known[key] = list(renderer.segments([Message(role="user", content="?"), said], [])[-1].ids)
        return known[key]

    return reply


def _answer(value: int) -> Message:
    if random.random() < WRONG_SHARE:
        value = random.randint(10, 99)
    return Message(role="assistant", content=f"answer: {value}")


def _command(command: str) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(name="shell", arguments={"command": command}),))


async def serve(engine: ScriptedEngine) -> None:
    """Serve until SIGTERM."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await engine.start()
    await stopped.wait()
    await engine.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripted_policy", description=__doc__)
    parser.add_argument("play", choices=sorted(PLAYS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-s", type=float, default=0.0, help="time from token to token")
    parser.add_argument("--model", type=Path, default=TINY_MODELS / "tiny-shell", help="whose tokenizer to use")
    arguments = parser.parse_args()
    renderer = Renderer.from_folder(arguments.model)
    engine = ScriptedEngine(policy(renderer, PLAYS[arguments.play]), token_s=arguments.token_s, port=arguments.port)
    asyncio.run(serve(engine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
