"""What the next model call is shown: all ids before it and a suffix, or a rewritten history, which begins a new sample.

A sample is a training row. Whether a prompt goes on is decided by comparing ids, never texts or messages, and nothing
is spliced: a prompt that does not begin with every id before it is stored whole, in a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.episode import Message, Turn
from workers.render.history import first_difference


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompt of a turn, and how it is stored."""

    ids: list[int]
    """All of it, as the engine is sent it."""
    num_before: int
    """Ids at its beginning that are those of the turns before it in its sample; 0 = it begins a sample."""
    sample: int
    """0, 1, 2 … within the attempt."""
    compacted: tuple[Message, ...] | None = None
    """What the handler left of the conversation; None = all of it."""

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """What is new in it."""
        return tuple(self.ids[self.num_before :])


def sample_ids(turns: Sequence[Turn]) -> list[int]:
    """All ids of the last turn's sample: what the engine was sent in that turn and what it returned."""
    return [
        token for turn in turns if turn.sample == turns[-1].sample for token in (*turn.suffix_ids, *turn.sampled.ids)
    ]


def conversation(first: Sequence[Message], turns: Sequence[Turn]) -> tuple[Message, ...]:
    """The messages that stand before the next turn: the first ones, or what is left of them, and all that followed."""
    shown = list(first)
    for turn in turns:
        if turn.compacted is not None:
            shown = list(turn.compacted)
        shown += turn.messages
    return tuple(shown)


def extended(turns: Sequence[Turn], suffix: Sequence[int]) -> Prompt:
    """The prompt that goes on from the last turn."""
    before = sample_ids(turns)
    return Prompt(ids=[*before, *suffix], num_before=len(before), sample=turns[-1].sample)


def rewritten(turns: Sequence[Turn], ids: Sequence[int], *, compacted: tuple[Message, ...] | None = None) -> Prompt:
    """The prompt `ids`, whose history may have been rewritten: it begins a sample unless it begins with all before."""
    before = sample_ids(turns)
    goes_on = len(ids) > len(before) and first_difference(before, ids) is None
    return Prompt(
        ids=list(ids),
        num_before=len(before) if goes_on else 0,
        sample=turns[-1].sample + (0 if goes_on else 1),
        compacted=compacted,
    )
