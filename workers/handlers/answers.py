"""The reward rule of tasks that end in `answer: NUMBER`: right, and found with the tool."""

from __future__ import annotations

import re

from common.episode import Message
from workers.handlers.base import Score, succeeded

INTEGER = re.compile(r"-?\d+", re.ASCII)
MARKUP = re.compile("</?tool_call>")
MAX_DIGITS = 20
"""Longer numbers are wrong without a look: turning thousands of digits into a number is refused by Python."""


def score_answer(transcript: tuple[Message, ...], answer: int) -> Score:
    """Reward 1 only if the last integer of the final answer is `answer` and a tool call succeeded before it.

    The final answer is a last message by the assistant without tool calls, not even malformed ones; without one the
    reward is 0.
    """
    last = transcript[-1]
    is_final = last.role == "assistant" and not last.tool_calls and not MARKUP.search(last.content)
    integers = INTEGER.findall(last.content) if is_final else []
    correct = bool(integers) and len(integers[-1]) <= MAX_DIGITS and int(integers[-1]) == answer
    used_tool = any(succeeded(message) for message in transcript)
    return Score(
        reward=float(correct and used_tool),
        parts={"answered": float(is_final), "correct": float(correct), "used_tool": float(used_tool)},
    )
