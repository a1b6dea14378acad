"""The tiny policies that ship: right now and then, never by habit, and always in form."""

from __future__ import annotations

import asyncio

import pytest
import torch
from pydantic import JsonValue
from transformers import Qwen3ForCausalLM

from benchmarks.commands_only import CommandsOnly
from common.config import TINY_MODELS
from common.episode import Message
from workers.handlers.base import Handler
from workers.handlers.calculator import Calculator
from workers.handlers.shell import Shell
from workers.render import Renderer
from workers.sandbox.protocol import ExecResult

PAD = 0


class ListedFiles(CommandsOnly):
    """A sandbox that knows `ls` and `cat NAME`: a policy's commands never reach this machine."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        match command.split():
            case ["ls"]:
                return ExecResult(exit_code=0, output="\n".join(sorted(self.files)), timed_out=False)
            case ["cat", name] if name in self.files:
                return ExecResult(exit_code=0, output=self.files[name], timed_out=False)
        return ExecResult(exit_code=1, output="", timed_out=False)


class Episode:
    """A task being played."""

    def __init__(self, handler: Handler, payload: dict[str, JsonValue], renderer: Renderer) -> None:
        prepared = handler.init(payload)
        self.handler, self.payload, self.renderer = handler, payload, renderer
        self.sandbox = ListedFiles(prepared.files)
        self.messages = list(prepared.messages)
        self.ids = renderer.first_prompt(prepared.messages, prepared.tools)
        self.well_formed = True
        self.over = False

    async def take(self, sampled: list[int]) -> None:
        parsed = self.renderer.parse(sampled)
        self.well_formed &= parsed.error is None and sampled[-1] == self.renderer.close_id
        self.messages.append(Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls))
        self.over = not self.well_formed or not parsed.tool_calls
        if not self.over:
            calls = [await self.handler.call_tool(call, self.payload, self.sandbox) for call in parsed.tool_calls]
            results = [Message(role="tool", content=text) for text in calls]
            self.messages += results
            self.ids = [*self.ids, *sampled, *self.renderer.suffix(results)]

    @property
    def reward(self) -> float:
        return self.handler.eval(self.payload, tuple(self.messages)).reward


def play(handler: Handler, model: Qwen3ForCausalLM, *, num_tasks: int, greedy: bool) -> list[Episode]:
    """Play tasks to their end, all in one batch, at most four turns of 40 tokens."""
    torch.manual_seed(0)
    assert model.name_or_path is not None
    renderer = Renderer.from_folder(model.name_or_path)
    episodes = [Episode(handler, payload, renderer) for payload in handler.tasks(seed=7, num_tasks=num_tasks)]
    for _ in range(4):
        live = [episode for episode in episodes if not episode.over]
        if live:
            turns = sample(model, [episode.ids for episode in live], renderer.close_id, greedy=greedy)
            for episode, turn in zip(live, turns, strict=True):
                asyncio.run(episode.take(turn))
    return episodes


def sample(model: Qwen3ForCausalLM, prompts: list[list[int]], close_id: int, *, greedy: bool) -> list[list[int]]:
    """One turn for each prompt, cut after the close token."""
    width = max(len(ids) for ids in prompts)
    padded_BT = torch.tensor([[PAD] * (width - len(ids)) + ids for ids in prompts])
    mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    choice = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    turns = model.generate(padded_BT, attention_mask=mask_BT, max_new_tokens=40, **choice)[:, width:].tolist()
    return [turn[: turn.index(close_id) + 1] if close_id in turn else turn for turn in turns]


@pytest.mark.parametrize(("name", "handler"), [("tiny-calculator", Calculator()), ("tiny-shell", Shell())])
def test_a_shipped_policy_keeps_the_form_and_leaves_room_for_learning(name: str, handler: Handler) -> None:
    model = Qwen3ForCausalLM.from_pretrained(TINY_MODELS / name, dtype=torch.float32)

    sampled = play(handler, model, num_tasks=192, greedy=False)
    greedy = play(handler, model, num_tasks=64, greedy=True)

    assert sum(episode.well_formed for episode in sampled) / 192 > 0.93
    assert 0.10 < sum(episode.reward for episode in sampled) / 192 < 0.30
    assert all(episode.well_formed for episode in greedy)
    assert sum(episode.reward for episode in greedy) / 64 < 0.05
