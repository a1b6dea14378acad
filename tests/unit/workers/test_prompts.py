"""Rewritten histories: the next turn begins a new sample with its whole prompt, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from common.config import RolloutConfig
from common.episode import FinishReason, Message, Sampled, ToolCall, ToolSpec, Turn
from common.errors import EpisodeError
from common.outcomes import Outcome
from tests.unit.workers.test_agent import CharRenderer, said
from workers.agent import Agent, Generated, OutOfTime, Played
from workers.prompts import conversation, extended, rewritten, sample_ids
from workers.render import Call, first_difference, split_samples
from workers.tool_calls import ParsedTurn

FIRST = (Message(role="user", content="go"),)
Compact = Callable[[tuple[Message, ...]], tuple[Message, ...] | None]


class Forgetful(CharRenderer):
    """A template that shows no turn's thinking, which is what stands before a `~`."""

    keep_thinking = False

    def rewritten(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
        if not any("~" in message.content for message in messages[-2:]):
            return None
        shown = [message.model_copy(update={"content": message.content.split("~")[-1]}) for message in messages]
        return [*self.first_prompt(shown, tools), ord(">")]

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        end = ids.index(ord("~")) + 1 if ord("~") in ids else 0
        thought = "".join(map(chr, ids[:end]))
        parsed = super().parse(ids[end:])
        return replace(parsed, content=thought + parsed.content)


class Script:
    """Plays fixed turns, and keeps what was sent and returned."""

    def __init__(
        self, *turns: Sampled, renderer: CharRenderer | None = None, compact: Compact | None = None, **rollout: int
    ) -> None:
        self.turns = list(turns)
        self.calls: list[Call] = []
        self.saved: list[Turn] = []
        self.asked: list[tuple[Message, ...]] = []
        self.compacts = compact
        self.agent = Agent(
            renderer=renderer or CharRenderer(),
            config=RolloutConfig.model_validate({"max_turns": 9, **rollout}),
            generate=self.generate,
            call_tool=self.call_tool,
            save=self.save,
            spent_s=lambda: 0.0,
            compact=self.compact if compact else None,
        )

    async def generate(self, prompt: list[int]) -> Generated:
        sampled = self.turns.pop(0)
        self.calls.append(Call(prompt_ids=tuple(prompt), sampled_ids=sampled.ids))
        return Generated(sampled=sampled, engine="engine", latency_ms=1)

    async def call_tool(self, call: ToolCall) -> str:
        return f"r{call.arguments['x']}"

    async def save(self, turn: Turn) -> None:
        self.saved.append(turn)

    async def compact(self, messages: tuple[Message, ...]) -> tuple[Message, ...] | None:
        self.asked.append(messages)
        assert self.compacts is not None
        return self.compacts(messages)

    async def play(self, stored: Sequence[Turn] = ()) -> Played:
        played = await self.agent.play(FIRST, (), stored)
        self.saved += [played.last] if played.last else []
        return played

    def rows(self, before: Sequence[Turn] = ()) -> list[list[tuple[int, ...]]]:
        """Given and sampled pieces of each sample, from the turns as they are stored."""
        turns = [*before, *self.saved]
        return [
            [ids for turn in turns if turn.sample == sample for ids in (turn.suffix_ids, turn.sampled.ids)]
            for sample in range(turns[-1].sample + 1)
        ]


def of_calls(calls: Sequence[Call]) -> list[list[tuple[int, ...]]]:
    """The same, told from the wire."""
    return [[segment.ids for segment in sample] for sample in split_samples(calls)]


def only_last_result(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return (*FIRST, messages[-1])


async def test_a_history_that_is_never_rewritten_is_one_sample_of_suffixes() -> None:
    script = Script(said("@a"), said("@b"), said("done"), compact=only_last_result, compact_tokens=99)
    await script.play()

    assert script.asked == []
    assert [(turn.sample, turn.compacted) for turn in script.saved] == [(0, None)] * 3
    assert script.rows() == of_calls(script.calls)
    assert sum(len(turn.suffix_ids) for turn in script.saved) < 2 * len(script.calls[-1].prompt_ids)


async def test_a_compacted_history_begins_a_sample_with_its_whole_prompt() -> None:
    script = Script(said("@a"), said("@b"), said("@c"), said("done"), compact=only_last_result, compact_tokens=14)
    await script.play()

    assert [turn.sample for turn in script.saved] == [0, 0, 1, 1]
    assert bytes(script.saved[2].suffix_ids) == b"gorb"
    assert script.saved[2].compacted == (*FIRST, Message(role="tool", content="rb"))
    assert [turn.compacted for turn in script.saved if turn.index != 2] == [None] * 3
    assert script.rows() == of_calls(script.calls)
    assert script.asked == [
        conversation(FIRST, script.saved[:2]),
    ]


async def test_what_was_compacted_is_what_the_next_compaction_is_given() -> None:
    script = Script(said("@a"), said("@b"), said("@c"), said("done"), compact=only_last_result, compact_tokens=7)
    await script.play()

    assert [turn.sample for turn in script.saved] == [0, 1, 2, 3]
    assert [message.content for message in script.asked[1]] == ["go", "ra", "@b", "rb"]


@pytest.mark.parametrize("compact", [lambda messages: None, lambda messages: messages], ids=["None", "unchanged"])
async def test_a_handler_that_leaves_the_history_breaks_nothing(compact: Compact) -> None:
    script = Script(said("@a"), said("@b"), said("done"), compact=compact, compact_tokens=2)
    await script.play()

    assert len(script.asked) == 2
    assert [turn.sample for turn in script.saved] == [0, 0, 0]
    assert script.rows() == of_calls(script.calls)


async def test_a_template_that_drops_thinking_begins_a_sample_at_that_turn_alone() -> None:
    script = Script(said("@a"), said("hm~@b"), said("@c"), said("oh~done"), renderer=Forgetful())
    await script.play()

    assert [turn.sample for turn in script.saved] == [0, 0, 1, 1]
    assert bytes(script.saved[2].suffix_ids) == b"go@ara@brb>"
    assert script.rows() == of_calls(script.calls)


@pytest.mark.parametrize("num_stored", [1, 2, 3, 4])
async def test_whoever_goes_on_sends_what_the_first_would_have_sent(num_stored: int) -> None:
    turns = [said("@a"), said("@b"), said("@c"), said("@d"), said("done")]
    first = Script(*turns, compact=only_last_result, compact_tokens=14)
    await first.play()
    second = Script(*turns[num_stored:], compact=only_last_result, compact_tokens=14)
    stored = first.saved[:num_stored]

    await second.play(stored)

    assert second.calls == first.calls[num_stored:]
    assert [*stored, *second.saved] == first.saved
    assert first.saved[-1].sample >= 1


async def test_compaction_that_is_cut_off_ends_the_episode_with_its_turns() -> None:
    def slow(messages: tuple[Message, ...]) -> None:
        raise OutOfTime("compact was cut off")

    script = Script(said("@a"), compact=slow, compact_tokens=2)
    assert (await script.play()).outcome is Outcome.AGENT_TIMEOUT
    assert len(script.saved) == 1


async def test_a_full_row_ends_the_episode_and_keeps_every_turn() -> None:
    script = Script(said("@a"), said("@b"), max_row_tokens=14)
    assert (await script.play()).outcome is Outcome.TOKEN_LIMIT
    assert [turn.sampled for turn in script.saved] == [said("@a"), said("@b")]
    assert len(script.calls) == 2


async def test_a_compacted_history_makes_room_in_the_row() -> None:
    script = Script(*[said("@a")] * 5, said("done"), compact=only_last_result, compact_tokens=11, max_row_tokens=14)
    assert (await script.play()).outcome is Outcome.FINISHED
    assert all(len(made.prompt_ids) < 14 for made in script.calls)


async def test_a_turn_s_own_limit_cuts_that_turn_and_none_of_those_before() -> None:
    long = said("@" + "a" * 30)
    cut = said("b" * 9, FinishReason.LENGTH)
    script = Script(long, cut, max_tokens_per_turn=32, max_row_tokens=1000)
    assert (await script.play()).outcome is Outcome.TOKEN_LIMIT
    assert [turn.sampled for turn in script.saved] == [long, cut]


async def test_a_first_prompt_that_fills_the_row_is_no_fault_of_the_agent() -> None:
    with pytest.raises(EpisodeError, match=r"first prompt of 2 ids: rollout\.max_row_tokens is 2") as caught:
        await Script(max_row_tokens=2).play()
    assert (caught.value.outcome, caught.value.is_final) == (Outcome.HANDLER_FAILED, True)


@pytest.mark.parametrize(("num_prompt", "left"), [(10, 5), (96, 4), (100, 0), (120, -20)])
def test_a_turn_gets_what_is_left_of_its_row(num_prompt: int, left: int) -> None:
    assert RolloutConfig(max_tokens_per_turn=5, max_row_tokens=100).max_sampled(num_prompt) == left
    assert RolloutConfig(max_tokens_per_turn=5).max_sampled(num_prompt) == 5


def test_a_prompt_that_begins_with_all_before_is_no_break_however_it_was_made() -> None:
    turns = [replace(_turn(0), sample=2)]
    before = sample_ids(turns)

    assert rewritten(turns, [*before, 9]) == extended(turns, [9])
    for other in (before, before[:-1], [*before[:-1], 5, 9], [9, *before]):
        made = rewritten(turns, other)
        assert (made.sample, made.num_before, made.suffix_ids) == (3, 0, tuple(other))
        assert first_difference(before, other) is not None or other == before


def _turn(index: int) -> Turn:
    return Turn(index=index, suffix_ids=(1, 2), sampled=said("a"), messages=(), engine="engine", latency_ms=1)
