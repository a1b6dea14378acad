"""A first prompt that holds turns of the assistant: shown to the model as they are, and never trained."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from tokenizers import Tokenizer

from common.config import TINY_MODELS, RolloutConfig
from common.db import steps, turns
from common.db.episodes import Wakeup
from common.episode import FinishReason, Message, Sampled, ToolCall, ToolSpec, Turn, VersionSpan
from tests.integration.world import World
from trainer.samples import make_samples
from workers.agent import Agent, Generated
from workers.render import Renderer

CALCULATE = ToolSpec(name="calc", description="", parameters={"type": "object", "properties": {}})
HISTORY = (
    Message(role="user", content="2+2?"),
    Message(role="assistant", content="", tool_calls=(ToolCall(name="calc", arguments={"x": "2+2"}),)),
    Message(role="tool", content="4"),
    Message(role="assistant", content="It is 4."),
    Message(role="user", content="And 3+3?"),
)
SHOWN = (
    '<|im_start|>system\n<tools>\n{"name": "calc", "arguments": {}}\n</tools><|im_end|>\n'
    "<|im_start|>user\n2+2?<|im_end|>\n"
    '<|im_start|>assistant\n<tool_call>\n{"name": "calc", "arguments": {"x": "2+2"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\nIt is 4.<|im_end|>\n"
    "<|im_start|>user\nAnd 3+3?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "3+3"}}\n</tool_call><|im_end|>'
RESULT = "\n<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
ANSWER = "It is 6.<|im_end|>"


FOLDER = TINY_MODELS / "tiny-calculator"


class Script:
    """An agent that says CALL and then ANSWER, and what it was asked."""

    def __init__(self) -> None:
        self.renderer = Renderer.from_folder(FOLDER)
        tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self.said = [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in (CALL, ANSWER)]
        self.prompts: list[list[int]] = []
        self.saved: list[Turn] = []
        self.agent = Agent(
            renderer=self.renderer,
            config=RolloutConfig(max_turns=4),
            generate=self.generate,
            call_tool=self.call_tool,
            save=self.save,
            spent_s=lambda: 0.0,
        )

    async def generate(self, prompt: list[int]) -> Generated:
        ids = self.said[len(self.prompts)]
        self.prompts.append(prompt)
        sampled = Sampled(
            ids=ids,
            logprobs=(-0.5,) * len(ids),
            spans=(VersionSpan(version=0, start=0, end=len(ids)),),
            finish_reason=FinishReason.STOP,
        )
        return Generated(sampled=sampled, engine="engine", latency_ms=1)

    async def call_tool(self, call: ToolCall) -> str:
        assert call.arguments == {"x": "3+3"}
        return "6"

    async def save(self, turn: Turn) -> None:
        self.saved.append(turn)

    async def play_into(self, world: World, wakeup: Wakeup) -> None:
        played = await self.agent.play(HISTORY, (CALCULATE,), ())
        assert played.last is not None
        claim = world.must_claim(world.prepare(wakeup))
        with world.database.begin() as conn:
            for turn in self.saved:
                turns.save(conn, claim, turn)
            sampled = turns.save_last(conn, claim, played.last, outcome=played.outcome)
        world.score(sampled)


async def test_turns_of_the_assistant_in_the_first_prompt_are_given_and_not_sampled(world: World) -> None:
    scripts = [Script(), Script()]
    for script, wakeup in zip(scripts, world.feed(1), strict=True):
        await script.play_into(world, wakeup)
    with world.database.begin() as conn:
        step = steps.take_groups(conn, world.run.id, version_in=0, num_groups=1, max_staleness=0).step
        assert step is not None
        (group,) = steps.load_groups(conn, step.id)

    decode = scripts[0].renderer.decode
    assert [decode(prompt) for prompt in scripts[0].prompts] == [SHOWN, SHOWN + CALL + RESULT]
    for episode in group.episodes:
        (row,) = make_samples(episode)
        pieces = [
            (bool(sampled), decode([int(token) for token, _ in piece]))
            for sampled, piece in groupby(zip(row.ids_L, row.mask_L, strict=True), key=itemgetter(1))
        ]
        assert pieces == [(False, SHOWN), (True, CALL), (False, RESULT), (True, ANSWER)]
        assert not row.behaviour_logprobs_L[~row.mask_L].any()
