from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import pytest

from common.config import RolloutConfig
from common.episode import FinishReason, Message, Sampled, ToolCall, ToolSpec, Turn, VersionSpan
from common.errors import EpisodeError
from common.outcomes import Outcome
from workers.agent import Agent, Generated, OutOfTime
from workers.engine_errors import ContextOverflow
from workers.prompts import sample_ids
from workers.sandbox.protocol import OutOfMemory
from workers.tool_calls import ParsedTurn

CLOSE = 0
"""The token that closes a turn; every other token of these tests is a character code."""


class CharRenderer:
    """One token a character: small enough to see every id."""

    keep_thinking = True

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return [ord(character) for message in messages for character in message.content]

    def suffix(self, messages: Sequence[Message], *, after: Sequence[int]) -> list[int]:
        end = [] if after[-1] == CLOSE else [CLOSE]
        return [*end, ord("|"), *self.first_prompt(messages, ()), ord(">")]

    def rewritten(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
        raise AssertionError("keep_thinking")

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        text = "".join(chr(token) for token in ids if token != CLOSE)
        if text.startswith("!"):
            return ParsedTurn(content=text, tool_calls=(), error="bad form")
        calls = (ToolCall(name="t", arguments={"x": text[1:]}),) if text.startswith("@") else ()
        return ParsedTurn(content=text, tool_calls=calls, error=None)


def said(text: str, finish: FinishReason = FinishReason.STOP) -> Sampled:
    ids = (*[ord(character) for character in text], *((CLOSE,) if finish is FinishReason.STOP else ()))
    spans = (VersionSpan(version=3, start=0, end=len(ids)),)
    return Sampled(ids=ids, logprobs=tuple(-0.5 for _ in ids), spans=spans, finish_reason=finish)


class Scripted:
    """Answers the prompts it gets with a fixed list of turns, and keeps what it was sent."""

    def __init__(
        self,
        *turns: Sampled | Exception,
        max_turns: int = 4,
        spent_s: Callable[[], float] = lambda: 0.0,
        on_format_error: Literal["end", "tell"] = "end",
    ) -> None:
        self.turns = list(turns)
        self.prompts: list[list[int]] = []
        self.saved: list[Turn] = []
        self.called: list[ToolCall] = []
        self.hanging_call: str | None = None
        self.cut: Exception = OutOfTime("cut off")
        self.agent = Agent(
            renderer=CharRenderer(),
            config=RolloutConfig(max_turns=max_turns, episode_timeout_s=10, on_format_error=on_format_error),
            generate=self.generate,
            call_tool=self.call_tool,
            save=self.save,
            spent_s=spent_s,
        )

    async def generate(self, prompt: list[int]) -> Generated:
        self.prompts.append(prompt)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return Generated(sampled=turn, engine="engine", latency_ms=5)

    async def call_tool(self, call: ToolCall) -> str:
        self.called.append(call)
        if call.arguments["x"] == self.hanging_call:
            raise self.cut
        return f"r{json.dumps(call.arguments['x'])}"

    async def save(self, turn: Turn) -> None:
        self.saved.append(turn)

    async def play(self, stored: Sequence[Turn] = (), tools: Sequence[str] = ()) -> Outcome:
        specs = [ToolSpec(name=name, description="", parameters={}) for name in tools]
        played = await self.agent.play([Message(role="user", content="go")], specs, stored)
        self.saved += [played.last] if played.last else []
        return played.outcome


async def test_every_prompt_is_what_was_sent_and_sampled_before_plus_the_suffix():
    script = Scripted(said("@a"), said("@b"), said("done"))

    assert await script.play() is Outcome.FINISHED

    assert script.prompts[0] == [ord("g"), ord("o")]
    for turn, (before, after) in zip(
        script.saved[:-1], zip(script.prompts[:-1], script.prompts[1:], strict=True), strict=True
    ):
        assert after == before + list(turn.sampled.ids) + list(script.saved[turn.index + 1].suffix_ids)
    assert sample_ids(script.saved) == script.prompts[-1] + list(said("done").ids)


async def test_tool_results_follow_the_call_in_the_stored_messages():
    script = Scripted(said("@a"), said("done"))
    await script.play()
    assert [(message.role, message.content) for message in script.saved[0].messages] == [
        ("assistant", "@a"),
        ("tool", 'r"a"'),
    ]


@pytest.mark.parametrize(
    ("turns", "outcome"),
    [
        ([said("done")], Outcome.FINISHED),
        ([said("!x")], Outcome.FORMAT_ERROR),
        ([said("@a", FinishReason.LENGTH)], Outcome.TOKEN_LIMIT),
        ([said("@a"), said("@b")], Outcome.TURN_LIMIT),
        ([said("@a"), ContextOverflow("too long")], Outcome.CONTEXT_LIMIT),
    ],
)
async def test_each_way_to_end_keeps_what_was_sampled(turns: list[Sampled | Exception], outcome: Outcome):
    script = Scripted(*turns, max_turns=2)
    assert await script.play() is outcome
    assert len(script.saved) == sum(isinstance(turn, Sampled) for turn in turns)


async def test_a_cut_off_or_last_turn_calls_no_tool():
    cut = Scripted(said("@a", FinishReason.LENGTH))
    last = Scripted(said("@a"), max_turns=1)
    await cut.play()
    await last.play()
    assert cut.called == last.called == []


async def test_goes_on_after_stored_turns_without_playing_them_again():
    first = Scripted(said("@a"), said("done"))
    await first.play()
    second = Scripted(said("done"))

    assert await second.play(first.saved[:1]) is Outcome.FINISHED

    assert second.prompts == first.prompts[1:]
    assert [turn.index for turn in second.saved] == [1]
    assert second.called == []


async def test_an_episode_whose_last_turn_is_stored_ends_without_another_request():
    first = Scripted(said("done"))
    await first.play()
    again = Scripted()
    assert await again.play(first.saved) is Outcome.FINISHED
    assert again.prompts == []


async def test_a_spent_time_budget_ends_between_turns():
    script = Scripted(said("@a"), said("done"), spent_s=lambda: 11.0 if script.prompts else 0.0)
    assert await script.play() is Outcome.AGENT_TIMEOUT
    assert len(script.saved) == 1


async def test_a_tool_that_is_cut_off_ends_the_episode_with_its_turn_also_for_whoever_goes_on():
    script = Scripted(said("@a"), said("@b"))
    script.hanging_call = "b"
    assert await script.play() is Outcome.AGENT_TIMEOUT
    assert [message.role for message in script.saved[1].messages] == ["assistant"]

    again = Scripted()
    assert await again.play(script.saved) is Outcome.AGENT_TIMEOUT
    assert again.prompts == []


async def test_a_sandbox_that_died_of_its_memory_is_an_outcome_of_the_agent():
    script = Scripted(said("@a"), said("@b"), said("done"))
    script.hanging_call, script.cut = "b", OutOfMemory("sandbox 7-1: the command server has ended")
    assert await script.play() is Outcome.MEMORY_LIMIT
    assert Outcome.MEMORY_LIMIT.is_agent
    assert not Outcome.SANDBOX_EXPIRED.is_agent
    assert [message.role for turn in script.saved for message in turn.messages] == ["assistant", "tool", "assistant"]


async def test_a_request_that_is_cut_off_ends_the_episode_with_the_turns_before_it():
    script = Scripted(said("@a"), OutOfTime("cut off"))
    assert await script.play() is Outcome.AGENT_TIMEOUT
    assert len(script.saved) == 1


async def test_a_first_request_that_is_cut_off_says_nothing_about_the_agent():
    with pytest.raises(EpisodeError, match="no turn: cut off") as caught:
        await Scripted(OutOfTime("cut off")).play()
    assert caught.value.outcome is Outcome.STAGE_TIMEOUT


async def test_a_task_that_does_not_fit_is_no_fault_of_the_agent():
    script = Scripted(ContextOverflow("520 ids, the context has 512"))
    with pytest.raises(EpisodeError, match="first prompt of 2 ids: 520 ids") as caught:
        await script.play()
    assert (caught.value.outcome, caught.value.is_final) == (Outcome.HANDLER_FAILED, True)


class Unshowable(CharRenderer):
    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        raise ValueError("model: the chat template failed: no role 'critic'")


async def test_first_messages_that_the_template_cannot_show_are_not_tried_again():
    script = Scripted(said("done"))
    script.agent = replace(script.agent, renderer=Unshowable())
    with pytest.raises(
        EpisodeError, match="the first prompt cannot be made: model: the chat template failed"
    ) as caught:
        await script.play()
    assert (caught.value.outcome, caught.value.is_final) == (Outcome.HANDLER_FAILED, True)
    assert script.prompts == []


async def test_a_malformed_turn_is_told_and_stays_in_the_prompt_as_sampled():
    script = Scripted(said("!x"), said("done"), on_format_error="tell")

    assert await script.play() is Outcome.FINISHED

    told = script.saved[0].messages[1:]
    assert [(message.role, message.content) for message in told] == [("tool", "error: bad form")]
    assert script.prompts[1] == [*script.prompts[0], *said("!x").ids, *script.saved[1].suffix_ids]
    assert script.called == []


async def test_a_malformed_turn_that_is_the_last_one_is_told_to_nobody():
    script = Scripted(said("!x"), said("!y"), max_turns=2, on_format_error="tell")

    assert await script.play() is Outcome.TURN_LIMIT
    assert [len(turn.messages) for turn in script.saved] == [2, 1]


async def test_an_episode_goes_on_after_a_stored_malformed_turn():
    first = Scripted(said("!x"), said("done"), on_format_error="tell")
    await first.play()
    second = Scripted(said("done"), on_format_error="tell")

    assert await second.play(first.saved[:1]) is Outcome.FINISHED
    assert second.prompts == first.prompts[1:]


async def test_a_tool_that_was_never_offered_gives_the_same_result_whatever_the_handler():
    script = Scripted(said("@a"), said("done"))

    assert await script.play(tools=["u"]) is Outcome.FINISHED

    assert script.saved[0].messages[1].content == "unknown tool: t"
    assert script.called == []


async def test_offered_tools_are_called():
    script = Scripted(said("@a"), said("done"))
    await script.play(tools=["u", "t"])
    assert [call.name for call in script.called] == ["t"]


async def test_a_cut_off_turn_leaves_the_turns_before_it_and_itself_whole():
    long = said("@" + "a" * 50)
    cut = said("b" * 9, FinishReason.LENGTH)
    script = Scripted(long, long, cut)

    assert await script.play() is Outcome.TOKEN_LIMIT

    assert [turn.sampled for turn in script.saved] == [long, long, cut]
    assert sample_ids(script.saved) == [*script.prompts[-1], *cut.ids]


async def test_a_turn_that_another_token_stopped_is_closed_in_the_next_prompt():
    stopped = said("@a")
    stopped = replace(stopped, ids=(*stopped.ids[:-1], ord("$")))
    script = Scripted(stopped, said("done"))

    await script.play()

    assert script.saved[1].suffix_ids[:2] == (CLOSE, ord("|"))
    assert script.saved[0].sampled.ids == stopped.ids
