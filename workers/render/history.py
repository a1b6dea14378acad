"""Splits the calls of an episode into samples wherever a harness rewrote the history; what RUN's own loop never does.

Compared are ids, never texts or messages: content "" and no content, or two spellings of a tool call, are no break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a conversation."""

    ids: tuple[int, ...]
    sampled: bool
    """True for what the policy writes, close token included: loss mask 1. All else is given: mask 0."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One model call as it went over the wire."""

    prompt_ids: tuple[int, ...]
    """The whole prompt that the engine was sent."""
    sampled_ids: tuple[int, ...]
    """What it returned."""


def first_difference(history: Sequence[int], prompt: Sequence[int]) -> int | None:
    """Index of the first id at which `prompt` does not go on from `history`; None = it begins with all of it."""
    for index, token in enumerate(history):
        if index >= len(prompt) or prompt[index] != token:
            return index
    return None


def split_samples(calls: Sequence[Call]) -> list[list[Segment]]:
    """The samples that the calls make, each a list of given and sampled segments in turns, whole calls only.

    A call whose prompt begins with all ids before it continues the sample with one more suffix; any other begins a
    new one with its whole prompt, so that every sampled id is trained behind exactly the ids it was sampled behind.
    The number of breaks is the number of samples less one.
    """
    samples: list[list[Segment]] = []
    history: tuple[int, ...] = ()
    for call in calls:
        if not samples or first_difference(history, call.prompt_ids) is not None:
            samples.append([])
            history = ()
        samples[-1] += [
            Segment(ids=call.prompt_ids[len(history) :], sampled=False),
            Segment(ids=call.sampled_ids, sampled=True),
        ]
        history = call.prompt_ids + call.sampled_ids
    return samples
